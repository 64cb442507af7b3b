"""No byte before the verdict: tokens wait here until the guard has judged what they were computed from.

Each request's tokens stand in their own line and leave in order. A token may have a bar: the place in this worker's
record stream up to which the guard must have judged before it leaves. A line that waits never holds up another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.config import GuardConfig
from guard.act.board import BoardError, BoardReader, Verdict

_REOPEN_S = 0.1
"""How often a board that is not there is looked for."""

_SHORT_MS, _LONG_MS = 0.05, 1.0
"""The first and the longest wait between two looks at the board."""


@dataclass(frozen=True, slots=True)
class Release:
    """These tokens leave."""

    request: str
    tokens: list[int]
    finish: str | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request gives no further token."""

    request: str
    code: str
    """``kv_guard_killed`` or ``kv_guard_unavailable``."""
    incident: str | None = None


@dataclass(slots=True)
class _Held:
    tokens: list[int]
    finish: str | None
    bar: int
    since: float | None = None
    """When it came to the head of its line."""


@dataclass(slots=True)
class Gate:
    """The lines of one decode worker.

    Args:
        config: When to wait, how long, and what a guard that is not there means.
        stream: This worker's record stream.
        epoch: Its epoch.
        clock: Seconds, never backwards.
    """

    config: GuardConfig
    stream: str
    epoch: int
    clock: Callable[[], float] = time.monotonic
    waits: int = 0
    """Tokens that had to wait."""
    timeouts: int = 0
    """Waits that ran out, or met no guard."""
    _lines: dict[str, deque[_Held]] = field(default_factory=dict)
    _board: BoardReader | None = None
    _next_open: float = 0.0
    _patience_ms: float = _SHORT_MS

    def patience_ms(self) -> float:
        """How long the next `poll` may be put off: short at first, longer while nothing changes."""
        if not self._lines:
            self._patience_ms = _SHORT_MS
            return 100.0
        self._patience_ms = min(2 * self._patience_ms, _LONG_MS)
        return self._patience_ms

    def put(self, request: str, tokens: Iterable[int], *, finish: str | None = None, bar: int = -1) -> None:
        """Sets tokens at the end of the request's line; they leave with a later `poll`.

        Args:
            request: Whose.
            tokens: Tokens, perhaps none with a `finish`.
            finish: ``stop`` or ``length`` with the last ones.
            bar: The record that the guard must have judged first, by its place in the stream; -1: none.
        """
        self._lines.setdefault(request, deque()).append(_Held(list(tokens), finish, bar))

    def drop(self, request: str) -> None:
        """The request is over: what waits never leaves."""
        self._lines.pop(request, None)

    def poll(self) -> list[Release | Refuse]:
        """What may leave now, and who gives no further token."""
        if not self._lines:
            return []
        if self.config.gate == "off" or self.config.board is None:
            lines, self._lines = self._lines, {}
            return [_joined(request, line) for request, line in lines.items()]
        now = self.clock()
        board = self._open(now)
        present = board is not None and board.alive()
        judged = board.watermark(self.stream, self.epoch) if board is not None else -1
        decisions: list[Release | Refuse] = []
        for request, line in list(self._lines.items()):
            decision = self._decide(request, line, now, board if present else None, judged)
            # A kill stands whether or not the guard that said it still lives.
            if board is not None and board.verdict(request) == Verdict.KILL:
                decision = Refuse(request, "kv_guard_killed", board.incident(request) or None)
            if decision is None:
                continue
            decisions.append(decision)
            if isinstance(decision, Refuse) or not line:
                del self._lines[request]
        return decisions

    def verdict(self, request: str) -> Verdict:
        """What the guard says of the request now; `ALLOW` where there is no board."""
        if self.config.gate == "off" or self._board is None:
            return Verdict.ALLOW
        return self._board.verdict(request)

    def close(self) -> None:
        """Lets go of the board."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _decide(
        self, request: str, line: deque[_Held], now: float, board: BoardReader | None, judged: int
    ) -> Release | Refuse | None:
        """Moves what may leave out of the line. `board` is None when there is no guard."""
        free: deque[_Held] = deque()
        while line:
            head = line[0]
            barred = self.config.gate == "sync" and head.bar > judged
            if barred and head.since is None:
                head.since = now
                self.waits += 1
            out_of_time = head.since is not None and now - head.since > self.config.wait_ms / 1000
            if board is None or (barred and out_of_time):
                self.timeouts += 1
                if self.config.on_timeout == "closed":
                    return Refuse(request, "kv_guard_unavailable")
            elif barred:
                break
            free.append(line.popleft())
        return _joined(request, free) if free else None

    def _open(self, now: float) -> BoardReader | None:
        if self._board is None and self.config.board is not None and now >= self._next_open:
            self._next_open = now + _REOPEN_S
            try:
                self._board = BoardReader.open(self.config.board)
            except BoardError:
                return None
        return self._board


def _joined(request: str, line: deque[_Held]) -> Release:
    return Release(request, [token for held in line for token in held.tokens], line[-1].finish)
