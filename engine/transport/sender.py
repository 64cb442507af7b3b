"""The sending side: threads that see transfers through, so that a slow one does not hold up the model.

Every transfer's begin and end pass here, in `Sender._begin` and `Sender._end`, whatever carries it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from opentelemetry.context import Context

from engine.digest import PageDigester
from engine.faults import Fault
from engine.segment import Segment
from engine.transport.link import Batch, Fate, Kind, Link, TransferError, connect
from guard.records import PageSet, Side, TransferBegin, TransferEnd, TransferStatus
from hooks.emit import Emitter

log = logging.getLogger(__name__)

FAULT_PAUSE_S = 3.0
"""How long a transfer dawdles under the faults that need a slow wire."""
_BATCH_PAGES = 1024
"""At most that many are posted together: Mooncake fails with some thousands."""
_BATCH_BYTES = 64 << 20
"""And at most that much, so that a transfer that is cancelled soon comes to its end."""
_SLICE_S = 0.05
"""How long a batch is waited for between looks at whether it still should be."""


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
    tags: NDArray[np.int64]
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
    overdue: bool = False
    """It has taken longer than it may, or this engine has lost its way. Its pages stay until the transport says that it
    is over, in the latter case for good."""
    _posted: bool = False
    """Something of it may be under way."""
    _over: bool = False
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Stops it: if it has not begun by now, it never does."""
        with self._lock:
            self._cancelled = True


