"""The page pool's books: which page is free, owned or cached, who owns it, and which pages must wait.

A page is in one of three states. *Free*: on the free list, a stack, so that the pages given back last are the
next ones handed out, in the order of the block table they were in. *Owned*: a request's. *Cached*: the prefix
cache's. A page that a transfer in flight names is *held*: given back, it stays off the free list until the
transfer is over at this side (deferred release), because a late writer or reader would meet its next owner.

The tag beside each page in shared memory says whose bytes it holds; it is cleared when the page changes hands
and written with the bytes, so a page that nobody filled is refused at the first read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.kernels.pages import scrub_pages
from engine.segment import TAG_WORDS, Segment

CACHED = "\0cached"
"""The owner of a page that the prefix cache has; no request can be called that."""


class PoolError(RuntimeError):
    """The caller's books and the pool's do not agree: a bug of the engine, never of a client."""


class PagePool:
    """Pages of one worker.

    Args:
        segment: The memory.
        shape: Of one page: [layers, 2, page_tokens, kv_heads, head_dim].
        dtype: Of keys and values.
        tag_key: Keyed tags cannot be met by choosing request ids; both sides of a transfer need the same.
        checked: False switches off the check of who frees what (fault double-free).

    Attributes:
        kv: [pages, layers, 2, page_tokens, kv_heads, head_dim], the pages as the model sees them.
        tags: [pages, 3] int64, the owner tags.
    """

    def __init__(
        self,
        segment: Segment,
        shape: Sequence[int],
        dtype: torch.dtype,
        tag_key: bytes = b"",
        *,
        checked: bool = True,
    ) -> None:
        self.segment = segment
        self.kv = segment.data.view(dtype).view(segment.pages, *shape)
        self.tags = segment.tags
        self.page_tokens = shape[2]
        self._tag_key = tag_key
        self._checked = checked
        self._free = list(range(segment.pages - 1, -1, -1))
        self._owner: list[str | None] = [None] * segment.pages
        self._generation = [0] * segment.pages
        self._holds: dict[str, list[int]] = {}
        self._held: dict[int, int] = {}
        self._deferred: dict[int, str] = {}

    @property
    def pages(self) -> int:
        """All of them."""
        return self.segment.pages

    @property
    def free_pages(self) -> int:
        """Pages that `alloc` can hand out now."""
        return len(self._free)

    @property
    def deferred_pages(self) -> int:
        """Pages that were given back and wait for a transfer."""
        return len(self._deferred)

    @property
    def cached_pages(self) -> int:
        """Pages that the prefix cache has."""
        return self._owner.count(CACHED)

    @property
    def owned_pages(self) -> int:
        """Pages of requests."""
        return self.pages - self._owner.count(None) - self._owner.count(CACHED)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.page_tokens)

    def owner(self, page: int) -> str | None:
        """The request that owns the page, `CACHED`, or None."""
        return self._owner[page]

    def generation(self, page: int) -> int:
        """How often the page has been handed out."""
        return self._generation[page]

    def alloc(self, request: str, count: int) -> list[int] | None:
        """Hands out pages, all or none.

        Returns:
            The pages, a new generation of each begun and its tag cleared; None if there are too few.
        """
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owner[page] = request
            self._generation[page] += 1
        self.tags[pages] = 0
        return pages

    def free(self, request: str, pages: Iterable[int]) -> list[int]:
        """Takes pages back from their owner.

        Returns:
            The pages that are free now; those held by a transfer follow from `unhold`.

        Raises:
            PoolError: One is not that request's.
        """
        return self._give_back(request, list(pages))

    def cache(self, request: str, pages: Iterable[int]) -> None:
        """Hands pages from their owner to the prefix cache; contents and tags stay.

        Raises:
            PoolError: One is not that request's, or a transfer holds it.
        """
        for page in pages:
            self._expect(page, request)
            if page in self._held:
                raise PoolError(f"page {page} of {request} is cached while a transfer names it")
            self._owner[page] = CACHED

    def evict(self, pages: Iterable[int]) -> None:
        """Takes pages back from the prefix cache.

        Raises:
            PoolError: One is not cached, or a transfer holds it.
        """
        pages = list(pages)
        for page in pages:
            if page in self._held:
                raise PoolError(f"page {page} is evicted while a transfer names it")
        self._give_back(CACHED, pages)

    def hold(self, holder: str, pages: Iterable[int]) -> None:
        """Keeps pages off the free list on behalf of a transfer, whoever gives them back meanwhile."""
        pages = list(pages)
        if holder in self._holds:
            raise PoolError(f"{holder} holds pages already")
        self._holds[holder] = pages
        for page in pages:
            self._held[page] = self._held.get(page, 0) + 1

    def unhold(self, holder: str) -> dict[str, list[int]]:
        """Ends a hold; nothing happens if there is none.

        Returns:
            The pages that became free by it, by the request that had given them back.
        """
        freed: dict[str, list[int]] = {}
        for page in self._holds.pop(holder, ()):
            self._held[page] -= 1
            if self._held[page]:
                continue
            del self._held[page]
            request = self._deferred.pop(page, None)
            if request is not None:
                freed.setdefault(request, []).append(page)
        for pages in freed.values():
            self._push(pages)
        return freed

    def scrub(self, pages: Sequence[int]) -> None:
        """Clears the tags of pages and overwrites them with zeros."""
        scrub_pages(self.segment.data, self.tags, pages)

    def tag(self, tenant: str, request: str, generation: int) -> tuple[int, int, int]:
        """The words of an owner tag, signed as the tensors are."""
        return self._word(b"t" + tenant.encode()), self._word(b"r" + request.encode()), generation

    def tags_of(self, tenant: str, request: str, generations: Sequence[int]) -> Tensor:
        """[n, 3] int64: the tags of a request's pages."""
        tenant_word, request_word, _ = self.tag(tenant, request, 0)
        rows = torch.empty((len(generations), TAG_WORDS), dtype=torch.int64)
        rows[:, 0] = tenant_word
        rows[:, 1] = request_word
        rows[:, 2] = torch.tensor(generations, dtype=torch.int64)
        return rows

    def _word(self, data: bytes) -> int:
        return int.from_bytes(blake2b(data, digest_size=8, key=self._tag_key).digest(), "little", signed=True)

    def _expect(self, page: int, owner: str) -> None:
        if self._checked and (self._owner[page] != owner or page in self._deferred):
            raise PoolError(f"page {page} is {self._owner[page]!r}'s, not {owner!r}'s")

    def _give_back(self, owner: str, pages: list[int]) -> list[int]:
        if self._checked and len(set(pages)) != len(pages):
            raise PoolError(f"{owner!r} gives a page back twice: {pages}")
        for page in pages:
            self._expect(page, owner)
        now = [page for page in pages if page not in self._held]
        for page in pages:
            if page in self._held:
                self._deferred[page] = owner
        self._push(now)
        return now

    def _push(self, pages: list[int]) -> None:
        self.tags[pages] = 0
        for page in reversed(pages):
            self._owner[page] = None
            self._free.append(page)
