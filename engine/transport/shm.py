"""Transfers over shared memory: the sender maps the destination pool and copies into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from engine.segment import Segment, SegmentError
from engine.transport.link import TransferError


class ShmLink:
    """See `engine.transport.link.Link`."""

    def __init__(self, path: str, page_bytes: int) -> None:
        try:
            self._segment = Segment.open(Path(path), page_bytes)
        except SegmentError as error:
            raise TransferError(str(error)) from error

    def put(self, transfer: str, page: int, data: Tensor, tag: Tensor) -> None:
        """Copies the page."""
        if not 0 <= page < self._segment.pages:
            raise TransferError(f"{transfer}: page {page} of a pool of {self._segment.pages}")
        self._segment.put(page, data, tag)

    def flush(self, transfer: str, pages: int) -> None:
        """Nothing is left to do: a copy that has returned is visible."""

    def close(self) -> None:
        """The mapping goes with this object."""


class ShmReceiver:
    """See `engine.transport.link.Receiver`. A mapped writer cannot be stopped from here: only its word counts."""

    def __init__(self, segment: Segment) -> None:
        self.address = f"shm:{segment.path}"

    def grant(self, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Nothing to do: the sender can write everywhere; the tags tell what it wrote where it should not."""

    def revoke(self, transfer: str) -> None:
        """Nothing to do, see the class."""

    def close(self) -> None:
        """Nothing to do: the segment is the pool's."""
