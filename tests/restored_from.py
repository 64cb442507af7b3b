"""What a journal would know of a ledger: for tests that restart one."""

from __future__ import annotations

from guard.ledger import Ledger
from guard.ledger.restored import Restored, RestoredPool, RestoredRequest, RestoredStream


def restored_from(ledger: Ledger) -> Restored:
    """The ledger's streams, announced pools and requests, as the witness was told of them."""
    world = ledger._world
    return Restored(
        streams=tuple(
            RestoredStream(s.name, s.epoch, s.processed, s.time_ns, tuple(s.past))
            for s in ledger.streams.values()
            if s.epoch >= 0
        ),
        pools=tuple(
            RestoredPool(p.id, p.stream, p.size, p.page_tokens, p.role)
            for p in world.pools.values()
            if p.page_tokens is not None and p.role is not None
        ),
        requests=tuple(
            RestoredRequest(request.id, rs.stream, rs.tenant, rs.ended is not None)
            for request in ledger.requests.values()
            for rs in request.streams.values()
            if not rs.gone
        ),
    )
