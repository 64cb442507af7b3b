"""Rules for transfers: `kv.transfer.begin` and `kv.transfer.end` on either side."""

from __future__ import annotations

from guard.findings import Kind
from guard.ledger import late
from guard.ledger.access import into_foreign_page
from guard.ledger.pages import PoolState
from guard.ledger.requests import RequestStream, Where
from guard.ledger.streams import Clock, Stream
from guard.ledger.taint import EMPTY, join
from guard.ledger.transfers import Transfer
from guard.ledger.world import Evidence, World
from guard.records import PageSet, Role, TransferBegin, TransferEnd, TransferStatus


def begin(world: World, stream: Stream, rs: RequestStream, record: TransferBegin, where: Where) -> None:
    """Bytes may start to move: the transfer takes on its source pages' labels from now until the sender ends."""
    earlier = world.transfers.get(record.transfer)
    if earlier is not None:
        world.drop_transfer(earlier)
    transfer = Transfer(record, rs, where, {**stream.clock, stream.name: (where.epoch, where.seq)})
    world.transfers[transfer.id] = rs.request.transfers[transfer.id] = transfer
    base, slash, piece = transfer.id.rpartition("/")
    if slash and piece.isascii() and piece.isdecimal():
        world.pieces.setdefault(base, {})[transfer.id] = transfer
    _take_source(world, rs, record, transfer, where)
    # The receiver ended it when its begin had not come in time: it is over there.
    if record.peer_pool in (world.given_up.get(transfer.id), world.given_up.get(base)):
        transfer.received = True
        return
    pool = world.pool(record.peer_pool)
    receiver = rs.request.streams.get(pool.stream)
    transfer.into = pool.clip(record.peer_pages)
    for index in transfer.into:
        writers = pool.incoming.setdefault(index, [])
        if writers and writers[-1] is transfer:
            continue  # the record names the page twice
        writers.append(transfer)
        if receiver is not None:
            _begun_late(world, receiver, pool, index, transfer)


def _take_source(world: World, rs: RequestStream, record: TransferBegin, transfer: Transfer, where: Where) -> None:
    pool = world.pool(record.pool_id)
    gone: list[Evidence] = [Evidence(start, None) for start, _ in pool.beyond(record.pages).runs]
    for index, page in pool.within(record.pages):
        if page.outgoing and page.outgoing[-1] is transfer:
            continue  # the record names the page twice
        if page.owner is not rs and rs.request.id not in page.sharers:
            gone.append(Evidence(index, page))
        for taint in (page.label, *(writer.taint for writer in page.late)):
            transfer.taint.absorb(taint, doubtful=page.unvouched)
        page.outgoing.append(transfer)
    if gone:
        world.report(
            Kind.FREE_IN_FLIGHT, where, pool.id, rs, evidence=gone, transfer=transfer.id,
            reason=f"transfer {transfer.id} began from pages that its request did not own any more",
        )  # fmt: skip


def _begun_late(world: World, receiver: RequestStream, pool: PoolState, index: int, transfer: Transfer) -> None:
    """The receiver's stream may be ahead: has the request let go of the page already?"""
    page = None if receiver.gone else pool.page(index)
    unbound = [w for w in receiver.late.get((pool.id, index), ()) if w.transfer is None]
    if unbound:
        late.bind(unbound[-1], transfer, world)
    elif page is not None and page.owner is receiver:
        return
    else:
        released = next((w for p, pages, w in reversed(receiver.released) if p == pool.id and index in pages), None)
        if released is not None or (receiver.ended is not None and not receiver.gone):
            late.suspect(receiver, pool.id, index, page, released, transfer, world)


def missing_begin(world: World, record: TransferEnd) -> str | None:
    """The transfer id that a receiver's end must wait for; None when all is there (or it was done with)."""
    if record.transfer in world.transfers or record.transfer in world.done:
        return None
    pieces = world.pieces.get(record.transfer)
    if pieces:
        if any(t.sent not in (None, TransferStatus.OK) or t.sender.gone for t in pieces.values()):
            return None  # a sender begins no further piece after one that failed, or after its own restart
        begun = PageSet(run for t in pieces.values() for run in t.begin.peer_pages.runs).sorted()
        if PageSet((*begun.runs, *record.pages.runs)).sorted().runs == begun.runs:
            return None
    return record.transfer


def named(world: World, transfer: str) -> list[Transfer]:
    """The transfer of that id, or all its pieces begun so far."""
    exact = world.transfers.get(transfer)
    return [exact] if exact is not None else list(world.pieces.get(transfer, {}).values())


def end_sent(world: World, record: TransferEnd, where: Where) -> None:
    """The sender will touch the pages no more."""
    for transfer in named(world, record.transfer):
        if transfer.sent is not None or transfer.where.stream != where.stream:
            continue
        transfer.sent, transfer.sent_at = record.status, where
        world.unlist_outgoing(transfer)
        transfer.taint.close_one()
        for writer in tuple(transfer.late):
            late.judge(writer, world)
        if transfer.received:
            world.drop_transfer(transfer)