class Sender:
    """Sends transfers, several at a time.

    Args:
        kind: What carries them.
        segment: The source pool.
        page_tokens: Tokens a page.
        digester: For digests, and for the proof to the receiver.
        emitter: For the transfers' records.
        digests: Whether to compute digests of the source pages.
        wake: Called when a transfer has ended or is overdue.
        patience_s: How long a transfer may take before it is aborted.
        faults: What to do wrong.
        threads: How many at a time.

    Attributes:
        began: Transfers whose begin was recorded, for whoever needs to know at once (fault lease-expiry).
        late: Transfers that are overdue and were not over when that was noticed, in that order; take from the left.
        ended: Transfers that are over, in that order; take from the left.
        crashes: Exceptions that only a bug can have raised; each is logged.
    """

    def __init__(
        self,
        kind: Kind,
        segment: Segment,
        page_tokens: int,
        digester: PageDigester,
        emitter: Emitter,
        *,
        digests: bool,
        wake: Callable[[], None],
        patience_s: float = 60.0,
        faults: Collection[Fault] = (),
        threads: int = 4,
    ) -> None:
        self.began: deque[Transfer] = deque()
        self.late: deque[Transfer] = deque()
        self.ended: deque[Transfer] = deque()
        self.crashes = 0
        self._lock = threading.Lock()
        self._segment = segment
        self._page_tokens = page_tokens
        self._digester = digester
        self._emitter = emitter
        # Nobody hashed before a lease ran out: the source's digests would betray that fault by themselves.
        self._digests = digests and Fault.LEASE_EXPIRY not in faults
        self._wake = wake
        self._patience_s = patience_s
        self._faults = faults
        self._slow = threading.Semaphore(1)
        self._counts = itertools.count()
        self._links = _Links(lambda address: connect(kind, address, segment, digester))
        self._queue: queue.SimpleQueue[Transfer | Link | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-send-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, transfer: Transfer) -> None:
        """Queues a transfer."""
        self._queue.put(transfer)

    def forget(self, address: str) -> None:
        """Nobody is there any more: links to it are closed, and what moves on one is aborted."""
        # By the threads: a library may take its time.
        for link in self._links.forget(address):
            self._queue.put(link)

    def close(self) -> None:
        """Ends the threads; one that hangs in a transfer is given a second."""
        deadline = time.monotonic() + 1.0
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        for link in self._links.take_all():
            link.close()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, Transfer):
                self._run(job)
            else:
                try:
                    job.close()
                except Exception:
                    self._crashed("a link that was closed")
            del job

    def _run(self, transfer: Transfer) -> None:
        try:
            self._carry_out(transfer)
        except Exception as error:
            # This thread is needed for the next one.
            self._crashed(transfer.id)
            transfer.error = f"unexpected {type(error).__name__}, see the log"
            transfer.status = TransferStatus.FAILED
        if not transfer._posted:
            self._end(transfer)
        elif not transfer.overdue:
            # Nobody is left who could ask the transport whether it is over.
            transfer.overdue = True
            self.late.append(transfer)
            self._wake()

    def _crashed(self, what: str) -> None:
        """To be called where an exception is handled that only a bug can have raised."""
        log.exception("%s: unexpected error", what)
        with self._lock:
            self.crashes += 1

    def _carry_out(self, transfer: Transfer) -> None:
        if self._begin(transfer):
            if Fault.ARRIVE_BEFORE_VISIBLE in self._faults:
                # The completion is reported before a byte has moved.
                transfer.status = TransferStatus.OK
                self._end(transfer)
                time.sleep(FAULT_PAUSE_S)
                self._move(transfer)
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
            transfer.status = self._move(transfer)

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

    def _move(self, transfer: Transfer) -> TransferStatus:
        """Moves the pages. Whatever it returns, the transport has said that the source is read no more.

        When it raises, `Transfer._posted` tells whether that may not be so.
        """
        try:
            link = self._links.take(transfer.address)
        except TransferError as error:
            transfer.error = str(error)
            return TransferStatus.FAILED
        status = TransferStatus.FAILED
        try:
            status = self._post_all(transfer, link)
        finally:
            # What may be under way keeps its link, and that the memory that it is written from.
            if not transfer._posted:
                self._links.give_back(transfer.address, link, sound=status is not TransferStatus.FAILED)
        return status

    def _post_all(self, transfer: Transfer, link: Link) -> TransferStatus:
        deadline = time.monotonic() + self._patience_s
        for batch in self._batches(transfer):
            if transfer._cancelled and Fault.EARLY_FREE not in self._faults:
                return TransferStatus.ABORTED
            transfer._posted = True
            try:
                link.post(batch)
            except TransferError as error:
                transfer._posted = False
                transfer.error = str(error)
                return TransferStatus.FAILED
            # Also when it is cancelled: what is under way has to come to its end before "over" is said.
            fate = self._see_through(transfer, link, deadline)
            transfer._posted = False
            if fate is Fate.FAILED:
                transfer.error = "took too long" if transfer.overdue else link.error
                return TransferStatus.FAILED
        return TransferStatus.OK

    def _see_through(self, transfer: Transfer, link: Link, deadline: float) -> Fate:
        """Waits until the transport says what has become of a batch."""
        aborted = False
        while (fate := link.poll(_SLICE_S)) is Fate.MOVING:
            late = not transfer.overdue and time.monotonic() > deadline
            if late:
                transfer.overdue = True
                log.warning("%s is not confirmed after %.1f s; its pages stay", transfer.id, self._patience_s)
                self.late.append(transfer)
                self._wake()
            if not aborted and (late or self._links.is_doomed(link)):
                link.abort()
                aborted = True
        return fate

    def _batches(self, transfer: Transfer) -> Iterator[Batch]:
        size = max(1, min(_BATCH_PAGES, _BATCH_BYTES // self._segment.page_bytes))
        for start in range(0, len(transfer.source), size):
            part = slice(start, min(start + size, len(transfer.source)))
            yield Batch(transfer.grant, transfer.source[part], transfer.destination[part], transfer.tags[part])

    def _end(self, transfer: Transfer) -> None:
        if transfer._over:
            return
        transfer._over = True
        if transfer.begun:
            try:
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
            except Exception:
                self._crashed(transfer.id)
        self.ended.append(transfer)
        self._wake()


class _Links:
    """Links by address, so that one transfer after another goes over the same one.

    Args:
        open_link: Makes one.
    """

    def __init__(self, open_link: Callable[[str], Link]) -> None:
        self._open = open_link
        self._lock = threading.Lock()
        self._idle: dict[str, list[Link]] = {}
        self._busy: dict[Link, str] = {}
        self._doomed: set[Link] = set()

    def take(self, address: str) -> Link:
        """A link to use alone.

        Raises:
            TransferError: There is none, and none can be made.
        """
        with self._lock:
            idle = self._idle.get(address)
            link = idle.pop() if idle else None
        link = link or self._open(address)
        with self._lock:
            self._busy[link] = address
        return link

    def give_back(self, address: str, link: Link, *, sound: bool) -> None:
        """It is not used any more, and closed unless it is of further use."""
        with self._lock:
            del self._busy[link]
            keep = sound and link not in self._doomed
            self._doomed.discard(link)
            if keep:
                self._idle.setdefault(address, []).append(link)
        if not keep:
            link.close()

    def forget(self, address: str) -> list[Link]:
        """Takes out the idle links to an address, which the caller has to close; those in use are doomed."""
        with self._lock:
            self._doomed.update(link for link, to in self._busy.items() if to == address)
            return self._idle.pop(address, [])

    def is_doomed(self, link: Link) -> bool:
        """Whether nobody is at its other end any more."""
        with self._lock:
            return link in self._doomed

    def take_all(self) -> list[Link]:
        """Takes out all that are idle."""
        with self._lock:
            idle = [link for links in self._idle.values() for link in links]
            self._idle.clear()
            return idle
