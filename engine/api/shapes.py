"""The JSON of answers, whole and in pieces, for both generating routes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


class Shape:
    """How answers of one route look.

    Args:
        request: The request's id.
        model: The model's name.
        chat: Whether it is the chat route.
        wants_usage: Whether a stream ends with a chunk that counts tokens.
    """

    def __init__(self, request: str, model: str, *, chat: bool, wants_usage: bool) -> None:
        self._chat = chat
        self._wants_usage = wants_usage
        name = ("chat.completion" if chat else "text_completion") + "{}"
        self._whole = {"id": request, "object": name.format(""), "created": int(time.time()), "model": model}
        self._piece = {**self._whole, "object": name.format(".chunk" if chat else "")}
        if wants_usage:
            self._piece["usage"] = None

    def whole(self, text: str, finish: str, usage: dict[str, int]) -> bytes:
        """The body of an answer that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return msgspec.json.encode({**self._whole, "choices": [choice], "usage": usage})

    def opening(self) -> bytes:
        """The event that begins a stream; none for completions."""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None) if self._chat else b""

    def text(self, text: str) -> bytes:
        """The event that carries a piece of the text."""
        return self._event({"delta": {"content": text}} if self._chat else {"text": text}, None)

    def closing(self, finish: str, usage: dict[str, int]) -> bytes:
        """The events that end a stream."""
        end = self._event({"delta": {}} if self._chat else {"text": ""}, finish)
        if self._wants_usage:
            end += _event({**self._piece, "choices": [], "usage": usage})
        return end + DONE

    def _event(self, content: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return _event({**self._piece, "choices": [choice]})


def usage(prompt: int, output: int) -> dict[str, int]:
    """The `usage` object."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
