"""The guard's verdicts, as the router sees them just before bytes leave."""

from __future__ import annotations

import time

from guard.act.board import BoardError, BoardReader, Verdict

RETRY_S = 1.0
"""How often a board that is not there is looked for: the guard may start after the engine."""


class Verdicts:
    """Looks up who is killed. Decode has waited for the guard's watermark already; this is the second look.

    Args:
        path: The board; None: there is no guard, and everybody is allowed.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._reader: BoardReader | None = None
        self._next_try = 0.0

    def killed(self, request: str) -> str | None:
        """The incident for which the request is killed, perhaps empty; None if it is not."""
        reader = self._reader or self._open()
        if reader is None or reader.verdict(request) is not Verdict.KILL:
            return None
        return reader.incident(request)

    def _open(self) -> BoardReader | None:
        now = time.monotonic()
        if self._path is None or now < self._next_try:
            return None
        self._next_try = now + RETRY_S
        try:
            self._reader = BoardReader.open(self._path)
        except BoardError:
            # No guard yet. What that means is decode's to say, by `guard.on_timeout`.
            return None
        return self._reader

    def close(self) -> None:
        """Lets go of the board."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
