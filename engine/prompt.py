"""A request on the prefill worker, and the pages of its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.faults import Fault
from engine.host import Host
from engine.messages import Prefill, Reserve, StopTransfer
from engine.prefix import CachedPage, PrefixCache
from engine.sequence import Sequence
from engine.transport.sender import Transfer
from guard.records import Alloc, Cache, Share


@dataclass(slots=True, eq=False)
class Prompt:
    """A request on the prefill worker."""

    message: Prefill
    sequence: Sequence
    reserve: Reserve | None = None
    """Where decode wants the pages."""
    shared: list[CachedPage] = field(default_factory=list)
    """Cached pages that the block table starts with."""
    sent: int = 0
    """Pages that transfers were started for."""
    in_flight: list[Transfer] = field(default_factory=list)
    done: list[Transfer] = field(default_factory=list)
    first_token: int | None = None
    computed_at: float = 0.0
    """When the first token was there, by `time.monotonic`."""
    ended: bool = False
    """`kv.request.end` is recorded; what is left are transfers to be over."""
    over: tuple[str, str] | None = None
    """Code and reason for decode, when it is not handed off."""
    stopped: StopTransfer | None = None
    """Decode waits for `TransferStopped` instead of `Handoff`."""
    rejected: bool = False
    """Fault swallowed-reject: a placeholder is handed off."""

    @property
    def name(self) -> str:
        """The request's id."""
        return self.message.request

    @property
    def touched(self) -> list[int]:
        """Destination pages that transfers have begun to write, once none is in flight."""
        return [page for transfer in self.done if transfer.begun for page in transfer.destination]

    @property
    def sent_all(self) -> bool:
        """Whether everything was computed and has arrived."""
        return self.first_token is not None and self.sent == len(self.sequence.pages) and not self.in_flight


class PromptPages:
    """Gives pages to prompts, from the prefix cache where it can, and takes them back.

    Args:
        host: The worker's means.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pool = host.pool
        self._faults = host.config.faults
        self._cache = PrefixCache(host.config.page_tokens, by_tenant=Fault.SHARED_PREFIX not in host.config.faults)

    def give(self, prompt: Prompt) -> bool:
        """Fills the prompt's block table; False if there are too few pages now."""
        pool, sequence, host = self._pool, prompt.sequence, self._host
        if host.config.prefix_cache:
            prompt.shared = self._cache.acquire(sequence.tenant, sequence.prompt)
        shared = prompt.shared
        needed = pool.pages_for(len(sequence.prompt)) - len(shared)
        if needed > pool.free_pages + self._cache.evictable:
            self.forget(prompt)
            return False
        evicted = self._cache.evict(needed - pool.free_pages)
        if evicted:
            pool.evict(evicted)
            host.freed(sequence, evicted)
        if shared:
            pages = [entry.page for entry in shared]
            sequence.extend(pages, torch.tensor([entry.tag for entry in shared], dtype=torch.int64))
            sequence.computed = len(shared) * pool.page_tokens
            host.emit(Share, sequence, pages, share_from=shared[-1].writer)
            host.counters["prefix_hit_tokens"] += sequence.computed
        pages = pool.alloc(prompt.name, needed) or []
        generations = [pool.generation(page) for page in pages]
        sequence.extend(pages, pool.tags_of(sequence.tenant, prompt.name, generations))
        host.emit(Alloc, sequence, pages)
        return True

    def take_back(self, prompt: Prompt, *, keep: bool) -> None:
        """Takes back what is the prompt's own; pages of transfers in flight stay until these are over.

        Args:
            prompt: Whose.
            keep: Whether full pages go to the prefix cache.
        """
        sequence, pool, host = prompt.sequence, self._pool, self._host
        pages = sequence.pages[len(prompt.shared) :]
        if keep and host.config.prefix_cache:
            full = len(sequence.prompt) // pool.page_tokens
            tags = [(tenant, writer, generation) for tenant, writer, generation in sequence.tags[:full].tolist()]
            offered = list(zip(sequence.pages, tags, strict=False))
            taken = self._cache.insert(sequence.tenant, prompt.name, sequence.prompt, offered)
            if taken:
                pool.cache(prompt.name, taken)
                host.emit(Cache, sequence, taken)
            pages = [page for page in pages if page not in set(taken)]
        host.freed(sequence, pool.free(prompt.name, pages))

    def forget(self, prompt: Prompt) -> None:
        """The prompt uses its cached pages no more."""
        self._cache.release(prompt.shared)
        prompt.shared = []

    def pieces(self, prompt: Prompt) -> Iterator[Transfer]:
        """The transfers that can start now: of whole pieces that are computed, once decode has said where to.

        The last piece waits for the first token, which is handed over with it.
        """
        reserve, sequence = prompt.reserve, prompt.sequence
        if reserve is None or prompt.ended:
            return
        size, total = self._pool.page_tokens, len(sequence.pages)
        in_pieces = self._host.config.piece_pages > 0
        piece = self._host.config.piece_pages if in_pieces else total
        while prompt.sent < total:
            first, stop = prompt.sent, min(prompt.sent + piece, total)
            tokens = min(stop * size, len(sequence.prompt))
            if tokens > sequence.computed or (stop == total and prompt.first_token is None):
                return
            prompt.sent = stop
            transfer = Transfer(
                id=f"{reserve.transfer}/{first // piece}" if in_pieces else reserve.transfer,
                grant=reserve.transfer,
                request=prompt.name,
                tenant=sequence.tenant,
                context=sequence.context,
                source=sequence.pages[first:stop],
                destination=reserve.pages[first:stop],
                generations=reserve.generations[first:stop],
                nonce=reserve.nonce,
                tags=self._pool.tags_of(sequence.tenant, prompt.name, reserve.generations[first:stop]).numpy(),
                first=first,
                tokens=tokens - first * size,
                pool=reserve.decode,
                address=reserve.address,
            )
            prompt.in_flight.append(transfer)
            if Fault.LEASE_EXPIRY not in self._faults:
                self._pool.hold(transfer.id, transfer.source)
            yield transfer
