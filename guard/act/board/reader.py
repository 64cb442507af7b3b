"""The engine's side of the verdict board."""

from __future__ import annotations

import os
import time
from typing import Self

from guard.act.board.layout import (
    EMPTY,
    HEADER_WORDS,
    INCIDENT,
    LIVE,
    ROW_WORDS,
    W_CLOSED,
    W_HEARTBEAT,
    W_REQUESTS,
    W_SATURATED,
    W_STREAMS,
    BoardError,
    Verdict,
    key_of,
    map_board,
)

_TRIES = 1000
_REOPEN_EVERY_NS = 20_000_000


class BoardReader:
    """An engine's side of the board. Reads are safe from any thread.

    When the guard closes the board, or a restarted guard has put a new one in its place, the next look finds
    that out and opens the new one (it tries at most every 20 ms); until then the old verdicts stay in force.
    """

    def __init__(self, path: str, words: memoryview[int], inode: int) -> None:
        self.path = path
        self._open = (words, words[W_REQUESTS] - 1, words[W_STREAMS] - 1, inode)
        self._tried_ns = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Maps the board for reading.

        Raises:
            BoardError: There is none, it is not a board of this version, or others than its owner may
                write it.
        """
        path = os.fspath(path)
        return cls(path, *map_board(path))

    def verdict(self, request: str) -> Verdict:
        """The request's verdict; a request that the board does not name is allowed."""
        return self._request(request)[0]

    def incident(self, request: str) -> str:
        """The id of the incident that explains the request's verdict; empty if there is none."""
        return self._request(request)[1]

    def watermark(self, stream: str, epoch: int) -> int:
        """The highest seq of the stream's epoch up to which every record is judged; -1 if none is."""
        words, requests, mask, _ = self._current()
        row = _find(words, HEADER_WORDS + (requests + 1) * ROW_WORDS, mask, key_of(stream))
        if row is None or row[4] != epoch:
            return -1
        return row[5] - (1 << 64) if row[5] >> 63 else row[5]

    def alive(self, now_ns: int | None = None, max_age_s: float = 1.0) -> bool:
        """Whether the guard's ledger has finished a round within ``max_age_s`` and every verdict has its row.

        Args:
            now_ns: `time.monotonic_ns`, the default; not the wall clock, which may jump.
            max_age_s: Oldest heartbeat that counts, in seconds.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        limit = int(max_age_s * 1e9)
        words = self._current()[0]
        if abs(now_ns - words[W_HEARTBEAT]) > limit:
            # A guard that was killed could not mark its board closed; there may be a new one by now.
            self._try_refresh()
            words = self._open[0]
        return not words[W_CLOSED] and not words[W_SATURATED] and abs(now_ns - words[W_HEARTBEAT]) <= limit

    @property
    def closed(self) -> bool:
        """Whether this mapping gets no more verdicts."""
        return bool(self._open[0][W_CLOSED])

    def refresh(self) -> bool:
        """Opens the board that is at the path now, if it is another one and can be read.

        Returns:
            Whether the board changed.
        """
        try:
            if os.stat(self.path).st_ino == self._open[3]:
                return False
            words, inode = map_board(self.path)
        except (OSError, BoardError):
            return False
        # One assignment: a thread that reads meanwhile has either the old board or the new, whole.
        self._open = (words, words[W_REQUESTS] - 1, words[W_STREAMS] - 1, inode)
        return True

    def close(self) -> None:
        """Lets go of the mapping; the reader must not be used after it."""
        self._open[0].release()

    def _current(self) -> tuple[memoryview[int], int, int, int]:
        if self._open[0][W_CLOSED]:
            self._try_refresh()
        return self._open

    def _try_refresh(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._tried_ns >= _REOPEN_EVERY_NS:
            self._tried_ns = now_ns
            self.refresh()

    def _request(self, request: str) -> tuple[Verdict, str]:
        words, mask, _, _ = self._current()
        row = _find(words, HEADER_WORDS, mask, key_of(request))
        if row is None:
            return Verdict.ALLOW, ""
        incident = INCIDENT.pack(*row[5:8]).rstrip(b"\0").decode("ascii", "replace")
        return Verdict(min(row[3] - LIVE, Verdict.KILL)), incident


def _find(words: memoryview[int], first: int, mask: int, key: tuple[int, int]) -> tuple[int, ...] | None:
    """A consistent copy of the live row of this key."""
    low, high = key
    index = low & mask
    for _ in range(mask + 1):
        base = first + index * ROW_WORDS
        if words[base + 3] == EMPTY:
            return None
        if words[base + 1] == low and words[base + 2] == high:
            for _ in range(_TRIES):
                version = words[base]
                row = tuple(words[base : base + ROW_WORDS])
                if not version & 1 and words[base] == version == row[0]:
                    break
            # A guard that died in the middle of a row leaves it odd: what stands there is taken as it is.
            if row[1] == low and row[2] == high and row[3] >= LIVE:
                return row
        index = (index + 1) & mask
    return None
