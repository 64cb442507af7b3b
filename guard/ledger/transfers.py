"""Transfers between pools, and writers that may come too late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard.ledger.requests import RequestStream, Where
from guard.ledger.taint import Taint
from guard.records import PageSet, TransferBegin, TransferStatus

if TYPE_CHECKING:
    from guard.ledger.pages import Page
    from guard.ledger.streams import Clock


class Transfer:
    """One transfer (or one piece of one), from its `kv.transfer.begin` until both sides have ended it."""

    __slots__ = (
        "begin", "clock", "into", "late", "received", "request", "sender", "sent", "sent_at", "source_pool", "taint",
        "where",
    )  # fmt: skip

    def __init__(self, begin: TransferBegin, sender: RequestStream, where: Where, clock: Clock) -> None:
        self.begin = begin
        self.sender = sender
        self.request = sender.request
        self.where = where
        self.clock = clock
        """What the sender's stream had seen of others, this begin included."""
        self.source_pool = begin.pool_id
        self.into = PageSet()
        """The destination pages that it is listed for: those that the pool had when it began."""
        self.taint = Taint(pending=1)
        """Every label that its source pages carry while it is in flight."""
        self.sent: TransferStatus | None = None
        self.sent_at: Where | None = None
        self.received = False
        self.late: list[Late] = []
        """Pages that it may still write to although they were given up."""

    @property
    def id(self) -> str:
        """Its id, a piece's ``/k`` included."""
        return self.begin.transfer

    @property
    def pool(self) -> str:
        """The destination pool."""
        return self.begin.peer_pool

    def done_before(self, clock: Clock) -> bool:
        """Whether the sender's end is known to come before a point whose stream has seen `clock`.

        Only transfers order streams: the receiver's stream has seen the sender's up to the begin of the
        last transfer that it has ended itself.
        """
        return self.sent_at is not None and clock.get(self.where.stream, (0, -1)) >= (
            self.sent_at.epoch,
            self.sent_at.seq,
        )


class Late:
    """A writer that may still come to a page that its request gave up (or never had).

    It begins as a suspicion: the request gave the page up before its KV had arrived there. It is *bound* once
    a transfer that names the page is known, *confirmed* once the request can get the page no more (it ended,
    or did not take the page again in time), and then it is a `free-in-flight`. Should the sender end with
    `ok`, bytes went into a page of somebody else's at an unknown time: a `foreign-write`, and every reader of
    the page from then on may have read them.
    """

    __slots__ = (
        "confirmed", "index", "page", "pool", "released", "rs", "taint", "transfer", "unvouched", "victims", "written",
    )  # fmt: skip

    def __init__(self, rs: RequestStream, pool: str, index: int, page: Page | None, released: Where | None) -> None:
        self.rs = rs
        self.pool = pool
        self.index = index
        self.page = page
        """None when the pool has restarted since: nobody can get that page any more."""
        self.unvouched = rs.degraded or (page is not None and page.unvouched)
        self.released = released
        """The record that gave the page up; None when the request never had the page."""
        self.transfer: Transfer | None = None
        self.confirmed = False
        self.written = False
        self.taint = Taint(pending=1)
        """Empty until the sender's `ok`."""
        self.victims: list[RequestStream] = []
        """Those who own or owned the page while the writer may have come."""
