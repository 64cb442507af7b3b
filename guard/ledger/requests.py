"""Requests: what each has read, on each stream, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from guard.findings import Finding
from guard.ledger.taint import Taint, join
from guard.records import Outcome, PageSet

if TYPE_CHECKING:
    from guard.ledger.streams import Clock
    from guard.ledger.transfers import Late, Transfer


MAX_KEPT = 1024
"""Reads, responses and things given up that are kept of a request on a stream."""


class Where(NamedTuple):
    """A record's place: enough to name it in a finding and to order it within its stream."""

    time_ns: int
    stream: str
    epoch: int
    seq: int


class Looked(NamedTuple):
    """A read, or a 2xx response, kept for rules that compare streams."""

    where: Where
    pool: str
    pages: PageSet


class Death(NamedTuple):
    """A `rejected` or `failed` on a stream, and what that stream had seen of the others by then."""

    where: Where
    outcome: Outcome
    clock: Clock
    degraded: bool
    """Whether it may have seen more of them, in records that the guard missed."""


MOST_TOKENS = 2**63 - 1
"""Counts of tokens do not go beyond this; it is the convention's largest number."""


class Valid:
    """A request's valid tokens in one pool: what was shared plus what landed, or the last write's count."""

    __slots__ = ("landed", "shared", "written")

    def __init__(self) -> None:
        self.shared = 0
        self.landed = 0
        self.written = 0

    @property
    def tokens(self) -> int:
        """How many tokens of the request may be attended to."""
        return max(min(self.shared + self.landed, MOST_TOKENS), self.written)

    def share(self, tokens: int) -> None:
        """So many more were shared to it."""
        self.shared = min(self.shared + tokens, MOST_TOKENS)

    def land(self, tokens: int) -> None:
        """So many more landed for it."""
        self.landed = min(self.landed + tokens, MOST_TOKENS)


class Request:
    """One request over all streams."""

    __slots__ = ("deaths", "findings", "id", "rejections", "streams", "transfers", "undecided")

    def __init__(self, request: str) -> None:
        self.id = request
        self.streams: dict[str, RequestStream] = {}
        self.deaths: dict[str, Death] = {}
        self.rejections: set[str] = set()
        self.transfers: dict[str, Transfer] = {}
        """Those begun for it and not yet ended on both sides."""
        self.findings: list[Finding] = []
        """Those that have it as a subject or name it."""
        self.undecided: list[Callable[[], None]] = []
        """What is to be said of it once all that bears on it must have come: see `World.decide_later`."""

    @property
    def tenant(self) -> str | None:
        """The tenant it was authenticated as; streams that disagree make findings, not tenants."""
        return min((rs.tenant for rs in self.streams.values()), default=None)

    @property
    def over(self) -> bool:
        """Whether it ended on every stream that it was seen on."""
        return all(rs.ended is not None for rs in self.streams.values())

    @property
    def owns_nothing(self) -> bool:
        """Whether no page is left with it on any stream."""
        return all(rs.owns_nothing() for rs in self.streams.values())

    @property
    def lineage(self) -> set[str]:
        """The tenants whose data it has read, its own included."""
        return {tenant for rs in self.streams.values() for tenant in rs.label.origins}

    @property
    def killed(self) -> bool:
        """Whether some finding ends it."""
        return any(self.id in finding.kills for finding in self.findings)

    @property
    def verdict(self) -> str:
        """``kill`` or ``allow``."""
        return "kill" if self.killed else "allow"

    @property
    def disclosed(self) -> bool:
        """Whether bytes left for the client that other tenants' data had gone into."""
        return any(f.kind == "tainted-response" and f.request == self.id for f in self.findings)


class RequestStream:
    """One request on one stream (and epoch): the unit that owns pages, reads and writes."""

    __slots__ = (
        "degraded", "ended", "ended_unseen", "gone", "label", "late", "over_capacity", "owned", "permitted", "reads",
        "released", "request", "responses", "shared", "stream", "tenant", "valid",
    )  # fmt: skip

    def __init__(self, request: Request, stream: str, tenant: str) -> None:
        self.request = request
        self.stream = stream
        self.tenant = tenant
        self.ended: Where | None = None
        self.ended_unseen = False
        """Its end was seen by the guard before this one only."""
        self.gone = False
        """The stream has restarted since: the pages that it had are no more."""
        self.label: Taint = Taint({tenant: (request.id,)})
        """What its next write is made of: its lineage on this stream, its own tenant included."""
        self.valid: dict[str, Valid] = {}
        self.owned: dict[str, set[int]] = {}
        self.shared: dict[str, set[int]] = {}
        self.permitted: dict[str, set[int]] = {}
        """Pages of other tenants that were shared to it under ``prefix_sharing: permit``."""
        self.released: deque[tuple[str, PageSet, Where]] = deque(maxlen=MAX_KEPT)
        """What it gave up lately, in order, for transfers whose begin arrives later."""
        self.late: dict[tuple[str, int], list[Late]] = {}
        """Pages that it gave up although a writer of its own may still come."""
        self.reads: list[Looked] = []
        self.responses: list[Looked] = []
        self.over_capacity: int | None = None
        """Prompt tokens, when they are more than the pool holds."""
        self.degraded = False
        """The guard missed some of its records."""

    def taste(self, taints: list[Taint], tenant: str) -> None:
        """Its lineage grows by the labels of what it read."""
        self.label = join((self.label, *taints)) if taints else self.label
        if tenant not in self.label.origins:
            self.label = join((self.label, Taint({tenant: (self.request.id,)})))

    def looked(self, kept: list[Looked], where: Where, pool: str, pages: PageSet, limit: int) -> None:
        """Keeps a read or a response; when there are too many, as one with the last.

        Args:
            kept: `reads` or `responses`.
            where: Its record.
            pool: The pool read, or the response's.
            pages: The pages read.
            limit: Pages that the guard keeps track of: of those beyond, a merged read keeps none.
        """
        if len(kept) < MAX_KEPT:
            kept.append(Looked(where, pool, pages))
            return
        last = kept[-1]
        if last.pool == pool:
            pages = PageSet((*last.pages.below(limit).runs, *pages.below(limit).runs)).sorted()
        kept[-1] = Looked(where, pool, pages)

    @property
    def foreign(self) -> set[str]:
        """The tenants that its lineage on this stream crosses to."""
        return self.label.foreign_to(self.tenant)

    def valid_in(self, pool: str) -> Valid:
        """Its token counts in a pool."""
        valid = self.valid.get(pool)
        if valid is None:
            valid = self.valid[pool] = Valid()
        return valid

    def owns_nothing(self) -> bool:
        """Whether no page is left with it."""
        return not any(self.owned.values())
