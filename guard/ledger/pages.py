"""Pages and pools: who owns a page, whether its bytes are its owner's, and whose data they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from guard.ledger.taint import EMPTY, Taint
from guard.records import PageSet, Role

if TYPE_CHECKING:
    from guard.ledger.requests import RequestStream
    from guard.ledger.transfers import Late, Transfer


class Page:
    """One page of a pool, in its present generation."""

    __slots__ = (
        "cached", "generation", "label", "late", "outgoing", "owner", "sharers", "touched", "unvouched", "valid",
    )  # fmt: skip

    def __init__(self, unvouched: bool) -> None:
        self.owner: RequestStream | None = None
        self.cached = False
        """In the prefix cache: no owner, contents kept, may be shared."""
        self.generation = 0
        self.valid = False
        """Its owner's bytes are in it, this generation."""
        self.touched = False
        """Something was written or landed in it, this generation."""
        self.label: Taint = EMPTY
        self.sharers: set[str] = set()
        """Requests that may read it without owning it, this generation."""
        self.unvouched = unvouched
        """The guard lost sight of it (a gap, a restart) and has not seen it handed out since."""
        self.outgoing: list[Transfer] = []
        """Transfers in flight that read from it."""
        self.late: list[Late] = []
        """Writers of earlier owners that may still come."""

    def readable_by(self, rs: RequestStream) -> bool:
        """Whether the page is valid for the request: written, landed or shared in this generation."""
        return self.valid and (self.owner is rs or rs.request.id in self.sharers)


class PoolState:
    """One page pool, as large as its `kv.pool` record says; pages are made when first touched."""

    __slots__ = (
        "blocks",
        "id",
        "incoming",
        "limit",
        "lost_sight",
        "page_tokens",
        "pages",
        "role",
        "size",
        "stream",
    )

    def __init__(self, pool: str, stream: str, limit: int) -> None:
        self.id = pool
        self.stream = stream
        self.limit = limit
        """Pages that the guard keeps track of at most."""
        self.size = limit
        """Pages, once announced."""
        self.page_tokens: int | None = None
        self.role: Role | None = None
        self.lost_sight = False
        self.pages: dict[int, Page] = {}
        self.blocks: set[int] = set()
        """Blocks of pages that were named: what `max_pages` counts."""
        self.incoming: dict[int, list[Transfer]] = {}
        """Transfers begun that write to a page and that this side has not ended. Beside the pages, because a
        sender's begin may be known before this side's restart is."""

    @property
    def tokens(self) -> int | None:
        """Capacity in tokens, once announced."""
        return None if self.page_tokens is None else self.size * self.page_tokens

    def page(self, index: int) -> Page:
        """The page, made if it was never touched."""
        page = self.pages.get(index)
        if page is None:
            page = self.pages[index] = Page(self.lost_sight)
        return page

    def within(self, pages: PageSet) -> Iterator[tuple[int, Page]]:
        """The pages of the set that the pool has, in order. Indices beyond its end make no pages."""
        for index in self.clip(pages):
            yield index, self.page(index)

    def clip(self, pages: PageSet) -> PageSet:
        """The part of the set that the pool has and the guard keeps track of."""
        return pages.below(min(self.size, self.limit))

    def beyond(self, pages: PageSet) -> PageSet:
        """The part of the set that the pool does not have."""
        return PageSet((max(start, self.size), stop) for start, stop in pages.runs if stop > self.size)

    def lose_sight(self) -> None:
        """Something about the pool was missed: vouch for no page until it is handed out again."""
        self.lost_sight = True
        for page in self.pages.values():
            page.unvouched = True

    def clear(self) -> list[RequestStream]:
        """Starts afresh with a new epoch: every label empty, every page unowned. Says who owned some."""
        owners: dict[RequestStream, None] = {}
        for index in sorted(self.pages):
            owner = self.pages[index].owner
            if owner is not None:
                owner.owned.get(self.id, set()).discard(index)
                owners[owner] = None
        self.pages.clear()
        self.blocks.clear()
        self.lost_sight = False
        return list(owners)
