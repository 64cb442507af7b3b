"""Transfers over shared memory: the sender maps the destination pool and copies into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.segment import Segment, SegmentError
from engine.transport.link import Batch, Fate, TransferError

_COPY_BYTES = 8 << 20
"""What one `poll` copies at most, or little more, so that it soon comes back to be asked for something else."""


class ShmLink:
    """See `engine.transport.link.Link`. The copies are made by `poll`."""

    def __init__(self, path: str, segment: Segment) -> None:
        try:
            self._peer = Segment.open(Path(path), segment.page_bytes)
        except SegmentError as error:
            raise TransferError(str(error)) from error
        self._segment = segment
        self._copies: Iterator[None] = iter(())
        self._aborted = False
        self.error = ""

    def post(self, batch: Batch) -> None:
        """Nothing is copied yet."""
        batch.check(self._segment.pages, self._peer.pages)
        self._copies = self._copy(batch)

    def poll(self, wait_s: float) -> Fate:
        """Copies some pages."""
        if self._aborted:
            self.error = "aborted"
            return Fate.FAILED
        return Fate.DONE if next(self._copies, self) is self else Fate.MOVING

    def abort(self) -> None:
        """No page is copied any more."""
        self._aborted = True

    def close(self) -> None:
        """The mapping goes with this object."""

    def _copy(self, batch: Batch) -> Iterator[None]:
        at_once = max(1, _COPY_BYTES // self._segment.page_bytes)
        copied = 0
        for run in batch.runs():
            for skip in range(0, run.count, at_once):
                count = min(at_once, run.count - skip)
                source, place = run.source + skip, run.start + skip
                self._peer.put(
                    run.destination + skip,
                    self._segment.data[source : source + count],
                    batch.tags[place : place + count],
                )
                copied += count
                if copied >= at_once:
                    copied = 0
                    yield


class ShmReceiver:
    """See `engine.transport.link.Receiver`.

    A mapped writer cannot be stopped from here, and need not be: its copies are its own instructions, so when it says
    that it makes no more, or its process has ended, there are none.
    """

    def __init__(self, segment: Segment) -> None:
        self.address = f"shm:{segment.path}"

    def register(self, peer: str, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> str:
        """The writer can write everywhere; the tags tell what it wrote where it should not."""
        return self.address

    def confirm(self, transfer: str, *, clean: bool) -> bool:
        """See the class."""
        return True

    def forget(self, peer: str) -> None:
        """Its mapping went with it."""

    def close(self) -> None:
        """Nothing to do: the segment is the pool's."""
