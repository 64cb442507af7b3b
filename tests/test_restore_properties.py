"""A guard that is restarted at any point of a correct engine's run accuses nobody of what it has not seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from engine_model import Model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from restored_from import restored_from
from test_ledger_properties import PAGES, interleaved, random_choices

from guard.findings import Confidence, Finding, Kind
from guard.ledger import Ledger, LedgerSettings
from guard.ledger.restored import Restored
from guard.native.ledger import Ledger as NativeLedger
from guard.records import Record

EXAMPLES = int(os.environ.get("KVGUARD_EXAMPLES", "2000"))
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

MS = 1_000_000


class Guard:
    """A ledger, and the native one beside it, that are fed record by record, a millisecond apart."""

    def __init__(self, window_ms: float | None, before: Restored | None = None) -> None:
        self.found: list[Finding] = []
        self.found_natively: list[Finding] = []
        self.now_ms = 0
        limits = LedgerSettings(reorder_window_ms=window_ms, leak_grace_s=30)
        self.ledger = Ledger(None, limits, collect(self.found))
        self.native = NativeLedger(None, limits, collect(self.found_natively))
        if before is not None:
            self.ledger.restore(before)
            self.native.restore(before)

    def feed(self, records: list[Record]) -> None:
        for record in records:
            self.now_ms += 1
            for ledger in (self.ledger, self.native):
                ledger.feed(record, self.now_ms * MS)
                if self.now_ms % 10 == 0:
                    ledger.advance(self.now_ms * MS)

    def finish(self) -> None:
        self.ledger.finish()
        self.native.finish()

    def accused(self) -> list[dict[str, object]]:
        """What is said of requests and pages as if it were sure, or of bytes as if they were another's."""
        assert listed(self.found_natively) == listed(self.found)
        assert self.native.gaps == self.ledger.gaps
        return [
            f.as_json()
            for f in self.found
            if f.kills
            or f.kind in (Kind.FOREIGN_READ, Kind.TAINTED_RESPONSE, Kind.FOREIGN_SHARE)
            or (f.confidence is Confidence.FULL and f.kind is not Kind.STREAM_GAP)
        ]


def collect(found: list[Finding]) -> Callable[[Finding, bool], None]:
    return lambda finding, new: found.append(finding) if new else None


def listed(found: list[Finding]) -> list[tuple[str, str]]:
    return sorted((str(sorted(f.as_json().items(), key=str)), f.reason) for f in found)


@many
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 250),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    stale=st.integers(0, 60),
    torn=st.booleans(),
    resent=st.integers(0, 120),
    shuffled=st.booleans(),
)
def test_a_restarted_guard_accuses_nobody(
    seed: int, steps: int, cuts: list[float], stale: int, torn: bool, resent: int, shuffled: bool
) -> None:
    """`stale`: records that were judged and that the journal does not know of; `torn`: of which it knows the requests
    and not how far the streams were judged; `resent`: records that senders send again.
    """
    model = Model(iter(random_choices(seed)), pages=PAGES)
    model.run(steps)
    # Arrival in any order wants a guard that waits; in the order of time, one that gives up.
    records, window_ms = (interleaved(model.log, seed), None) if shuffled else (model.log, 20)
    before: Restored | None = None
    start = 0
    for fraction in sorted(cuts):
        cut = start + int((len(records) - start) * fraction)
        taken = records[start:cut]
        guard = Guard(window_ms, before)
        guard.feed(taken if torn else taken[: max(0, len(taken) - stale)])
        before = restored_from(guard.ledger)
        if torn:
            before = replace(before, streams=marked_earlier(before, records[: max(0, cut - stale)], window_ms).streams)
        assert guard.accused() == []
        start = max(0, cut - resent)
    guard = Guard(window_ms, before)
    guard.feed(records[start:])
    guard.finish()
    assert guard.accused() == []


def marked_earlier(before: Restored, records: list[Record], window_ms: float | None) -> Restored:
    """The same with the watermarks that there were after these records."""
    guard = Guard(window_ms)
    guard.feed(records)
    marks = {(s.name, s.epoch): s for s in restored_from(guard.ledger).streams}
    return replace(
        before, streams=tuple(marks.get((s.name, s.epoch), replace(s, processed=-1)) for s in before.streams)
    )
