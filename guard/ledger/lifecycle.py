"""Rules for pools, requests and streams as a whole: what begins, ends, restarts, leaks or goes missing."""

from __future__ import annotations

from guard.findings import Kind
from guard.ledger import access, late, limits
from guard.ledger.requests import Death, RequestStream, Where
from guard.ledger.streams import Gap, Stream
from guard.ledger.world import Evidence, World
from guard.records import (
    Admit,
    Alloc,
    Outcome,
    PageSet,
    Pool,
    Read,
    Record,
    RequestEnd,
    Respond,
    Role,
    Share,
    TransferBegin,
    TransferStatus,
    Write,
)  # fmt: skip

CANNOT_VOUCH = "the guard was restarted: it cannot vouch for this pool's pages until they are handed out again"
OVER = (Alloc, Share, Write, Read, TransferBegin, Respond)
"""Records that a request may not have on a stream that it ended on."""


def pool(world: World, stream: Stream, record: Pool, where: Where) -> None:
    """A pool exists."""
    state = world.pool(record.pool_id)
    world.give(state, stream.name)
    state.size, state.page_tokens = record.pages, record.page_tokens
    state.role = record.role
    holds = record.pages * record.page_tokens
    if record.role is not Role.ROUTER and holds < record.context_limit:
        world.report(
            Kind.OVER_CAPACITY, where, state.id,
            reason=f"the pool holds {holds} tokens, the worker advertises {record.context_limit}",
        )  # fmt: skip


def admit(world: World, stream: Stream, rs: RequestStream, record: Admit) -> None:
    """A request enters; more than the pool holds must be rejected."""
    holds = world.pool(record.pool_id, stream.name).tokens
    if holds is not None and record.tokens > holds and world.pool(record.pool_id).role is not Role.ROUTER:
        rs.over_capacity = record.tokens


def went_on(world: World, stream: Stream, rs: RequestStream, record: Record, where: Where) -> None:
    """Checks that hold for whatever a request does: not too large for the pool, not over already."""
    if rs.ended is not None and isinstance(record, OVER):
        pages = getattr(record, "pages", PageSet())
        state = world.pool(record.pool_id, stream.name)
        world.report(
            Kind.ZOMBIE_REQUEST, where, state.id, rs, evidence=[Evidence(i, None) for i in state.clip(pages)],
            degraded=rs.ended_unseen, reason=f"{record.NAME} after its end on {stream.name}",
        )  # fmt: skip
    finished = isinstance(record, RequestEnd) and record.outcome is Outcome.FINISHED
    if rs.over_capacity is not None and (finished or isinstance(record, (TransferBegin, Read, Respond))):
        holds = world.pool(record.pool_id, stream.name).tokens
        world.report(
            Kind.OVER_CAPACITY, where, record.pool_id, rs, subjects=(),
            reason=f"a prompt of {rs.over_capacity} tokens was not rejected by a pool that holds {holds}",
        )  # fmt: skip
        rs.over_capacity = None


def request_end(world: World, stream: Stream, rs: RequestStream, record: RequestEnd, where: Where) -> None:
    """The request is over on this stream."""
    if rs.ended is None or rs.ended_unseen:
        rs.ended, rs.ended_unseen = where, False
    if record.outcome in (Outcome.REJECTED, Outcome.FAILED):
        rs.request.deaths.setdefault(stream.name, Death(where, record.outcome, stream.clock, rs.degraded))
    if record.outcome is Outcome.REJECTED and world.pool(stream.name).role is not Role.ROUTER:
        rs.request.rejections.add(stream.name)
    close(world, rs)
    access.dead_or_rejected(world, rs.request)


def close(world: World, rs: RequestStream) -> None:
    """What follows from the end of a request on a stream, its own or the stream's."""
    world.unshare(rs)
    for writers in list(rs.late.values()):
        for writer in tuple(writers):
            late.confirm(writer, world)
    _never_owned(world, rs)
    late.over_elsewhere(rs.request, world)
    world.note_over(rs.request)


