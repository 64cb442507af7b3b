"""All that the ledger knows, and how it says what it concludes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from guard.findings import Confidence, Finding, Kind
from guard.ledger.pages import Page, PoolState
from guard.ledger.requests import Request, RequestStream, Where
from guard.ledger.taint import Taint
from guard.ledger.transfers import Late, Transfer
from guard.policy import Policy
from guard.records import Admit, PageSet, Record


class LedgerSettings(BaseModel):
    """How long the ledger waits and how much it keeps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reorder_window_ms: float | None = Field(default=200.0, ge=0)
    """How long records wait for what they depend on; None: until the end of the input (replay)."""
    leak_grace_s: float = Field(default=30.0, ge=0)
    """How long after its end a request may still own pages."""
    max_held: int = Field(default=16_384, ge=1)
    """Records that one stream may hold back; then what they wait for is given up at once."""
    restart_records: int = Field(default=256, ge=1)
    """In replay: records (of any stream) after which no more of an epoch that has a successor are expected."""
    max_ended: int = Field(default=16_384, ge=1)
    """Requests that are over and still remembered, for records that come late."""
    max_streams: int = Field(default=4096, ge=1)
    """Streams followed; records of further ones are counted and dropped, and a `stream-gap` says so."""
    max_pool_pages: int = Field(default=4_194_304, ge=1)
    """Pages kept for a pool, however large it says it is (or when it never says)."""
    max_pools: int = Field(default=4096, ge=1)
    """Pools followed. Here and below: records that would take the ledger beyond are counted and dropped, and a
    `stream-gap` says so."""
    max_pages: int = Field(default=16_777_216, ge=1)
    """Pages kept in all pools together, counted in blocks of 512."""
    max_requests: int = Field(default=1_048_576, ge=1)
    """Requests that are not over."""
    max_request_streams: int = Field(default=64, ge=1)
    """Streams on which one request is followed."""
    max_transfers: int = Field(default=65_536, ge=1)
    """Transfers in flight."""

    @property
    def window_ns(self) -> int | None:
        """The reorder window in nanoseconds."""
        return None if self.reorder_window_ms is None else int(self.reorder_window_ms * 1e6)


FOREVER = 1 << 62
"""A time that does not come before the end of the input."""

MAX_OTHERS = 64
"""Other tenants and other requests that one finding names, the smallest ids."""


class Evidence(NamedTuple):
    """One page that shows a finding."""

    page_index: int
    page: Page | None
    """None: whether the guard had lost sight of it is judged elsewhere."""


