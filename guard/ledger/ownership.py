"""Rules for who owns a page: `kv.alloc`, `kv.share`, `kv.free`, `kv.cache`, `kv.scrub`."""

from __future__ import annotations

from collections.abc import Callable

from guard.findings import Kind
from guard.ledger import late
from guard.ledger.pages import Page, PoolState
from guard.ledger.requests import RequestStream, Where
from guard.ledger.streams import Stream
from guard.ledger.taint import EMPTY, Taint
from guard.ledger.world import Evidence, World
from guard.records import Alloc, Cache, Free, PageSet, Scrub, Share


def alloc(world: World, stream: Stream, rs: RequestStream, record: Alloc, where: Where) -> None:
    """The pages belong to the request now; the old bytes, and their label, are still in them."""
    pool = world.pool(record.pool_id, stream.name)
    mine = rs.owned.setdefault(pool.id, set())
    for index, page in pool.within(record.pages):
        late.settle(page, stream.clock)
        owner = page.owner
        if owner is not None and owner is not rs:
            if owner.ended is None:
                _double_owner(world, rs, owner, pool, index, page, where)
            _disown(owner, pool, index, page, where, world)
            owner.released.append((pool.id, PageSet.of([index]), where))
            world.note_over(owner.request)
        if world.policy.scrub == "require":
            _unscrubbed(world, rs, pool, index, page, where)
        page.owner = rs
        page.cached = page.valid = page.touched = page.unvouched = False
        page.generation += 1
        page.sharers = set()
        mine.add(index)
        late.taken_again(rs, pool.id, index, world)
        late.new_owner(rs, page, world)


def _double_owner(
    world: World,
    rs: RequestStream,
    owner: RequestStream,
    pool: PoolState,
    index: int,
    page: Page,
    where: Where,
) -> None:
    world.report(
        Kind.DOUBLE_OWNER, where, pool.id, rs, evidence=[Evidence(index, page)],
        tenants={owner.tenant} - {rs.tenant}, requests={owner.request.id}, subjects=[rs.request, owner.request],
        reason="the page was handed out while another live request owned it",
    )  # fmt: skip


def _unscrubbed(world: World, rs: RequestStream, pool: PoolState, index: int, page: Page, where: Where) -> None:
    unvouched = page.unvouched

    def check(label: Taint = page.label) -> None:
        foreign = label.foreign_to(rs.tenant)
        if foreign:
            world.report(
                Kind.UNSCRUBBED_REUSE, where, pool.id, rs, evidence=[Evidence(index, None)], tenants=foreign,
                requests=world.foreign_requests(label, foreign), degraded=unvouched,
                reason="the page still held another tenant's bytes when it was handed out",
            )  # fmt: skip

    check()
    page.label.watch(check)


def _disown(owner: RequestStream, pool: PoolState, index: int, page: Page, where: Where, world: World) -> None:
    """The owner loses the page, by its own record or because another took it."""
    late.gave_up(owner, pool, index, page, where, world)
    owner.owned.get(pool.id, set()).discard(index)
    page.owner = None


def share(world: World, stream: Stream, rs: RequestStream, record: Share, where: Where) -> None:
    """A prefix-cache hit: the request may read pages that it did not write."""
    pool = world.pool(record.pool_id, stream.name)
    shared = rs.shared.setdefault(pool.id, set())
    new = 0
    for index, page in pool.within(record.pages):
        if index not in shared or rs.request.id not in page.sharers:
            new += 1
        shared.add(index)
        page.sharers.add(rs.request.id)
        if world.policy.prefix_sharing == "permit":
            rs.permitted.setdefault(pool.id, set()).add(index)
            continue
        check = _foreign_share(world, rs, record, pool, index, page, where)
        check()
        page.label.watch(check)
    tokens = record.tokens if record.tokens is not None else len(record.pages) * (pool.page_tokens or 0)
    if record.pages:
        rs.valid_in(pool.id).share(tokens * new // len(record.pages))


def _foreign_share(
    world: World, rs: RequestStream, record: Share, pool: PoolState, index: int, page: Page, where: Where
) -> Callable[[], None]:
    label, tenant, unvouched = page.label, record.tenant or rs.tenant, page.unvouched

    def check() -> None:
        foreign = label.foreign_to(tenant)
        if foreign:
            world.report(
                Kind.FOREIGN_SHARE, where, pool.id, rs, evidence=[Evidence(index, None)], tenants=foreign,
                requests=world.foreign_requests(label, foreign),
                degraded=unvouched or not label.surely_foreign_to(tenant),
                reason="a prefix-cache hit on pages that another tenant's data went into",
            )  # fmt: skip

    return check


def give_back(world: World, stream: Stream, rs: RequestStream, record: Free | Cache, where: Where) -> None:
    """The pages go to the free list, or to the prefix cache; what they hold stays."""
    pool = world.pool(record.pool_id, stream.name)
    caching = isinstance(record, Cache)
    wrong: list[Evidence] = []
    others: set[RequestStream] = set()
    given: list[int] = []
    for index, page in pool.within(record.pages):
        _source_in_flight(world, pool, index, page, where)
        if page.owner is rs:
            _disown(rs, pool, index, page, where, world)
            given.append(index)
            page.cached = caching
            # Whoever cached the pages may go on reading them: it wrote them in this generation.
            page.sharers = {rs.request.id} if caching else set()
            if caching:
                rs.shared.setdefault(pool.id, set()).add(index)
        elif page.owner is None and page.cached:
            if not caching:
                page.cached = False
                page.sharers = set()
        else:
            wrong.append(Evidence(index, page))
            if page.owner is not None:
                others.add(page.owner)
    rs.released.append((pool.id, PageSet.of(given), where))
    if rs.owns_nothing():
        world.note_over(rs.request)
        if not caching:
            valid = rs.valid_in(pool.id)
            valid.landed = valid.written = 0
    if wrong:
        world.report(
            Kind.DOUBLE_FREE, where, pool.id, rs, evidence=wrong, tenants={o.tenant for o in others} - {rs.tenant},
            requests={o.request.id for o in others},
            reason="the request gave back pages that it did not own",
        )  # fmt: skip


def _source_in_flight(world: World, pool: PoolState, index: int, page: Page, where: Where) -> None:
    for transfer in page.outgoing:
        world.report(
            Kind.FREE_IN_FLIGHT, where, pool.id, transfer.sender, evidence=[Evidence(index, page)],
            transfer=transfer.id,
            reason=f"page given up while transfer {transfer.id} out of it had not ended on this side",
        )  # fmt: skip


def scrub(world: World, stream: Stream, record: Scrub) -> None:
    """The pages were zeroed: nobody's data is in them, and nothing valid."""
    pool = world.pool(record.pool_id, stream.name)
    for _, page in pool.within(record.pages):
        late.settle(page, stream.clock)
        page.label = EMPTY
        page.valid = False
