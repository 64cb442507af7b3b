"""Transfers by Mooncake's transfer engine over TCP (extra ``mooncake``).

The library writes into registered memory of the other process and says when a batch is there; a batch's tags are
written after that, in a batch of their own, see `engine.transport.nixl` for why. Its calls block until the batch is
over, so they run in a thread of the link's. They also give up after a time of their own (``MC_TRANSFER_TIMEOUT``) with
the same -1 as for an error, and the bytes may be on their way yet: whatever is not success is followed by destroying
the engine, which joins its threads.

Batches of thousands of descriptors fail and spoil the process (0.3.13), and so does a first batch that is large: a link
begins with one small write, and batches stay small. The library listens on all interfaces, on ports of its choice,
and asks nobody who they are; it writes into registered memory only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import torch

from engine.digest import PageDigester
from engine.segment import TAG_WORDS, Segment
from engine.transport.access import check_page_bytes, seal, unseal
from engine.transport.link import Batch, Fate, TransferError

BATCH_PAGES = 1024
_TAG_BYTES = 8 * TAG_WORDS
_HOST = "127.0.0.1"


def prepare() -> None:
    """What the library reads when it is loaded; whoever has set it keeps their own."""
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
        self._staged = torch.zeros((BATCH_PAGES, TAG_WORDS), dtype=torch.int64)
        self._under_way: Future[int] | None = None
        self._warm = self._stopped = False
        self.error = ""
        self._engine: Any = _engine()
        _register(self._engine, segment.address, segment.size)
        _register(self._engine, self._staged.data_ptr(), self._staged.numel() * 8)

    def post(self, batch: Batch) -> None:
        """Begins to write, in a thread."""
        batch.check(self._segment.pages, self._pages)
        if len(batch.tags) > BATCH_PAGES:
            raise TransferError(f"{batch.transfer}: a batch of {len(batch.tags)} pages; {BATCH_PAGES} can be posted")
        future: Future[int] = Future()
        self._under_way = future

        def write() -> None:
            try:
                future.set_result(self._write(batch))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=write, name="kv-mooncake", daemon=True).start()

    def poll(self, wait_s: float) -> Fate:
        """Waits for the thread."""
        future = self._under_way
        if future is None:
            return Fate.FAILED if self._engine is None else Fate.DONE
        wait_for([future], wait_s)
        if not future.done():
            return Fate.MOVING
        self._under_way = None
        failure = future.exception()
        if failure is None and future.result() == 0:
            return Fate.DONE
        self.error = self.error or f"Mooncake: {failure or f'status {future.result()}'}"
        self.close()
        return Fate.FAILED

    def abort(self) -> None:
        """Nothing ends a call of the library's but its own return; no further one is made."""
        self.error = "aborted"
        self._stopped = True
        if self._under_way is None:
            self.close()

    def close(self) -> None:
        """Destroys the engine."""
        self._engine = None

    def _write(self, batch: Batch) -> int:
        """Pages, then tags. Returns the library's status, 0 for success."""
        engine, size = self._engine, self._segment.page_bytes
        source, destination, tags_at, tags_to, counts = [], [], [], [], []
        for run in batch.runs():
            source.append(self._segment.address + run.source * size)
            destination.append(self._data + run.destination * size)
            tags_at.append(self._staged.data_ptr() + run.start * _TAG_BYTES)
            tags_to.append(self._tags + run.destination * _TAG_BYTES)
            counts.append(run.count)
        if not self._warm:
            # Eight bytes of the first page, which it gets anyway.
            status = self._call(engine, source[:1], destination[:1], [8])
            if status:
                return status
            self._warm = True
        status = self._call(engine, source, destination, [count * size for count in counts])
        if status:
            return status
        self._staged[: len(batch.tags)] = batch.tags
        return self._call(engine, tags_at, tags_to, [count * _TAG_BYTES for count in counts])

    def _call(self, engine: Any, source: Sequence[int], destination: Sequence[int], sizes: Sequence[int]) -> int:
        if self._stopped:
            return -1
        return int(engine.batch_transfer_sync_write(self._peer, source, destination, sizes))


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