def _never_owned(world: World, rs: RequestStream) -> None:
    """Transfers in flight to pages that the request never had here: wherever they land, it is not its page."""
    for transfer in list(rs.request.transfers.values()):
        state = world.pool(transfer.pool)
        if transfer.received or state.stream != rs.stream:
            continue
        known = {writer.index for writer in transfer.late}
        world.keep(state, limits.blocks_of(state.clip(transfer.into)))
        for index, page in state.within(transfer.into):
            if page.owner is not rs and index not in known:
                late.suspect(rs, state.id, index, page, None, transfer, world)


def leaked(world: World, rs: RequestStream, where: Where) -> None:
    """The grace after a request's end is over: what does it still own?"""
    for name, indices in rs.owned.items():
        if indices:
            state = world.pool(name)
            world.report(
                Kind.PAGE_LEAK, where, name, rs, evidence=[Evidence(i, state.page(i)) for i in sorted(indices)],
                reason=f"{len(indices)} pages still owned {world.settings.leak_grace_s:g} s after the request ended",
            )  # fmt: skip


def restart(world: World, stream: Stream) -> None:
    """A new epoch: the stream's pools start afresh and its requests are over."""
    for transfer in list(world.transfers.values()):
        if transfer.where.stream == stream.name and transfer.sent is None:
            # The sender's process is gone and its source pages with it: nothing more can be added or written.
            transfer.sent = TransferStatus.FAILED
            world.unlist_outgoing(transfer)
            transfer.taint.close_one()
            for writer in tuple(transfer.late):
                late.judge(writer, world)
        receiver = transfer.request.streams.get(stream.name)
        if receiver is not None and world.pool(transfer.pool).stream == stream.name:
            transfer.received = True
            world.unlist_incoming(transfer)
        if transfer.received and transfer.sent is not None:
            world.drop_transfer(transfer)
    for request in list(world.requests.values()):
        rs = request.streams.get(stream.name)
        if rs is None or rs.gone:
            continue
        rs.gone = True
        for writers in list(rs.late.values()):
            for writer in tuple(writers):
                writer.page = None
                late.confirm(writer, world)
        rs.owned.clear()
        world.unshare(rs)
        if rs.ended is None:
            rs.ended = Where(stream.time_ns, stream.name, stream.epoch, stream.processed)
        world.note_over(request)
    for state in world.pools.values():
        if state.stream == stream.name:
            world.blocks -= len(state.blocks)
            for owner in state.clear():
                world.note_over(owner.request)
    world.blind.discard(stream.name)


def reborn(world: World, rs: RequestStream) -> None:
    """The request is admitted by a new epoch of a stream on which its last life ended with the old one."""
    del rs.request.streams[rs.stream]
    world.ended.pop(rs.request.id, None)


def lost(world: World, stream: Stream, gap: Gap, why: str) -> None:
    """Records are missing: says which pages it can vouch for no more."""
    world.gaps += 1
    world.blind.add(stream.name)
    where = Where(stream.time_ns, stream.name, stream.epoch, gap.first)
    why = f"{why}: records {gap.first} to {gap.last} of epoch {stream.epoch} are missing"
    resumed = gap.first == stream.resumed
    if resumed:
        why = f"{why}; {CANNOT_VOUCH}"
    pools = [p for p in world.pools.values() if p.stream == stream.name] or [world.pool(stream.name)]
    for request in world.requests.values():
        rs = request.streams.get(stream.name)
        if rs is not None:
            rs.degraded = True
    for state in pools:
        owned = [(i, p) for i, p in state.pages.items() if p.owner is not None]
        world.report(
            Kind.STREAM_GAP, where, state.id, evidence=[Evidence(i, None) for i, _ in owned],
            subjects={id(p.owner): p.owner.request for _, p in owned if p.owner is not None}.values(),
            degraded=resumed, reason=why,
        )  # fmt: skip
        state.lose_sight()
