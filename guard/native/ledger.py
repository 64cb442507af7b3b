"""The native ledger under the Python one's interface (`guard.ledger.Ledger`), findings and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from guard.findings import Action, Confidence, Finding, Kind
from guard.ledger import LedgerSettings
from guard.ledger.restored import Restored
from guard.native import _core
from guard.policy import Policy
from guard.records import PageSet, Record, Role

_KINDS = tuple(Kind)
_ACTIONS = tuple(Action)
_ROLES = tuple(Role)
_MOST = (1 << 62) - 1
"""What stands for any larger number."""
_LIMITS = (
    "max_held", "restart_records", "max_ended", "max_streams", "max_pool_pages", "max_pools", "max_pages",
    "max_requests", "max_request_streams", "max_transfers",
)  # fmt: skip


def core_policy(policy: Policy) -> _core.LedgerPolicy:
    """The operator's word, for the native ledger."""
    return _core.LedgerPolicy(
        permit_sharing=policy.prefix_sharing == "permit",
        require_digests=policy.digests == "require",
        require_scrub=policy.scrub == "require",
        act_on_degraded=policy.on_degraded == "act",
        actions=[policy.action(kind).rank for kind in Kind],
    )


def core_settings(settings: LedgerSettings) -> _core.LedgerSettings:
    """The ledger's settings, for the native one."""
    out = _core.LedgerSettings()
    out.window_ns = -1 if settings.window_ns is None else min(settings.window_ns, _MOST)
    out.leak_grace_ns = int(min(settings.leak_grace_s * 1e9, _MOST))
    out.leak_grace_text = f"{settings.leak_grace_s:g}"
    for name in _LIMITS:
        setattr(out, name, min(getattr(settings, name), _MOST))
    return out


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of one request over all streams, when it was asked for."""

    id: str
    tenant: str | None
    lineage: set[str]
    """The tenants whose data it has read, its own included."""
    killed: bool
    disclosed: bool

    @property
    def verdict(self) -> str:
        """``kill`` or ``allow``."""
        return "kill" if self.killed else "allow"


@dataclass(frozen=True, slots=True)
class Stream:
    """How far one emitter's stream is judged, when it was asked for."""

    name: str
    epoch: int
    processed: int
    duplicates: int
    late: int


class _Requests(Mapping[str, Request]):
    """The requests that the ledger knows; each is read when it is asked for."""

    def __init__(self, core: _core.Ledger) -> None:
        self._core = core

    def __getitem__(self, request: str) -> Request:
        found = self._core.request(request)
        if found is None:
            raise KeyError(request)
        return Request(*found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._core.request_ids())

    def __len__(self) -> int:
        sizes = self._core.sizes()
        return sizes["requests_live"] + sizes["requests_ended"]


def _ignore(*_: object) -> None:
    """Nobody wants to know."""


class Ledger:
    """`guard.ledger.Ledger`, native: the same interface and the same findings.

    A finding is one `Finding` object from when it is new on: what is added to it later is found in that object.
    `on_finding` and `on_retire` are called before the call returns in which it happened.

    Args:
        policy: What is done about findings, and the optional rules.
        settings: How long to wait and how much to keep.
        on_finding: Called with each finding when it is new (True) and whenever more adds to it (False).
        on_retire: Called with each request that is over when it is forgotten.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        settings: LedgerSettings | None = None,
        on_finding: Callable[[Finding, bool], None] = _ignore,
        on_retire: Callable[[Request], None] = _ignore,
    ) -> None:
        summaries = on_retire is not _ignore
        self._core = _core.Ledger(
            core_policy(policy or Policy()), core_settings(settings or LedgerSettings()), summaries=summaries
        )
        self._on_finding = on_finding
        self._on_retire = on_retire

    def feed(self, record: Record, now_ns: int = 0) -> None:
        """Takes one record in, and judges all that it makes ready.

        Raises:
            ValueError: It breaks the convention.
        """
        self._core.feed(record, now_ns)
        self._tell()

    def feed_invalid(self, header: Record, now_ns: int = 0) -> None:
        """Takes the place in its stream of a record that could not be read, so that it is not a gap."""
        self.feed(Record(stream=header.stream, epoch=header.epoch, seq=header.seq, time_ns=header.time_ns), now_ns)

    def feed_rows(self, rows: _core.Rows, now_ns: int = 0) -> None:
        """Takes many records in, in their order. The GIL is free while they are judged; nobody may change `rows`."""
        self._core.feed_rows(rows, now_ns)
        self._tell()

    def restore(self, before: Restored) -> None:
        """What the guard before this one knew; to be told before any record."""
        self._core.restore(
            _core.Restored(
                [(s.name, s.epoch, s.processed, s.time_ns, s.past) for s in before.streams],
                [(p.id, p.stream, p.pages, p.page_tokens, _ROLES.index(p.role)) for p in before.pools],
                [(r.request, r.stream, r.tenant, r.ended) for r in before.requests],
            )
        )
        self._tell()

    def advance(self, now_ns: int) -> None:
        """Time passes: gives up what should have come by now, and looks for leaks."""
        self._core.advance(now_ns)
        self._tell()

    def finish(self) -> None:
        """The input is over: whatever did not come will not."""
        self._core.finish()
        self._tell()

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream heard of, as it is now."""
        return {state[0]: Stream(*state) for state in self._core.streams()}

    @property
    def requests(self) -> Mapping[str, Request]:
        """Live requests, and the ones that ended lately."""
        return _Requests(self._core)

    @property
    def sizes(self) -> dict[str, int]:
        """How much is kept: pages, requests (live and ended), transfers in flight, records held back."""
        return self._core.sizes()

    @property
    def gaps(self) -> int:
        """How often something was missed: holes given up, sequences that ran backwards, unknown transfers."""
        return self._core.gaps()

    @property
    def dropped(self) -> int:
        """Records beyond some limit, in all."""
        return sum(self.dropped_by.values())

    @property
    def dropped_by(self) -> Mapping[str, int]:
        """Records beyond each limit, see `guard.ledger.Ledger`."""
        return self._core.dropped_by()

    def watermark(self, stream: str) -> tuple[int, int]:
        """(epoch, seq): every record of the stream up to it is judged; (-1, -1) for an unknown stream."""
        return self._core.watermark(stream)

    def _tell(self) -> None:
        for new, finding, retired in self._core.take_events(finding_of):
            if finding is not None:
                self._on_finding(finding, new)
            elif retired is not None:
                self._on_retire(Request(*retired))


def finding_of(contents: _core.FindingContents, finding: Finding | None = None) -> Finding:
    """The finding, a new one if none is given, with what the native core says of it."""
    (
        kind, request, pool, tenant, action, degraded, stream, epoch, seq, time_ns, transfer, reason, other_tenants,
        other_requests, subjects, runs,
    ) = contents  # fmt: skip
    if finding is None:
        finding = Finding(
            kind=_KINDS[kind], action=_ACTIONS[action], request=request, tenant=tenant, pool=pool, stream=stream,
            epoch=epoch, seq=seq, time_ns=time_ns,
        )  # fmt: skip
    finding.action = _ACTIONS[action]
    finding.confidence = Confidence.DEGRADED if degraded else Confidence.FULL
    finding.stream, finding.epoch, finding.seq, finding.time_ns = stream, epoch, seq, time_ns
    finding.transfer, finding.reason = transfer, reason
    finding.other_tenants, finding.other_requests, finding.subjects = other_tenants, other_requests, subjects
    finding.pages = PageSet(runs)
    return finding
