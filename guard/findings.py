"""What the guard concludes from records: kinds, severities, actions, and the finding itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from guard.records import PageSet


class Kind(StrEnum):
    """The kinds of findings (version 1), worst first where two fire for one record."""

    FOREIGN_READ = "foreign-read"
    STALE_READ = "stale-read"
    FOREIGN_WRITE = "foreign-write"
    TAINTED_RESPONSE = "tainted-response"
    ZOMBIE_REQUEST = "zombie-request"
    DOUBLE_OWNER = "double-owner"
    DIGEST_MISMATCH = "digest-mismatch"
    CANARY_HIT = "canary-hit"
    SHORT_TRANSFER = "short-transfer"
    FREE_IN_FLIGHT = "free-in-flight"
    FOREIGN_SHARE = "foreign-share"
    DOUBLE_FREE = "double-free"
    WRONG_STATUS = "wrong-status"
    OVER_CAPACITY = "over-capacity"
    HOOK_DIVERGENCE = "hook-divergence"
    PAGE_LEAK = "page-leak"
    STREAM_GAP = "stream-gap"
    UNVERIFIED_TRANSFER = "unverified-transfer"
    UNSCRUBBED_REUSE = "unscrubbed-reuse"


class Severity(StrEnum):
    """How bad a finding is, whatever is done about it."""

    WARNING = "warning"
    HIGH = "high"
    CRITICAL = "critical"


class Action(StrEnum):
    """What is done about a finding, weakest first."""

    OBSERVE = "observe"
    ALERT = "alert"
    QUARANTINE = "quarantine"
    """The pages are not to be reused until scrubbed."""
    KILL = "kill"
    """The request gives no further byte."""

    @property
    def rank(self) -> int:
        """0 for the weakest."""
        return list(Action).index(self)


class Confidence(StrEnum):
    """Whether the finding rests on pages that the guard could follow without a gap."""

    FULL = "full"
    DEGRADED = "degraded"


SEVERITY: dict[Kind, Severity] = {
    **dict.fromkeys(Kind, Severity.CRITICAL),
    **dict.fromkeys(
        (
            Kind.SHORT_TRANSFER, Kind.FREE_IN_FLIGHT, Kind.FOREIGN_SHARE, Kind.DOUBLE_FREE, Kind.WRONG_STATUS,
            Kind.OVER_CAPACITY, Kind.HOOK_DIVERGENCE,
        ),
        Severity.HIGH,
    ),
    **dict.fromkeys(
        (Kind.PAGE_LEAK, Kind.STREAM_GAP, Kind.UNVERIFIED_TRANSFER, Kind.UNSCRUBBED_REUSE), Severity.WARNING
    ),
}  # fmt: skip
"""Severity by kind."""


@dataclass(eq=False)
class Finding:
    """One finding: there is one for each (kind, request, pool), and further evidence adds to it.

    ``stream``, ``epoch``, ``seq`` and ``time_ns`` name the earliest record that shows it.
    """

    kind: Kind
    action: Action
    request: str | None
    tenant: str | None
    pool: str | None
    stream: str
    epoch: int
    seq: int
    time_ns: int
    other_tenants: set[str] = field(default_factory=set)
    other_requests: set[str] = field(default_factory=set)
    pages: PageSet = field(default_factory=PageSet)
    transfer: str | None = None
    confidence: Confidence = Confidence.FULL
    reason: str = ""
    """One line for people: ids and counts only."""
    subjects: set[str] = field(default_factory=set)
    """The requests that a `kill` ends: not always the one that the finding names."""

    @property
    def severity(self) -> Severity:
        """How bad it is, whatever is done about it."""
        return SEVERITY[self.kind]

    @property
    def kills(self) -> set[str]:
        """The requests that this finding ends."""
        return self.subjects if self.action is Action.KILL else set()

    def as_json(self) -> dict[str, Any]:
        """The object that `guardctl replay -o json` prints for it."""
        return {
            "kind": self.kind.value,
            "severity": self.severity.value,
            "action": self.action.value,
            "request": self.request,
            "tenant": self.tenant,
            "other_tenants": sorted(self.other_tenants),
            "other_requests": sorted(self.other_requests),
            "pool": self.pool,
            "pages": str(self.pages),
            "transfer": self.transfer,
            "stream": self.stream,
            "seq": self.seq,
            "confidence": self.confidence.value,
        }