def end_received(world: World, stream: Stream, rs: RequestStream, record: TransferEnd, where: Where) -> None:
    """The receiver will touch the pages no more; with `ok` the bytes are there."""
    # Only the pool that a transfer goes to can say that it arrived: what another stream says of it is about no
    # transfer that is known.
    begun = [t for t in named(world, record.transfer) if t.pool == record.pool_id]
    if begun:
        landed_unseen = record.status is TransferStatus.OK and _begun_before(world, rs)
        if landed_unseen or missing_begin(world, record) is not None:
            covered = {i for t in begun for i in t.begin.peer_pages}
            rest = PageSet.of(i for i in record.pages if i not in covered)
            if rest:
                _unknown(world, rs, record, where, rest)
    elif world.done.get(record.transfer) != record.pool_id:
        _unknown(world, rs, record, where, record.pages)
    transfers = [t for t in begun if not t.received]
    if not transfers:
        return
    clock: Clock = dict(stream.clock)
    for transfer in transfers:
        for name, seen in transfer.clock.items():
            clock[name] = max(clock.get(name, seen), seen)
    stream.clock = clock
    pool = world.pool(record.pool_id, stream.name)
    if record.status is TransferStatus.OK:
        _landed(world, stream, rs, record, where, pool, transfers)
    elif record.digests is not None:
        # A receiver that refused what arrived because its bytes differ says so in its digests.
        _mismatched(world, rs, record, where, pool, transfers)
    for transfer in transfers:
        writers = tuple(transfer.late)
        if record.status is TransferStatus.OK:
            for writer in writers:
                late.arrived(writer, where, world)
        transfer.received = True
        world.unlist_incoming(transfer)
        for writer in writers:
            writer.confirmed = True
            late.judge(writer, world)
        if transfer.sent is not None:
            world.drop_transfer(transfer)


def _unknown(world: World, rs: RequestStream, record: TransferEnd, where: Where, never_sent: PageSet) -> None:
    """A transfer, or pieces of one, ended here and did not begin."""
    world.remember(world.given_up, record.transfer, record.pool_id)
    if record.status is not TransferStatus.OK:
        # A receiver whose sender died cannot know whether it had begun; nothing is said to have arrived.
        return
    world.gaps += 1
    pool = world.pool(record.pool_id, where.stream)
    before = _begun_before(world, rs)
    rs.degraded = True
    pages = list(pool.within(never_sent))
    for _, page in pages:
        page.unvouched = True
        if before and page.owner is rs:
            # What was sent before the guard's restart has replaced what the guard saw since.
            page.label = EMPTY
    world.report(
        Kind.STREAM_GAP, where, pool.id, rs, evidence=[Evidence(index, None) for index, _ in pages],
        transfer=record.transfer, degraded=before,
        reason=f"transfer {record.transfer} ended here and no begin of it ever came",
    )  # fmt: skip


def _begun_before(world: World, rs: RequestStream) -> bool:
    """Whether what ends here may have begun before the guard's restart."""
    return world.restored and all(
        world.unseen(sender) or world.pool(sender.stream).role is Role.ROUTER
        for sender in rs.request.streams.values()
        if sender is not rs
    )


def _landed(
    world: World, stream: Stream, rs: RequestStream, record: TransferEnd, where: Where, pool: PoolState,
    transfers: list[Transfer],
) -> None:  # fmt: skip
    sent_to = {i: t for t in transfers for i in pool.clip(t.begin.peer_pages)}
    mismatched = _mismatched(world, rs, record, where, pool, transfers)
    given_up = {w.index for t in transfers for w in t.late}
    for index, page in pool.within(record.pages):
        transfer = sent_to.get(index)
        if transfer is None:
            continue
        late.settle(page, stream.clock)
        if page.owner is rs:
            # Bytes that differ from what was sent may be the ones that were there before.
            before = [page.label] if index in mismatched else []
            page.label = join((transfer.taint, *before))
            page.valid = page.touched = True
        elif index not in given_up:
            into_foreign_page(world, rs, pool, index, page, where, transfer.taint, transfer.id)
        for onward in page.outgoing:
            onward.taint.absorb(page.label)
    begun = sum(t.begin.tokens for t in transfers)
    missing = PageSet.of(sorted(sent_to.keys() - set(pool.clip(record.pages))))
    rs.valid_in(pool.id).land(min(record.tokens, begun))
    if missing or record.tokens < begun:
        world.report(
            Kind.SHORT_TRANSFER, where, pool.id, rs, evidence=[Evidence(i, None) for i in missing],
            transfer=record.transfer,
            reason=f"{record.tokens} of {begun} tokens and {len(record.pages)} of {len(sent_to)} pages arrived",
        )  # fmt: skip


def _mismatched(
    world: World,
    rs: RequestStream,
    record: TransferEnd,
    where: Where,
    pool: PoolState,
    transfers: list[Transfer],
) -> set[int]:
    unverified = record.digests is None or any(t.begin.digests is None for t in transfers)
    if unverified and record.status is TransferStatus.OK and world.policy.digests == "require":
        world.report(
            Kind.UNVERIFIED_TRANSFER, where, pool.id, rs, transfer=record.transfer,
            reason="one side gave no digest",
        )  # fmt: skip
    if record.digests is None:
        return set()
    sent = {
        index: digest
        for t in transfers
        if t.begin.digests
        for index, digest in zip(t.begin.peer_pages, t.begin.digests, strict=True)
    }
    wrong = {
        index for index, digest in zip(record.pages, record.digests, strict=True) if sent.get(index, digest) != digest
    }
    if wrong:
        world.report(
            Kind.DIGEST_MISMATCH, where, pool.id, rs, evidence=[Evidence(i, None) for i in sorted(wrong)],
            transfer=record.transfer, reason=f"{len(wrong)} of {len(record.pages)} pages differ from what was sent",
        )  # fmt: skip
    return wrong
