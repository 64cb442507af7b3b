"""Transfers by Mooncake's transfer engine over TCP (extra ``mooncake``).

The library writes into registered memory of the other process and says when the bytes are there; a page's tag is
written after that, see `engine.transport.nixl` for why. That it says so is protocol 2 of its TCP transport, with an
acknowledgement for each write; protocol 1 only says that the bytes have left (`prepare` refuses it).

Its batch calls block until all is over, and keep a core busy with asking. So each run of pages is submitted as a write
of its own, some at a time, and asked about from here. A write that timed out by the library's own clock may be on its
way yet: whatever is not success is followed by destroying the engine, which joins its threads.

Batches of thousands of descriptors fail and spoil the process (0.3.13), and so does a first batch that is large: a link
begins with one small write, and few are under way at a time. The library listens on all interfaces, on ports of its
choice, and asks nobody who they are; it writes into registered memory only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.digest import PageDigester
from engine.segment import TAG_WORDS, Segment
from engine.transport.access import check_page_bytes, seal, unseal
from engine.transport.link import Batch, Fate, MissingError, Run, TransferError, ask

BATCH_PAGES = 1024
_TAG_BYTES = 8 * TAG_WORDS
_AT_ONCE = 16
"""Writes under way."""
_MOVING, _DONE = 0, 1
"""What Mooncake says of a write; -1 is failed, -2 timed out."""
_NO_WRITE = (-1, (1 << 64) - 1)
_HOST = "127.0.0.1"


def prepare() -> None:
    """What the library reads when it is loaded; whoever has set it keeps their own.

    Raises:
        MissingError: The environment takes the transport's confirmation away.
    """
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise MissingError(
            "transport mooncake: MC_TCP_PROTO=1 is set, and without its protocol 2 the library does not say when bytes "
            "have arrived; unset it"
        )
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


def _engine() -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    status = engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", "")
    if status:
        raise TransferError(f"transport mooncake: the transfer engine does not start (status {status})")
    return engine


def _register(engine: Any, address: int, size: int) -> None:
    status = engine.register_memory(address, size)
    if status:
        raise TransferError(f"transport mooncake: {size} bytes cannot be registered (status {status})")


class MooncakeLink:
    """See `engine.transport.link.Link`. A link is an engine of its own, so that destroying it ends nobody else's."""

    def __init__(self, address: str, segment: Segment, digester: PageDigester) -> None:
        try:
            port, base, pages, page_bytes = map(int, unseal("mooncake", address, digester))
        except ValueError as error:
            raise TransferError(f"transfer address mooncake:{address!r:.100}: {error}") from error
        check_page_bytes("mooncake", page_bytes, segment.page_bytes)
        self._segment = segment
        self._pages = pages
        self._data, self._tags = base, base + pages * page_bytes
        self._peer = f"{_HOST}:{port}"
        self._staged = np.zeros((BATCH_PAGES, TAG_WORDS), dtype=np.int64)
        self._steps: Iterator[None] = iter(())
        self._warm = self._stopped = False
        self.error = ""
        self._engine: Any = _engine()
        _register(self._engine, segment.address, segment.size)
        _register(self._engine, self._staged.ctypes.data, self._staged.nbytes)

    def post(self, batch: Batch) -> None:
        """Nothing is written yet."""
        batch.check(self._segment.pages, self._pages)
        if len(batch.tags) > BATCH_PAGES:
            raise TransferError(f"{batch.transfer}: a batch of {len(batch.tags)} pages; {BATCH_PAGES} can be posted")
        self._steps = self._write(batch)

    def poll(self, wait_s: float) -> Fate:
        """Submits writes, and asks Mooncake what has become of them, more and more seldom."""
        try:
            return ask(self._steps, wait_s)
        except TransferError as error:
            self.error = self.error or f"Mooncake: {error}"
        self.close()
        return Fate.FAILED

    def abort(self) -> None:
        """Nothing is submitted any more; what is under way comes to its end by itself."""
        self.error = "aborted"
        self._stopped = True

    def close(self) -> None:
        """Destroys the engine."""
        self._steps = self._closed()
        self._engine = None

    def _closed(self) -> Iterator[None]:
        raise TransferError(self.error or "closed")
        yield  # it is a generator

    def _write(self, batch: Batch) -> Iterator[None]:
        """Writes each run of pages and, when it is there, its tags; comes up for breath while Mooncake is at it."""
        self._staged[: len(batch.tags)] = batch.tags
        waiting = [*batch.runs()][::-1]
        if not self._warm:
            # Eight bytes of the first page, which it gets anyway.
            yield from self._until_done(self._submit_pages(waiting[-1], 8))
            self._warm = True
        moving: dict[int, Run | None] = {}
        failed = ""
        while moving or waiting:
            while waiting and len(moving) < _AT_ONCE and not (failed or self._stopped):
                run = waiting.pop()
                moving[self._submit_pages(run, run.count * self._segment.page_bytes)] = run
            for write, pages in list(moving.items()):
                state = self._engine.transfer_check_status(write)
                if state == _MOVING:
                    continue
                del moving[write]
                if state != _DONE:
                    failed = f"a write ended in state {state}"
                elif pages is not None and not (failed or self._stopped):
                    moving[self._submit_tags(pages)] = None
            if not moving and (failed or self._stopped):
                raise TransferError(failed or self.error)
            yield

    def _until_done(self, write: int) -> Iterator[None]:
        while (state := self._engine.transfer_check_status(write)) == _MOVING:
            yield
        if state != _DONE:
            raise TransferError(f"a write ended in state {state}")

    def _submit_pages(self, run: Run, count: int) -> int:
        """Begins to write the first bytes of a run of pages."""
        size = self._segment.page_bytes
        return self._submit(self._segment.address + run.source * size, self._data + run.destination * size, count)

    def _submit_tags(self, run: Run) -> int:
        here = self._staged.ctypes.data + run.start * _TAG_BYTES
        return self._submit(here, self._tags + run.destination * _TAG_BYTES, run.count * _TAG_BYTES)

    def _submit(self, here: int, there: int, count: int) -> int:
        """Begins a write; returns what Mooncake knows it by."""
        if self._stopped:
            raise TransferError("aborted")
        write = int(self._engine.transfer_submit_write(self._peer, here, there, count))
        if write in _NO_WRITE:
            raise TransferError("a write cannot be submitted; is its engine there?")
        return write


class MooncakeAccess:
    """See `engine.transport.access.Access`."""

    def __init__(self, segment: Segment, digester: PageDigester) -> None:
        self._segment = segment
        self._engine: Any = _engine()
        _register(self._engine, segment.address, segment.size)
        body = f"{self._engine.get_rpc_port()}:{segment.address}:{segment.pages}:{segment.page_bytes}"
        self.address = seal("mooncake", body, digester)

    def expect(self, transfers: int) -> None:
        """Its threads are there anyway."""

    def close(self) -> None:
        """Unregisters the pool, so that nothing new is written, and destroys the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.unregister_memory(self._segment.address)
            del engine
