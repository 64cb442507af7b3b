"""What a request's body may hold: OpenAI's fields that the engine understands; others are passed over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.api.errors import ApiError

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
DEFAULT_MAX_TOKENS = 256
"""Output tokens of a request that names no limit, at most; less where the context has less room."""

RID = r"^[A-Za-z0-9_-]{8,64}\Z"

Text = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopList = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Rid = Annotated[str, Meta(pattern=RID)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream is to hold beside the text."""

    include_usage: bool | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have."""

    model: Text
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    """Absent: 1, as in OpenAI's API. 0 is greedy."""
    top_p: TopP | None = None
    seed: Seed | None = None
    n: int | None = None
    stop: StopText | StopList | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Rid | None = None
    """The request's id, if the client wants to choose it."""

    @property
    def limit(self) -> int | None:
        """Output tokens at most, if the client said so."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """What no single type says.

        Raises:
            ApiError: 400, names the field.
        """
        if self.n not in (None, 1):
            raise invalid("n", f"{self.n} answers at once are not supported; ask for 1.")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "It is allowed only together with `stream: true`.")


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """One part of a message in parts; only text is understood."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatAsk(Ask, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None

    @property
    def limit(self) -> int | None:
        """``max_completion_tokens`` is the newer name and goes first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionAsk(Ask, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """Text, token ids, or a list that holds exactly one of these."""
    echo: bool | None = None
    best_of: int | None = None

    def single(self) -> str | list[int]:
        """The one prompt.

        Raises:
            ApiError: 400, it is several, or not text or token ids.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
            if len(prompt) > 1:
                raise invalid("prompt", f"{len(prompt)} prompts in one request are not supported; send one.")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        for place, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool):
                raise invalid("prompt", f"Element {place} is not a token id; send text or a list of integers.")
        return list(prompt)

    def check(self) -> None:
        """See `Ask.check`."""
        super().check()
        if self.echo:
            raise invalid("echo", "The prompt is not echoed; leave it out or send false.")
        if self.best_of not in (None, 1):
            raise invalid("best_of", f"The best of {self.best_of} is not supported; leave it out or send 1.")


class AbortAsk(msgspec.Struct, frozen=True):
    """Body of ``POST /abort_request``."""

    rid: Annotated[str, Meta(min_length=1, max_length=256)]
    incident: str | None = None
    """The guard's incident for which the request is killed; only with the admin key."""


B = TypeVar("B", bound=msgspec.Struct)
_PATH = re.compile(r"(?P<what>.*?)(?: - at `(?P<at>.+)`)?\Z", re.DOTALL)
_FIELD = re.compile(r"\$\.?(?P<field>[^`]*)")


def parse(body: bytes, kind: type[B]) -> B:
    """Reads and checks a body.

    Raises:
        ApiError: 400, it is not JSON, or a field is missing, has the wrong type or value; names the field.
    """
    try:
        ask = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The decoder's own words may quote the body, and bodies are not for logs.
        raise ApiError(400, "invalid_json", "The body is not JSON in UTF-8.") from None
    if isinstance(ask, Ask):
        ask.check()
    return ask


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """Whether every token of a prompt is one that the model has.

    Raises:
        ApiError: 400.
    """
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise invalid("prompt", f"Token {token} at {place} is not within 0 to {vocab - 1}.")


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, code, f"{param}: {message}" if param else message, param=param)


def _wrong_field(text: str) -> ApiError:
    """msgspec's message, as ours: it gives types, limits and the place, never the value, save of enums."""
    match = _PATH.match(text)
    what, at = (match["what"], match["at"]) if match else (text, None)
    field = _FIELD.match(at or "")
    param = field["field"] if field else None
    missing = re.search(r"missing required field `([^`]+)`", what)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(param, "The field is missing.", "missing_required_parameter")
    what = re.sub(r"Invalid (enum )?value '.*'", "The value is not one of those allowed", what, flags=re.DOTALL)
    return invalid(param or None, f"{what}.", "invalid_type" if ", got " in what else "invalid_value")
