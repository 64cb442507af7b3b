"""Rules for what goes into a page and what comes out of it: `kv.write`, `kv.read`, `kv.refuse`, `kv.respond`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from guard.findings import Kind
from guard.ledger import late
from guard.ledger.pages import Page, PoolState
from guard.ledger.requests import Request, RequestStream, Where
from guard.ledger.streams import Stream
from guard.ledger.taint import Taint, join
from guard.ledger.world import Evidence, World
from guard.records import PUBLIC, PageSet, Read, Refuse, Respond, Scope, Write

_PUBLIC = Taint({PUBLIC: ()})

ByLabel = list[tuple[Taint, list[Evidence]]]
"""Labels of pages that a request named, and the pages that carry each."""


def write(world: World, stream: Stream, rs: RequestStream, record: Write, where: Where) -> None:
    """The request's own KV is in the pages now."""
    pool = world.pool(record.pool_id, stream.name)
    label = rs.label
    if record.tenant is not None and record.tenant not in label.origins:
        label = join((label, Taint({record.tenant: (rs.request.id,)})))
    if record.scope is Scope.PUBLIC:
        label = _PUBLIC
    for index, page in pool.within(record.pages):
        late.settle(page, stream.clock)
        if page.owner is rs:
            page.label = label
            page.valid = page.touched = True
        else:
            into_foreign_page(world, rs, pool, index, page, where, label)
        for transfer in page.outgoing:
            transfer.taint.absorb(page.label)
    rs.valid_in(pool.id).written = record.tokens


def into_foreign_page(
    world: World, rs: RequestStream, pool: PoolState, index: int, page: Page, where: Where, label: Taint,
    transfer: str | None = None,
) -> None:  # fmt: skip
    """Bytes of a request went into a page that it does not own."""
    owner = page.owner
    world.report(
        Kind.FOREIGN_WRITE, where, pool.id, rs, evidence=[Evidence(index, page)],
        tenants={owner.tenant} - {rs.tenant} if owner else (), requests={owner.request.id} if owner else (),
        subjects=[owner.request] if owner else [], transfer=transfer,
        reason="bytes went into a page that their request did not own",
    )  # fmt: skip
    page.label = join((page.label, label))


def read(world: World, stream: Stream, rs: RequestStream, record: Read, where: Where) -> None:
    """Attention reads the pages: they must be the request's, written for it, and nobody else's data."""
    pool = world.pool(record.pool_id, stream.name)
    tenant = record.tenant or rs.tenant
    stale, by_label = _look(rs, pool, record.pages)
    of = len(record.pages)
    _stale_read(world, rs, pool, where, stale, f"read {of} pages, {len(stale)} of them not valid for the request")
    _too_far(world, rs, record, pool, where)
    _foreign_read(world, rs, tenant, pool, where, by_label, "read pages that hold other tenants' data")
    rs.taste([taint for taint, _ in by_label], tenant)
    rs.looked(rs.reads, where, pool.id, record.pages, pool.limit)
    crossing(world, rs.request)


def refuse(world: World, stream: Stream, rs: RequestStream, record: Refuse, where: Where) -> None:
    """The worker did not read the pages: they are judged as if it had, and nothing is the worse for it.

    What the records call the request's own contradicts the worker. Whether they do is known only when no label of
    these pages can become another tenant's any more.
    """
    pool = world.pool(record.pool_id, stream.name)
    tenant = record.tenant or rs.tenant
    stale, by_label = _look(rs, pool, record.pages)
    of = len(record.pages)
    reason = f"the worker refused {of} pages, {len(stale)} of them not valid for the request"
    _stale_read(world, rs, pool, where, stale, reason)
    reason = "the worker refused pages that hold other tenants' data"
    _foreign_read(world, rs, tenant, pool, where, by_label, reason)
    others = {evidence.page_index for evidence in stale}
    own = [(index, page.unvouched) for index, page in pool.within(record.pages) if index not in others]

    def contradicted() -> None:
        foreign = {e.page_index for taint, evidence in by_label if taint.foreign_to(tenant) for e in evidence}
        for unvouched in (False, True):
            pages = [Evidence(i, None) for i, lost in own if lost is unvouched and i not in foreign]
            if pages:
                world.report(
                    Kind.HOOK_DIVERGENCE, where, pool.id, rs, evidence=pages, degraded=unvouched,
                    reason="the worker refused pages that the records say are the request's",
                )  # fmt: skip

    if any(taint.open for taint, _ in by_label):
        world.decide_later(rs.request, contradicted)
    else:
        contradicted()


