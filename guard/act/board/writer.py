"""The guard's side of the verdict board."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import time
from typing import Self

from guard.act.board.layout import (
    HEADER_BYTES,
    HEADER_WORDS,
    INCIDENT,
    LIVE,
    MAGIC,
    MAX_INCIDENT_BYTES,
    ROW_BYTES,
    ROW_WORDS,
    VERSION,
    W_CLOSED,
    W_CREATED,
    W_HEARTBEAT,
    W_PID,
    W_REQUESTS,
    W_SATURATED,
    W_STREAMS,
    W_VERSION,
    BoardError,
    Verdict,
    key_of,
    map_board,
)
from guard.act.board.table import Table

_HOMELESS_KNOWN = 4096
"""Streams are counted as without a row up to this many: their names come from outside."""


class BoardWriter:
    """The guard's side of the board. Not thread-safe: it belongs to the ledger thread."""

    def __init__(self, path: str, file: mmap.mmap, requests: int, streams: int) -> None:
        self.path = path
        self._mmap = file
        self._words = memoryview(file).cast("Q")
        self._requests = Table(self._words, HEADER_WORDS, requests)
        self._streams = Table(self._words, HEADER_WORDS + requests * ROW_WORDS, streams)
        self._waiting: dict[tuple[int, int], tuple[Verdict, str]] = {}
        self._homeless: set[tuple[int, int]] = set()
        self._stream_keys: dict[str, tuple[int, int]] = {}

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, requests: int = 65536, streams: int = 1024) -> Self:
        """Makes a new board at ``path``, carrying over the verdicts of the one there, which is then closed.

        Args:
            path: Where; the directory is made if it is missing. A memory file system is best (``/dev/shm``).
            requests: Rows for requests, a power of two.
            streams: Rows for streams, a power of two.

        Raises:
            BoardError: The file cannot be made, or others could write to its directory.
        """
        for name, rows in (("requests", requests), ("streams", streams)):
            if rows < 8 or rows & (rows - 1):
                raise ValueError(f"{name} is {rows}, not a power of two from 8 on")
        path = os.fspath(path)
        directory, name = os.path.split(os.path.abspath(path))
        fresh = os.path.join(directory, f".{name}.{os.getpid()}.new")
        size = HEADER_BYTES + ROW_BYTES * (requests + streams)
        try:
            os.makedirs(directory, mode=0o755, exist_ok=True)
            _check_directory(directory)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.fchmod(descriptor, 0o644)
                # Reserved now: a full memory file system is an error here, and a SIGBUS at a store later.
                os.posix_fallocate(descriptor, 0, size)
                board = cls(path, mmap.mmap(descriptor, size), requests, streams)
            except OSError:
                os.unlink(fresh)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BoardError(f"board {path}: cannot be made: {error.strerror}") from error
        words = board._words
        words[W_VERSION], words[W_REQUESTS], words[W_STREAMS] = VERSION, requests, streams
        words[W_CREATED], words[W_PID] = time.time_ns(), os.getpid()
        words[0] = MAGIC
        old = _map_for_closing(path)
        if old is not None:
            board._carry_over(old)
        board.heartbeat()
        os.replace(fresh, path)
        if old is not None:
            old[W_CLOSED] = 1
        return board

    def _carry_over(self, old: memoryview[int]) -> None:
        for row in range(old[W_REQUESTS]):
            base = HEADER_WORDS + row * ROW_WORDS
            state = old[base + 3]
            if state < LIVE:
                continue
            key = (old[base + 1], old[base + 2])
            target = self._requests.place(key)
            if target is not None:
                self._requests.store(target, key, state, tuple(old[base + 4 : base + 8]))

    @property
    def verdicts(self) -> int:
        """How many requests have a row."""
        return len(self._requests.rows)

    @property
    def saturated(self) -> int:
        """How many verdicts wait for a row; not 0 means that readers no longer count the guard as alive."""
        return len(self._waiting)

    @property
    def streams_without_row(self) -> int:
        """Streams whose watermark could not be shown because every stream row was taken; who waits for one
        waits in vain and follows its ``on_timeout``.
        """
        return len(self._homeless)

    def heartbeat(self, now_ns: int | None = None) -> None:
        """Says that the ledger's round is done; ``now_ns`` is `time.monotonic_ns` (the default)."""
        self._words[W_HEARTBEAT] = time.monotonic_ns() if now_ns is None else now_ns

    def set_verdict(self, request: str, verdict: Verdict, incident: str = "") -> None:
        """Puts the verdict on the board, with the incident that explains it. A verdict is never weakened.

        A verdict that finds no row waits for one, and meanwhile readers see a guard that is not alive: what
        then happens is the engine's ``on_timeout``.

        Args:
            request: The request's id.
            verdict: `Verdict.ALLOW` changes nothing; use `clear` to take a verdict back.
            incident: At most 24 ASCII characters.

        Raises:
            ValueError: The incident id is too long or not ASCII.
        """
        if verdict is Verdict.ALLOW:
            return
        if len(incident.encode("ascii")) > MAX_INCIDENT_BYTES:
            raise ValueError(f"incident id {incident!r} is longer than {MAX_INCIDENT_BYTES} bytes")
        self._set(key_of(request), verdict, incident)

    def _set(self, key: tuple[int, int], verdict: Verdict, incident: str) -> None:
        base = self._requests.place(key)
        if base is None:
            before = self._waiting.get(key, (Verdict.ALLOW, ""))
            if verdict >= before[0]:
                self._waiting[key] = (verdict, incident)
            self._words[W_SATURATED] = len(self._waiting)
            return
        if key in self._requests.rows and self._words[base + 3] > LIVE + verdict:
            return
        name = INCIDENT.unpack(incident.encode("ascii").ljust(MAX_INCIDENT_BYTES, b"\0"))
        self._requests.store(base, key, LIVE + verdict, (time.time_ns(), *name))

    def clear(self, request: str) -> None:
        """Takes a request's row away: it is over, or an operator let it go."""
        self._clear(key_of(request))

    def _clear(self, key: tuple[int, int]) -> None:
        self._waiting.pop(key, None)
        self._requests.clear(key)
        while self._waiting:
            waiting, (verdict, incident) = next(iter(self._waiting.items()))
            if self._requests.place(waiting) is None:
                break
            del self._waiting[waiting]
            self._set(waiting, verdict, incident)
        self._words[W_SATURATED] = len(self._waiting)

    def expire(self, before_ns: int) -> int:
        """Clears the rows set before ``before_ns`` (`time.time_ns`); they may be an earlier guard's.

        Returns:
            How many.
        """
        old = [key for key, base in self._requests.rows.items() if self._words[base + 4] < before_ns]
        for key in old:
            self._clear(key)
        return len(old)

    def advance(self, stream: str, epoch: int, seq: int) -> None:
        """Says that every record of the stream up to ``seq`` is judged; call it after `set_verdict`."""
        key = self._stream_keys.get(stream)
        if key is None:
            key = key_of(stream)
            if self._streams.place(key) is None:
                if len(self._homeless) < _HOMELESS_KNOWN:
                    self._homeless.add(key)
                return
            self._homeless.discard(key)
            self._stream_keys[stream] = key
        base = self._streams.place(key)
        assert base is not None
        self._streams.store(base, key, LIVE, (epoch, seq & 0xFFFF_FFFF_FFFF_FFFF, 0, 0))

    def forget_stream(self, stream: str) -> None:
        """Gives the stream's row back."""
        key = self._stream_keys.pop(stream, None)
        if key is not None:
            self._streams.clear(key)

    def close(self) -> None:
        """Marks the board closed and lets go of it. The file stays, so that what is killed stays killed."""
        if self._mmap.closed:
            return
        self._words[W_CLOSED] = 1
        self._words.release()
        self._mmap.close()


def _map_for_closing(path: str) -> memoryview[int] | None:
    """The board at the path, writable, so that its readers can be told; None if there is none."""
    try:
        words, _ = map_board(path)
        words.release()
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size)).cast("Q")
        finally:
            os.close(descriptor)
    except (OSError, ValueError, BoardError):
        return None


def _check_directory(directory: str) -> None:
    info = os.stat(directory)
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise BoardError(f"board: others may write the directory {directory}; make it mode 0755")
