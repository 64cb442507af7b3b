"""Writers that may come too late: a page given up before its request's KV had arrived there.

Nothing in the records orders a sender's bytes against what the receiver does with the page meanwhile, except
that the receiver has seen a later transfer of the same sender end. Until then the bytes may have come at any
time since the page was given up, and every order of arrival must judge the same. See `transfers.Late`.
"""

from __future__ import annotations

from guard.findings import Kind
from guard.ledger.pages import Page, PoolState
from guard.ledger.requests import Request, RequestStream, Where
from guard.ledger.streams import Clock
from guard.ledger.taint import join
from guard.ledger.transfers import Late, Transfer
from guard.ledger.world import Evidence, World
from guard.records import Role, TransferStatus

MAX_UNBOUND = 4
"""Suspicions without a transfer that one page keeps."""

MAX_VICTIMS = 64
"""Owners of the page that one late writer remembers, the first ones."""


def settle(page: Page, clock: Clock) -> None:
    """Writers that are known to be done before this point: their bytes are old bytes now."""
    for late in tuple(page.late):
        transfer = late.transfer
        if transfer is None or not late.confirmed or not transfer.done_before(clock):
            continue
        if transfer.sent is TransferStatus.OK:
            page.label = join((page.label, late.taint))
        page.late.remove(late)


def gave_up(rs: RequestStream, pool: PoolState, index: int, page: Page, where: Where, world: World) -> None:
    """The request lets go of a page that it owns: may a writer of its own still come to it?"""
    writers: list[Transfer | None] = [t for t in pool.incoming.get(index, ()) if t.request is rs.request]
    if not writers and not page.touched and pool.role not in (Role.PREFILL, Role.UNIFIED):
        writers = [None]
    for writer in writers:
        suspect(rs, pool.id, index, page, where, writer, world)


def suspect(
    rs: RequestStream, pool: str, index: int, page: Page | None, released: Where | None, writer: Transfer | None,
    world: World,
) -> None:  # fmt: skip
    """From here on `writer` (or one yet unknown) may write into the page."""
    if world.unseen(rs):
        return  # what it had, and what had arrived for it, before the guard's restart is not known
    if (
        writer is not None
        and page is not None
        and any(other.confirmed and other.rs is rs and other.transfer is writer for other in page.late)
    ):
        return  # it is expected already
    late = Late(rs, pool, index, page, released)
    rs.late.setdefault((pool, index), []).append(late)
    if page is not None:
        page.late.append(late)
        unbound = [other for other in page.late if other.transfer is None]
        if len(unbound) > MAX_UNBOUND:
            world.drop_late(unbound[0])
        if page.owner is not None and page.owner is not rs:
            _hit(late, page.owner)
    late.confirmed = rs.ended is not None
    if writer is not None:
        bind(late, writer, world)


def _hit(late: Late, owner: RequestStream) -> None:
    if len(late.victims) < MAX_VICTIMS and owner not in late.victims:
        late.victims.append(owner)


def bind(late: Late, writer: Transfer, world: World) -> None:
    """The transfer that may come too late is known."""
    late.transfer = writer
    writer.late.append(late)
    if late.confirmed:
        judge(late, world)
    else:
        window = world.settings.window_ns
        world.suspects.append((None if window is None else world.now_ns + window, late))


def taken_again(rs: RequestStream, pool: str, index: int, world: World) -> None:
    """The request owns the page once more: what comes is for this generation."""
    for late in tuple(rs.late.get((pool, index), ())):
        if not late.confirmed:
            world.drop_late(late)


def confirm(late: Late, world: World) -> None:
    """The request will not have the page again."""
    if not late.confirmed:
        late.confirmed = True
        judge(late, world)


def judge(late: Late, world: World) -> None:
    """Says what is known of a late writer; called whenever more is."""
    transfer = late.transfer
    if transfer is None or not late.confirmed:
        return
    if late.released is not None:
        world.report(
            Kind.FREE_IN_FLIGHT, late.released, late.pool, late.rs, evidence=[Evidence(late.index, None)],
            transfer=transfer.id, degraded=late.unvouched,
            reason=f"page given up while transfer {transfer.id} into it had not ended on this side",
        )  # fmt: skip
    if transfer.sent is TransferStatus.OK:
        assert transfer.sent_at is not None
        wrote(late, transfer, transfer.sent_at, world)
    elif transfer.sent is not None and transfer.received and not late.written:
        # Not before both sides said so: `ok` on either means that the bytes are there.
        world.drop_late(late)


def arrived(late: Late, where: Where, world: World) -> None:
    """The receiver itself says that the bytes are in the page."""
    late.confirmed = True
    judge(late, world)
    assert late.transfer is not None
    wrote(late, late.transfer, where, world)
    page = late.page
    if page is not None and late in page.late:
        page.late.remove(late)
        page.label = join((page.label, late.taint))


def wrote(late: Late, transfer: Transfer, where: Where, world: World) -> None:
    """One side says that the bytes are in the page; the earlier of the two is what the finding names."""
    if not late.written:
        late.written = True
        late.taint.absorb(transfer.taint, doubtful=late.unvouched)
        late.taint.close_one()
    foreign_write(late, where, world)


def foreign_write(late: Late, where: Where, world: World) -> None:
    """Bytes went into a page that their request did not own."""
    assert late.transfer is not None
    world.report(
        Kind.FOREIGN_WRITE, where, late.pool, late.rs, evidence=[Evidence(late.index, None)],
        tenants={v.tenant for v in late.victims} - {late.rs.tenant}, requests={v.request.id for v in late.victims},
        subjects=[v.request for v in late.victims], transfer=late.transfer.id, degraded=late.unvouched,
        reason=f"transfer {late.transfer.id} wrote into a page that its request had given up",
    )  # fmt: skip


def new_owner(rs: RequestStream, page: Page, world: World) -> None:
    """Somebody gets a page that late writers may still come to."""
    for late in page.late:
        if late.rs is rs:
            continue
        _hit(late, rs)
        if late.written and late.transfer is not None:
            foreign_write(late, late.transfer.sent_at or late.transfer.where, world)


def over_elsewhere(request: Request, world: World) -> None:
    """Drops suspicions that no transfer can confirm: every worker that could have begun one ended the request."""
    for rs in request.streams.values():
        senders = [o for o in request.streams.values() if o is not rs and world.pool(o.stream).role is not Role.ROUTER]
        if not senders or any(o.ended is None for o in senders):
            continue
        for lates in list(rs.late.values()):
            for late in tuple(lates):
                if late.transfer is None:
                    world.drop_late(late)