def _look(rs: RequestStream, pool: PoolState, pages: PageSet) -> tuple[list[Evidence], ByLabel]:
    """Which of the pages are not valid for the request, and whose data is in those that must be its own."""
    permitted = rs.permitted.get(pool.id, set())
    stale: list[Evidence] = []
    by_label: dict[tuple[int, bool], tuple[Taint, list[Evidence]]] = {}
    for index, page in pool.within(pages):
        if not page.readable_by(rs):
            stale.append(Evidence(index, page))
        if index in permitted and rs.request.id in page.sharers:
            continue
        for taint in (page.label, *(writer.taint for writer in page.late)):
            key = (id(taint), page.unvouched)
            if key in by_label:
                by_label[key][1].append(Evidence(index, page))
            elif taint.origins or taint.open:
                by_label[key] = (taint.doubted() if page.unvouched else taint, [Evidence(index, page)])
    # Pages beyond a pool's end may be any number.
    stale += [Evidence(index, None) for index in islice(pool.beyond(pages), 1024)]
    return stale, list(by_label.values())


def _stale_read(
    world: World, rs: RequestStream, pool: PoolState, where: Where, stale: list[Evidence], reason: str
) -> None:
    if stale:
        world.report(Kind.STALE_READ, where, pool.id, rs, evidence=stale, reason=reason)


def _too_far(world: World, rs: RequestStream, record: Read, pool: PoolState, where: Where) -> None:
    """More tokens are read than are valid."""
    valid = rs.valid_in(pool.id).tokens
    if record.tokens > valid and pool.page_tokens is not None:
        # A page that holds no tokens holds none that are valid.
        first = valid // pool.page_tokens if pool.page_tokens else 0
        beyond = list(pool.within(record.pages))[first:]
        world.report(
            Kind.STALE_READ, where, pool.id, rs, evidence=[Evidence(i, p) for i, p in beyond],
            degraded=rs.degraded, reason=f"read {record.tokens} tokens, {valid} are valid",
        )  # fmt: skip


def _foreign_read(
    world: World, rs: RequestStream, tenant: str, pool: PoolState, where: Where, by_label: ByLabel, reason: str
) -> None:
    """Says which labels are another tenant's, now and whenever one becomes so."""
    for taint, evidence in by_label:
        check = _foreign_label(world, rs, tenant, pool, where, taint, evidence, reason)
        check()
        taint.watch(check)


def _foreign_label(
    world: World, rs: RequestStream, tenant: str, pool: PoolState, where: Where, taint: Taint,
    evidence: list[Evidence], reason: str,
) -> Callable[[], None]:  # fmt: skip
    def check() -> None:
        foreign = taint.foreign_to(tenant)
        if foreign:
            world.report(
                Kind.FOREIGN_READ, where, pool.id, rs, evidence=[Evidence(e.page_index, None) for e in evidence],
                tenants=foreign, requests=world.foreign_requests(taint, foreign),
                degraded=not taint.surely_foreign_to(tenant), reason=reason,
            )  # fmt: skip
            crossing(world, rs.request)

    return check


def respond(world: World, rs: RequestStream, record: Respond, where: Where) -> None:
    """Bytes leave for the client."""
    if not 200 <= record.status < 300:
        return
    rs.looked(rs.responses, where, record.pool_id, PageSet(), 0)
    label, tenant = rs.label, record.tenant or rs.tenant

    def check() -> None:
        foreign = label.foreign_to(tenant)
        if foreign:
            _tainted(world, rs, where, record.pool_id, label, foreign)

    check()
    label.watch(check)
    crossing(world, rs.request)
    dead_or_rejected(world, rs.request)


def crossing(world: World, request: Request) -> None:
    """A request that crosses tenants on one stream and answers on another: those have no order between them."""
    for reader in request.streams.values():
        foreign = reader.foreign
        if not foreign:
            continue
        for rs in request.streams.values():
            if rs is not reader and rs.responses:
                where, pool, _ = rs.responses[0]
                _tainted(world, rs, where, pool, reader.label, foreign)


def _tainted(world: World, rs: RequestStream, where: Where, pool: str, label: Taint, foreign: set[str]) -> None:
    world.report(
        Kind.TAINTED_RESPONSE, where, pool, rs, tenants=foreign, requests=world.foreign_requests(label, foreign),
        degraded=foreign.isdisjoint(label.sure),
        reason="output left for the client after the request had read other tenants' data",
    )  # fmt: skip


def dead_or_rejected(world: World, request: Request) -> None:
    """What must not happen once some stream said `rejected` or `failed`, in whichever order it is learned."""
    if request.rejections:
        for rs in request.streams.values():
            for where, pool, _ in rs.responses[:1]:
                world.report(
                    Kind.WRONG_STATUS, where, pool, rs,
                    reason="answered 2xx although a worker rejected the request",
                )  # fmt: skip
    for stream, death in request.deaths.items():
        for rs in request.streams.values():
            if rs.stream == stream:
                continue
            known = death.clock.get(rs.stream, (0, -1))
            for looked in (*rs.reads, *rs.responses):
                if (looked.where.epoch, looked.where.seq) <= known:
                    continue
                pool_read = world.pools.get(looked.pool)
                world.report(
                    Kind.ZOMBIE_REQUEST, looked.where, looked.pool, rs,
                    evidence=[Evidence(i, None) for i in pool_read.clip(looked.pages)] if pool_read else (),
                    degraded=death.degraded, reason=f"went on although {stream} had ended it as {death.outcome}",
                )  # fmt: skip
