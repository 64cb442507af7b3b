"""The prefix cache: full pages of prompts, kept for the next prompt of the same tenant that starts alike.

A page is found by the tenant and a hash chained over the tokens of all full pages up to and with it, so a page
is only ever reused behind the very same tokens, and never for another tenant.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_KEY_BYTES = 16


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page in the cache."""

    key: bytes
    page: int
    tag: tuple[int, int, int]
    """The owner tag that its bytes were written with."""
    writer: str
    """The request that computed it."""
    users: int = 0
    """Requests that read it; it is not evicted while there are any."""


class PrefixCache:
    """Which cached page holds which tokens of whom.

    Pages that nobody uses are evicted least recently used first; within one prompt the last pages go first, so
    that what stays is reachable.

    Args:
        page_tokens: Tokens a page.
        by_tenant: False leaves the tenant out of the key (fault shared-prefix).
    """

    def __init__(self, page_tokens: int, *, by_tenant: bool = True) -> None:
        self._page_tokens = page_tokens
        self._by_tenant = by_tenant
        self._pages: dict[bytes, CachedPage] = {}
        self._idle: OrderedDict[bytes, CachedPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def evictable(self) -> int:
        """Pages that nobody uses."""
        return len(self._idle)

    def acquire(self, tenant: str, prompt: Sequence[int]) -> list[CachedPage]:
        """The longest run of cached pages that the prompt starts with; they are in use until `release`.

        At least one token of the prompt is left out, because its logits have to be computed.
        """
        found: list[CachedPage] = []
        for key in self._keys(tenant, prompt[: max(len(prompt) - 1, 0)]):
            entry = self._pages.get(key)
            if entry is None:
                break
            entry.users += 1
            self._idle.pop(key, None)
            found.append(entry)
        return found

    def release(self, entries: Sequence[CachedPage]) -> None:
        """A request uses the pages no more."""
        for entry in reversed(entries):
            entry.users -= 1
            if not entry.users:
                self._idle[entry.key] = entry

    def insert(
        self,
        tenant: str,
        writer: str,
        prompt: Sequence[int],
        pages: Sequence[tuple[int, tuple[int, int, int]]],
    ) -> list[int]:
        """Offers a prompt's computed pages; a page whose tokens are cached already is not taken.

        Args:
            tenant: Whose prompt.
            writer: The request.
            prompt: Its tokens.
            pages: (page, tag) of the prompt's pages in order, from the first.

        Returns:
            The pages taken: they are the cache's now.
        """
        taken: list[CachedPage] = []
        for key, (page, tag) in zip(self._keys(tenant, prompt), pages, strict=False):
            if key not in self._pages:
                self._pages[key] = entry = CachedPage(key=key, page=page, tag=tag, writer=writer)
                taken.append(entry)
        for entry in reversed(taken):
            self._idle[entry.key] = entry
        return [entry.page for entry in taken]

    def evict(self, count: int) -> list[int]:
        """Forgets up to so many unused pages, the least recently used ones.

        Returns:
            The pages; they are the caller's to give back to the pool.
        """
        evicted: list[int] = []
        while self._idle and len(evicted) < count:
            key, entry = self._idle.popitem(last=False)
            del self._pages[key]
            evicted.append(entry.page)
        return evicted

    def _keys(self, tenant: str, tokens: Sequence[int]) -> Iterator[bytes]:
        key = blake2b(tenant.encode() if self._by_tenant else b"", digest_size=_KEY_BYTES).digest()
        for end in range(self._page_tokens, len(tokens) + 1, self._page_tokens):
            page = array("q", tokens[end - self._page_tokens : end])
            key = blake2b(key + page.tobytes(), digest_size=_KEY_BYTES).digest()
            yield key
