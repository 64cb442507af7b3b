"""From tokens to the text that may be shown: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol


class TokenStream(Protocol):
    """An incremental detokenizer."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain by now."""

    def flush(self) -> str:
        """The rest."""


class Output:
    """A request's text as it grows.

    A stop string ends the text where it begins; it is found across token borders, so text that could be the
    beginning of one is held back until it is clear that it is not. Of several stop strings the one that is
    complete first counts, and of those that are complete at once the longest, however the text was cut.

    Args:
        stream: The tokenizer's `stream()`.
        stops: The stop strings.
        silent: Tokens that are counted and not shown: those that end an answer.
    """

    def __init__(self, stream: TokenStream, stops: Collection[str] = (), silent: Collection[int] = ()) -> None:
        self._stream = stream
        self._stops = stops
        self._silent = frozenset(silent)
        self._held = ""
        self.tokens = 0
        """Tokens taken so far, up to the one that completed a stop string."""
        self.stopped = False
        """Whether a stop string came; what is pushed later is nothing."""

    def push(self, tokens: Iterable[int]) -> str:
        """Takes tokens and gives the text that can be shown now."""
        shown: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            if token not in self._silent:
                shown.append(self._take(self._stream.push((token,))))
        return "".join(shown)

    def finish(self) -> str:
        """At the end: what was held back."""
        if self.stopped:
            return ""
        text = self._take(self._stream.flush())
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        if not self._stops or not text:
            return text
        text = self._held + text
        ends = [(at + len(stop), -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, length = min(ends)
            self.stopped, self._held = True, ""
            return text[: end + length]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
