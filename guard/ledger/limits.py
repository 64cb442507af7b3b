"""What the ledger keeps at most: a record that would take it beyond is dropped, counted, and told of once a limit.

Memory is bounded by what the operator allows, not by what senders say. The limits stand in `LedgerSettings`; the
record that meets one still takes its place in its stream.
"""

from __future__ import annotations

from guard.findings import Kind
from guard.ledger.requests import Where
from guard.ledger.world import World
from guard.records import PageSet, Pool, Record, Scrub, TransferBegin

BLOCK = 512
"""Pages are counted in blocks of so many: the whole block once one page of it is named."""

MAX_PAGE_TRANSFERS = 64
"""Transfers in flight that may name one page, out of it or into it."""

LIMITS: dict[str, str] = {
    "streams": "streams",
    "pools": "pools",
    "pages": "pages",
    "requests": "live requests",
    "request_streams": "streams of one request",
    "transfers": "transfers in flight",
    "page_transfers": "transfers of one page",
}
"""Limit → what there would be too many of."""


def exceeded(world: World, record: Record) -> str | None:
    """The first limit that the record would exceed; None when there is room, which is then taken."""
    if type(record) is Record:  # only takes its place
        return None
    settings = world.settings
    if record.request is not None and not isinstance(record, (Pool, Scrub)):
        request = world.requests.get(record.request)
        if request is None:
            if len(world.requests) - len(world.ended) >= settings.max_requests:
                return "requests"
        elif len(request.streams) >= settings.max_request_streams:
            rs = request.streams.get(record.stream)
            if rs is None or rs.gone:
                return "request_streams"
    begin = record if isinstance(record, TransferBegin) else None
    pool = record.pool_id
    new = {pool, begin.peer_pool if begin else pool} - world.pools.keys()
    if new and len(world.pools) + len(new) > settings.max_pools:
        return "pools"
    touched: dict[str, set[int]] = {}
    if not isinstance(record, Pool) and (pages := getattr(record, "pages", None)) is not None:
        _touch(world, touched, pool, pages)
    if begin is not None:
        _touch(world, touched, begin.peer_pool, begin.peer_pages)
    if touched and (world.blocks + sum(map(len, touched.values()))) * BLOCK > settings.max_pages:
        return "pages"
    if begin is not None:
        if begin.transfer not in world.transfers and len(world.transfers) >= settings.max_transfers:
            return "transfers"
        if _crowded(world, begin):
            return "page_transfers"
    for name, blocks in touched.items():
        world.keep(world.pool(name), blocks)
    return None


def blocks_of(pages: PageSet) -> set[int]:
    """The blocks that these pages are in."""
    return {block for start, stop in pages.runs for block in range(start // BLOCK, (stop - 1) // BLOCK + 1)}


def tell(world: World, limit: str, where: Where) -> None:
    """A record beyond the limit: what it says is not known, and of those to come neither."""
    if limit == "page_transfers":
        most, setting = MAX_PAGE_TRANSFERS, "a constant"
    else:
        most, setting = getattr(world.settings, f"max_{limit}"), f"ledger.max_{limit}"
    world.report(
        Kind.STREAM_GAP,
        where,
        None,
        reason=f"more than {most} {LIMITS[limit]} ({setting}): records of others are dropped",
    )


def _touch(world: World, touched: dict[str, set[int]], pool: str, pages: PageSet) -> None:
    """Adds the blocks of the pool that are not kept yet."""
    state = world.pools.get(pool)
    end = world.settings.max_pool_pages
    if state is not None:
        end = min(state.size, state.limit)
    blocks = blocks_of(pages.below(end))
    if state is not None:
        blocks -= state.blocks
    if blocks:
        touched.setdefault(pool, set()).update(blocks)


def _crowded(world: World, begin: TransferBegin) -> bool:
    source, destination = world.pools.get(begin.pool_id), world.pools.get(begin.peer_pool)
    if source is not None:
        for index in source.clip(begin.pages):
            page = source.pages.get(index)
            if page is not None and len(page.outgoing) >= MAX_PAGE_TRANSFERS:
                return True
    if destination is not None:
        for index in destination.clip(begin.peer_pages):
            if len(destination.incoming.get(index, ())) >= MAX_PAGE_TRANSFERS:
                return True
    return False
