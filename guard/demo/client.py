"""The tenants' side: requests to the engine, and what came back."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import httpx

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
DIGITS = "23456789"
SHORTEST_TRACE = 4
"""So many characters of a canary's secret part in a row are a trace of it: (20 * 8)**-2, one in 25,600, by chance."""
_TOO_MANY = 1_000_000


@dataclass(frozen=True)
class Tenant:
    """A customer of the engine."""

    name: str
    key: str


ALICE = Tenant("alice-corp", "key-alice")
BOB = Tenant("bob-corp", "key-bob")
CAROL = Tenant("carol-corp", "key-carol")
DAVE = Tenant("dave-corp", "key-dave")
TENANTS = (ALICE, BOB, CAROL, DAVE)


def new_canary(rng: random.Random) -> str:
    """A code word that nobody can guess; generated, never taken from anybody.

    Letters and digits take turns, so that every one of them makes the same number of tokens.
    """
    return "ZEBRA-" + "".join(rng.choice(LETTERS) + rng.choice(DIGITS) for _ in range(5))


def leaked(canary: str, text: str) -> str:
    """The longest piece of the canary's secret part in the text; empty when it is shorter than `SHORTEST_TRACE`."""
    secret = canary.rpartition("-")[2]
    match = SequenceMatcher(None, secret, text, autojunk=False).find_longest_match()
    return secret[match.a : match.a + match.size] if match.size >= SHORTEST_TRACE else ""


def leaked_bytes(canary: str, text: str) -> int:
    """How many bytes of the canary's secret part stand in the text in a row; see `leaked`."""
    return len(leaked(canary, text))


@dataclass
class Answer:
    """What a tenant got."""

    status: int
    text: str = ""
    code: str = ""
    """The error's code, in the body or in an SSE error event."""
    incident: str = ""
    ended_ns: int = 0
    """When the last byte, or the cut, was seen."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Where the answer says so."""
    rid: str = ""


class Client:
    """All tenants' connections to one engine."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def chat(self, tenant: Tenant, text: str, *, max_tokens: int = 16, **more: Any) -> Answer:
        """One chat completion, not streamed, greedy."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}
        return await self._post(tenant, "/v1/chat/completions", body)

    async def complete(self, tenant: Tenant, prompt: str | list[int], *, max_tokens: int = 16, **more: Any) -> Answer:
        """One completion, not streamed, greedy; `prompt` may be token ids."""
        return await self._post(tenant, "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})

    async def count(self, tenant: Tenant, path: str, **prompt: Any) -> int:
        """How many tokens a prompt has, learned from a refusal: more output is asked for than any context holds."""
        body = {"model": "smollm2", "max_tokens": _TOO_MANY, **prompt}
        response = await self._http.post(path, json=body, headers=_headers(tenant))
        found = re.search(r"prompt has (\d+) tokens", response.text)
        if response.status_code != 400 or found is None:
            raise RuntimeError(f"{path} answered {response.status_code} where it had to refuse: {response.text[:200]}")
        return int(found[1])

    async def _post(self, tenant: Tenant, path: str, body: dict[str, Any]) -> Answer:
        response = await self._http.post(path, json=_greedy(body), headers=_headers(tenant))
        ended = time.time_ns()
        try:
            content = response.json()
        except ValueError:
            content = {}
        answer = Answer(response.status_code, ended_ns=ended, rid=response.headers.get("x-request-id", ""))
        if error := content.get("error"):
            _take_error(answer, error)
        else:
            choice = content["choices"][0]
            answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
            _take_usage(answer, content["usage"])
        return answer

    async def stream(
        self,
        tenant: Tenant,
        prompt: str | list[int],
        *,
        chat: bool = False,
        max_tokens: int = 16,
        on_text: Callable[[str], None] = lambda _: None,
        **more: Any,
    ) -> Answer:
        """One answer, streamed, greedy.

        Args:
            tenant: Whose.
            prompt: Text or token ids.
            chat: Whether the prompt is a user's message.
            max_tokens: At most so many.
            on_text: Called with each piece of text as it comes.
            more: Further fields of the request.
        """
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = _greedy({**asked, "max_tokens": max_tokens, "stream": True, **more})
        path = "/v1/chat/completions" if chat else "/v1/completions"
        async with self._http.stream("POST", path, json=body, headers=_headers(tenant)) as response:
            answer = Answer(response.status_code, rid=response.headers.get("x-request-id", ""))
            if response.status_code != 200:
                content = json.loads(await response.aread())
                answer.ended_ns = time.time_ns()
                _take_error(answer, content["error"])
                return answer
            try:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        answer.ended_ns = time.time_ns()
                        if "error" in event:
                            _take_error(answer, event["error"])
                            continue
                        if event.get("choices"):
                            choice = event["choices"][0]
                            piece = choice["delta"].get("content") or "" if chat else choice["text"]
                            answer.text += piece
                            on_text(piece)
                        if event.get("usage"):
                            _take_usage(answer, event["usage"])
            except httpx.RemoteProtocolError:
                pass  # cut off: what was seen until then is what counts
            return answer

    async def abort(self, rid: str, key: str) -> None:
        """Ends a request by its id."""
        await self._http.post("/abort_request", json={"rid": rid}, headers={"authorization": f"Bearer {key}"})

    async def info(self, key: str) -> dict[str, Any]:
        """What the engine tells about itself."""
        response = await self._http.get("/get_server_info", headers={"authorization": f"Bearer {key}"})
        response.raise_for_status()
        info: dict[str, Any] = response.json()
        return info


class First:
    """Lets one coroutine wait until another's stream has given its first text."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self, _text: str) -> None:
        """Takes a piece of text: any will do."""
        self._event.set()

    async def wait(self) -> None:
        """Until the first text."""
        await self._event.wait()


def _greedy(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "smollm2", "temperature": 0, **body}


def _headers(tenant: Tenant) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant.key}"}


def _take_usage(answer: Answer, usage: dict[str, Any]) -> None:
    answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _take_error(answer: Answer, error: dict[str, Any]) -> None:
    answer.code = str(error.get("code") or "")
    answer.incident = str(error.get("incident") or "")
