"""What a restarted guard knows of before: streams, pools and live requests, and nothing of what is in the pages."""

from __future__ import annotations

from dataclasses import dataclass

from guard.findings import Kind
from guard.ledger.lifecycle import CANNOT_VOUCH
from guard.ledger.requests import Request, RequestStream, Where
from guard.ledger.streams import Stream
from guard.ledger.world import World
from guard.records import Role


@dataclass(frozen=True)
class RestoredStream:
    """How far a stream was judged."""

    name: str
    epoch: int
    processed: int
    """The last record of the epoch that was judged; -1 if none was."""
    time_ns: int = 0
    past: tuple[int, ...] = ()
    """Epochs that are over, oldest first."""


@dataclass(frozen=True)
class RestoredPool:
    """A pool, as its `kv.pool` record said."""

    id: str
    stream: str
    pages: int
    page_tokens: int
    role: Role


@dataclass(frozen=True)
class RestoredRequest:
    """A request that was known on a stream."""

    request: str
    stream: str
    tenant: str
    ended: bool = False


@dataclass(frozen=True)
class Restored:
    """All of it."""

    streams: tuple[RestoredStream, ...] = ()
    pools: tuple[RestoredPool, ...] = ()
    requests: tuple[RestoredRequest, ...] = ()


def resume(world: World, streams: dict[str, Stream], before: Restored) -> None:
    """Goes on where the guard before this one stopped.

    A page is vouched for once it is handed out anew. What a request did before is not known: findings that would
    follow from its not having done it are degraded, or none where they would hit whoever has the page now.
    """
    world.restored = True
    for known in before.streams:
        stream = streams[known.name] = Stream(
            known.name, epoch=known.epoch, next_seq=known.processed + 1, processed=known.processed,
            time_ns=known.time_ns, resumed=known.processed + 1,
        )  # fmt: skip
        stream.past.extend(known.past)
    world.blind.update(streams, (pool.stream for pool in before.pools))
    pools = []
    for announced in before.pools:
        state = world.pool(announced.id)
        world.give(state, announced.stream)
        state.size, state.page_tokens, state.role = announced.pages, announced.page_tokens, announced.role
        pools.append(state)
    with_pool = {pool.stream for pool in before.pools}
    pools += [world.pool(name) for name in streams if name not in with_pool]
    for live in before.requests:
        request = world.requests.setdefault(live.request, Request(live.request))
        rs = request.streams[live.stream] = RequestStream(request, live.stream, live.tenant)
        rs.degraded = True
        if live.ended:
            rs.ended, rs.ended_unseen = _last(streams, live.stream), True
    for live in before.requests:
        if live.request in world.requests:
            world.note_over(world.requests[live.request])
    for state in pools:
        world.gaps += 1
        last = _last(streams, state.stream)
        # Just after the last record: a hole that is found right there says more, and takes this finding over.
        where = last._replace(time_ns=last.time_ns + 1)
        world.report(Kind.STREAM_GAP, where, state.id, degraded=True, reason=CANNOT_VOUCH)
        state.lose_sight()


def _last(streams: dict[str, Stream], name: str) -> Where:
    stream = streams.get(name)
    if stream is None:
        return Where(0, name, 0, 0)
    return Where(stream.time_ns, name, stream.epoch, max(stream.processed, 0))