class World:
    """The ledger's tables."""

    def __init__(
        self,
        policy: Policy,
        settings: LedgerSettings,
        on_finding: Callable[[Finding, bool], None],
        on_retire: Callable[[Request], None],
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.on_finding = on_finding
        self.on_retire = on_retire
        self.now_ns = 0
        """Arrival clock: only deadlines of the reorder window look at it."""
        self.pools: dict[str, PoolState] = {}
        self.blocks = 0
        """Blocks of pages kept, over all pools."""
        self.requests: dict[str, Request] = {}
        self.ended: OrderedDict[str, Request] = OrderedDict()
        """Requests that are over and own nothing any more, the longest over first."""
        self.transfers: dict[str, Transfer] = {}
        self.pieces: dict[str, dict[str, Transfer]] = {}
        """Bare id → pieces begun."""
        self.done: OrderedDict[str, str] = OrderedDict()
        """Ids of transfers that both sides ended, lately, and the pools that they went to."""
        self.given_up: OrderedDict[str, str] = OrderedDict()
        """Ids of transfers that were ended, lately, although their begin had not come → the pool that said so."""
        self.suspects: list[tuple[int | None, Late]] = []
        """Late writers that wait to be confirmed, with their deadlines."""
        self.undecided: deque[tuple[int, Request]] = deque()
        """Deadlines, and whose `undecided` the next of is due then."""
        self.findings: dict[tuple[Kind, str | None, str | None], Finding] = {}
        self.blind: set[str] = set()
        """Streams of whose present epoch something was missed: what was made in it may not be known."""
        self.restored = False
        """The guard was restarted, and knows some of what the one before it knew."""
        self.gaps = 0
        """Holes given up, sequences that ran backwards, transfers that ended and never began."""

    def pool(self, pool: str, stream: str | None = None) -> PoolState:
        """The pool, made if it was never heard of; `stream` when it is known to be that stream's."""
        state = self.pools.get(pool)
        if state is None:
            state = self.pools[pool] = PoolState(pool, stream or pool, self.settings.max_pool_pages)
            state.lost_sight = state.stream in self.blind
        elif stream is not None and state.page_tokens is None:
            self.give(state, stream)
        return state

    def keep(self, state: PoolState, blocks: set[int]) -> None:
        """Counts blocks of a pool's pages as kept."""
        before = len(state.blocks)
        state.blocks |= blocks
        self.blocks += len(state.blocks) - before

    def give(self, state: PoolState, stream: str) -> None:
        """The pool is this stream's."""
        if state.stream != stream:
            state.stream = stream
            if stream in self.blind:
                state.lose_sight()

    def unseen(self, rs: RequestStream) -> bool:
        """Whether the request may have done things there before the guard's restart."""
        return self.restored and rs.degraded

    def request(self, record: Record) -> RequestStream:
        """The record's request on the record's stream."""
        assert record.request is not None
        assert record.tenant is not None
        request = self.requests.get(record.request)
        if request is None:
            request = self.requests[record.request] = Request(record.request)
        rs = request.streams.get(record.stream)
        if rs is None:
            rs = request.streams[record.stream] = RequestStream(request, record.stream, record.tenant)
            # It may have begun in what was missed, unless this is where it begins.
            rs.degraded = record.stream in self.blind and not isinstance(record, Admit)
            self.ended.pop(request.id, None)
        return rs

    def note_over(self, request: Request) -> None:
        """Keeps a request that is over for a while, and lets go of the longest over.

        One that still owns pages is kept: that it gives them back is to be told from a double free.
        """
        if request.over and request.owns_nothing and self.requests.get(request.id) is request:
            self.ended.setdefault(request.id, request)
        while len(self.ended) > self.settings.max_ended:
            self.retire(next(iter(self.ended.values())))

    def decide_later(self, request: Request, judge: Callable[[], None]) -> None:
        """Judges once the reorder window is over: what other streams tell until then counts, in whichever order."""
        window = self.settings.window_ns
        self.undecided.append((FOREVER if window is None else self.now_ns + window, request))
        request.undecided.append(judge)

    def decide(self, now_ns: int) -> None:
        """Judges what has waited for long enough."""
        while self.undecided and self.undecided[0][0] <= now_ns:
            _, request = self.undecided.popleft()
            if request.undecided:  # none once it is forgotten
                request.undecided.pop(0)()

    def retire(self, request: Request) -> None:
        """Forgets a request that is over."""
        while request.undecided:
            request.undecided.pop(0)()
        self.ended.pop(request.id, None)
        self.requests.pop(request.id, None)
        for transfer in list(request.transfers.values()):
            self.drop_transfer(transfer)
        for rs in request.streams.values():
            self.unshare(rs)
            for lates in list(rs.late.values()):
                for late in list(lates):
                    self.drop_late(late)
        for finding in request.findings:
            self.findings.pop((finding.kind, finding.request, finding.pool), None)
        self.on_retire(request)

    def unshare(self, rs: RequestStream) -> None:
        """The request reads what was shared to it no more."""
        for name, indices in rs.shared.items():
            pages = self.pool(name).pages
            for index in indices:
                if (page := pages.get(index)) is not None:
                    page.sharers.discard(rs.request.id)
        rs.shared.clear()

    def drop_transfer(self, transfer: Transfer) -> None:
        """Forgets a transfer: both sides ended it, or one never will."""
        transfer.request.transfers.pop(transfer.id, None)
        self.unlist_incoming(transfer)
        if transfer.sent is None:
            self.unlist_outgoing(transfer)
            transfer.taint.close_one()
        if self.transfers.pop(transfer.id, None) is None:
            return
        base, slash, _ = transfer.id.rpartition("/")
        if slash and base in self.pieces:
            self.pieces[base].pop(transfer.id, None)
            if not self.pieces[base]:
                del self.pieces[base]
                self.remember(self.done, base, transfer.pool)
        self.remember(self.done, transfer.id, transfer.pool)

    def remember(self, ids: OrderedDict[str, str], transfer: str, pool: str) -> None:
        """Puts a transfer that is over into `done` or `given_up`; the oldest goes when there are too many."""
        ids[transfer] = pool
        if len(ids) > self.settings.max_ended:
            ids.popitem(last=False)

    def unlist_incoming(self, transfer: Transfer) -> None:
        """Its destination pages wait for it no more."""
        pool = self.pool(transfer.pool)
        incoming = pool.incoming
        for index in transfer.into:
            writers = incoming.get(index)
            if writers and transfer in writers:
                writers.remove(transfer)
                if not writers:
                    del incoming[index]

    def unlist_outgoing(self, transfer: Transfer) -> None:
        """Its source pages add to its label no more."""
        pool = self.pool(transfer.source_pool)
        for index in transfer.begin.pages.below(pool.limit):
            page = pool.pages.get(index)
            if page is not None and transfer in page.outgoing:
                page.outgoing.remove(transfer)

    def drop_late(self, late: Late) -> None:
        """The writer cannot come any more, or never was one."""
        lates = late.rs.late.get((late.pool, late.index))
        if lates and late in lates:
            lates.remove(late)
            if not lates:
                del late.rs.late[late.pool, late.index]
        if late.page is not None and late in late.page.late:
            late.page.late.remove(late)
        if late.transfer is not None and late in late.transfer.late:
            late.transfer.late.remove(late)
        if not late.written:
            late.written = True
            late.taint.close_one()

    def report(
        self,
        kind: Kind,
        where: Where,
        pool: str | None,
        rs: RequestStream | None = None,
        *,
        evidence: Iterable[Evidence] = (),
        tenants: Iterable[str] = (),
        requests: Iterable[str] = (),
        subjects: Iterable[Request] | None = None,
        transfer: str | None = None,
        degraded: bool = False,
        reason: str = "",
    ) -> Finding:
        """Makes a finding, or adds to the one that there is for this kind, request and pool.

        Args:
            kind: What it is.
            where: The record that shows it; the earliest is kept.
            pool: The pool meant.
            rs: The request that it is about.
            evidence: Pages that show it. When the guard had lost sight of all of them it is degraded.
            tenants: Other tenants concerned.
            requests: Other requests concerned.
            subjects: Whom a kill hits; the request itself when not given.
            transfer: The transfer meant.
            degraded: Whether the evidence is incomplete whatever the pages say.
            reason: One line for people.
        """
        pages = list(evidence)
        unsure = degraded or (bool(pages) and all(e.page is not None and e.page.unvouched for e in pages))
        hit = list(subjects) if subjects is not None else [rs.request] if rs is not None else []
        key = (kind, rs.request.id if rs else None, pool)
        finding = self.findings.get(key)
        new = finding is None
        if finding is None:
            finding = self.findings[key] = Finding(
                kind=kind, action=self.policy.action(kind), request=key[1], tenant=rs.tenant if rs else None,
                pool=pool, stream=where.stream, epoch=where.epoch, seq=where.seq, time_ns=where.time_ns,
                transfer=transfer, reason=reason, confidence=Confidence.DEGRADED,
            )  # fmt: skip
            before: tuple[object, ...] | None = None
        else:
            before = _contents(finding)
        known = (finding.time_ns, finding.stream, finding.epoch, finding.seq)
        if where < known or (where == known and (transfer or "") < (finding.transfer or "")):
            finding.time_ns, finding.stream, finding.epoch, finding.seq = where
            finding.transfer, finding.reason = transfer, reason
        if pages:
            merged = PageSet((*finding.pages.runs, *PageSet.of(sorted(e.page_index for e in pages)).runs))
            finding.pages = merged.sorted()
        _add_smallest(finding.other_tenants, tenants)
        _add_smallest(finding.other_requests, (request for request in requests if request != key[1]))
        if not unsure:
            finding.confidence = Confidence.FULL
        finding.action = self.policy.action(kind, finding.confidence)
        for request in ([rs.request] if rs else []) + hit:
            if finding not in request.findings:
                request.findings.append(finding)
        finding.subjects.update(request.id for request in hit)
        if before != _contents(finding):
            self.on_finding(finding, new)
        return finding

    def foreign_requests(self, taint: Taint, tenants: Iterable[str]) -> set[str]:
        """The requests that those tenants' bytes in it come from."""
        return {request for tenant in tenants for request in taint.origins.get(tenant, ())}


def _add_smallest(ids: set[str], more: Iterable[str]) -> None:
    ids.update(more)
    if len(ids) > MAX_OTHERS:
        ids.difference_update(sorted(ids)[MAX_OTHERS:])


def _contents(finding: Finding) -> tuple[object, ...]:
    """All of it that more evidence can change."""
    return (
        finding.time_ns, finding.stream, finding.epoch, finding.seq, finding.transfer, finding.reason, finding.pages,
        finding.action, finding.confidence, len(finding.subjects), frozenset(finding.other_tenants),
        frozenset(finding.other_requests),
    )  # fmt: skip
