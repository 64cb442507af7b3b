"""The sending side: threads that copy pages, so that a slow transfer does not hold up the model."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from opentelemetry.context import Context
from torch import Tensor

from engine.digest import PageDigester
from engine.faults import Fault
from engine.segment import Segment
from engine.transport.link import Link, TransferError, connect
from guard.records import PageSet, Side, TransferBegin, TransferEnd, TransferStatus
from hooks.emit import Emitter

FAULT_PAUSE_S = 3.0
"""How long a transfer dawdles under the faults that need a slow wire."""


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """One piece of a request's pages on its way.

    What the threads change is read by others only after the transfer came back through `Sender.ended`.
    """

    id: str
    """The record's; the piece's own where the request goes in pieces."""
    grant: str
    """What the receiver granted the pages to: the bare id."""
    request: str
    tenant: str
    context: Context | None
    source: list[int]
    destination: list[int]
    generations: list[int]
    """Of the destination pages, for the digests."""
    nonce: bytes
    """The request's transfer's, for the digests."""
    tags: Tensor
    """[pages, 3]: owner tags of the destination pages."""
    first: int
    """The first page's place in the request."""
    tokens: int
    pool: str
    """The destination pool's id."""
    address: str
    begun: bool = False
    status: TransferStatus = TransferStatus.ABORTED
    digests: list[str] | None = None
    error: str = ""
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Stops it: if it has not begun by now, it never does."""
        with self._lock:
            self._cancelled = True


class Sender:
    """Sends transfers, several at a time.

    Args:
        segment: The source pool.
        page_tokens: Tokens a page.
        digester: For digests, and for the proof to the receiver.
        emitter: For the transfers' records.
        digests: Whether to compute digests of the source pages.
        wake: Called when a transfer has ended.
        faults: What to do wrong.
        threads: How many at a time.

    Attributes:
        began: Transfers whose begin was recorded, for whoever needs to know at once (fault lease-expiry).
        ended: Transfers that are over, in that order; take from the left.
    """

    def __init__(
        self,
        segment: Segment,
        page_tokens: int,
        digester: PageDigester,
        emitter: Emitter,
        *,
        digests: bool,
        wake: Callable[[], None],
        faults: Collection[Fault] = (),
        threads: int = 4,
    ) -> None:
        self.began: deque[Transfer] = deque()
        self.ended: deque[Transfer] = deque()
        self._segment = segment
        self._page_tokens = page_tokens
        self._digester = digester
        self._emitter = emitter
        # Nobody hashed before a lease ran out: the source's digests would betray that fault by themselves.
        self._digests = digests and Fault.LEASE_EXPIRY not in faults
        self._wake = wake
        self._faults = faults
        self._slow = threading.Semaphore(1)
        self._counts = itertools.count()
        self._gone: frozenset[str] = frozenset()
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-send-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, transfer: Transfer) -> None:
        """Queues a transfer."""
        self._queue.put(transfer)

    def forget(self, address: str) -> None:
        """The worker at that address died: links to it are dropped before the next transfer."""
        self._gone |= {address}

    def close(self) -> None:
        """Ends the threads; one that hangs in a transfer is given a second."""
        deadline = time.monotonic() + 1.0
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        links: dict[str, Link] = {}
        while (transfer := self._queue.get()) is not None:
            for address in self._gone & links.keys():
                links.pop(address).close()
            self._run(transfer, links)
        for link in links.values():
            link.close()

    def _run(self, transfer: Transfer, links: dict[str, Link]) -> None:
        if self._begin(transfer):
            if Fault.ARRIVE_BEFORE_VISIBLE in self._faults:
                # The completion is reported before a byte has moved.
                transfer.status = TransferStatus.OK
                self._end(transfer)
                time.sleep(FAULT_PAUSE_S)
                self._copy(transfer, links)
                return
            if Fault.PARTIAL_TRANSFER in self._faults and next(self._counts) % 2:
                # Of every second transfer only the first chunk is sent.
                sent = max(1, len(transfer.source) // 8)
                transfer.tokens = min(transfer.tokens, sent * self._page_tokens)
                transfer.source, transfer.destination = transfer.source[:sent], transfer.destination[:sent]
                transfer.digests = transfer.digests and transfer.digests[:sent]
            dawdles = {Fault.EARLY_FREE, Fault.LEASE_EXPIRY}.intersection(self._faults)
            # One slow wire: while one transfer dawdles, those after it are quick.
            if dawdles and self._slow.acquire(blocking=False):
                time.sleep(FAULT_PAUSE_S)
                self._slow.release()
            transfer.status = self._copy(transfer, links)
        self._end(transfer)

    def _begin(self, transfer: Transfer) -> bool:
        """Records the begin unless the transfer was cancelled; after `Transfer.cancel` none is recorded."""
        if self._digests and not transfer._cancelled:
            transfer.digests = self._digester.pages(
                self._segment.data, transfer.tenant, transfer.request, transfer.source, transfer.first,
                generations=transfer.generations, nonce=transfer.nonce,
            )  # fmt: skip
        with transfer._lock:
            if transfer._cancelled:
                return False
            transfer.begun = True
            self._emitter.emit(
                TransferBegin(
                    request=transfer.request,
                    tenant=transfer.tenant,
                    transfer=transfer.id,
                    pages=PageSet.of(transfer.source),
                    peer_pool=transfer.pool,
                    peer_pages=PageSet.of(transfer.destination),
                    tokens=transfer.tokens,
                    digests=None if transfer.digests is None else tuple(transfer.digests),
                ),
                transfer.context,
            )
        if Fault.LEASE_EXPIRY in self._faults:
            self.began.append(transfer)
            self._wake()
        return True

    def _copy(self, transfer: Transfer, links: dict[str, Link]) -> TransferStatus:
        status = TransferStatus.OK
        try:
            link = links.get(transfer.address)
            if link is None:
                link = connect(transfer.address, self._segment.page_bytes, self._digester)
                links[transfer.address] = link
            sent = 0
            for source, page, tag in zip(transfer.source, transfer.destination, transfer.tags, strict=False):
                if transfer._cancelled and Fault.EARLY_FREE not in self._faults:
                    status = TransferStatus.ABORTED
                    break
                link.put(transfer.grant, page, self._segment.data[source], tag)
                sent += 1
            # Also when it was cancelled: what is under way must have arrived before "over" is said.
            link.flush(transfer.grant, sent)
        except TransferError as error:
            transfer.error = str(error)
            broken = links.pop(transfer.address, None)
            if broken is not None:
                broken.close()
            return TransferStatus.FAILED
        return status

    def _end(self, transfer: Transfer) -> None:
        if transfer.begun:
            self._emitter.emit(
                TransferEnd(
                    request=transfer.request,
                    tenant=transfer.tenant,
                    transfer=transfer.id,
                    side=Side.SEND,
                    pages=PageSet.of(transfer.source),
                    tokens=transfer.tokens,
                    status=transfer.status,
                ),
                transfer.context,
            )
        self.ended.append(transfer)
        self._wake()
