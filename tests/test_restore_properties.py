"""A guard that is restarted at any point of a correct engine's run accuses nobody of what it has not seen."""

from __future__ import annotations

import os
from dataclasses import replace

from engine_model import Model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from restored_from import restored_from
from test_ledger_properties import PAGES, interleaved, random_choices

from guard.findings import Confidence, Finding, Kind
from guard.ledger import Ledger, LedgerSettings
from guard.ledger.restored import Restored
from guard.records import Record

EXAMPLES = int(os.environ.get("KVGUARD_EXAMPLES", "2000"))
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

MS = 1_000_000


class Guard:
    """A ledger that is fed record by record, a millisecond apart, and may be restarted."""

    def __init__(self, window_ms: float | None, before: Restored | None = None) -> None:
        self.found: list[Finding] = []
        self.now_ms = 0
        self.ledger = Ledger(
            None,
            LedgerSettings(reorder_window_ms=window_ms, leak_grace_s=30),
            lambda finding, new: self.found.append(finding) if new else None,
        )
        if before is not None:
            self.ledger.restore(before)

    def feed(self, records: list[Record]) -> None:
        for record in records:
            self.now_ms += 1
            self.ledger.feed(record, self.now_ms * MS)
            if self.now_ms % 10 == 0:
                self.ledger.advance(self.now_ms * MS)

    def finish(self) -> None:
        self.ledger.finish()


def accused(guard: Guard) -> list[dict[str, object]]:
    """What is said of requests and pages as if it were sure, or of bytes that were nobody else's."""
    return [
        f.as_json()
        for f in guard.found
        if f.kills
        or f.kind in (Kind.FOREIGN_READ, Kind.TAINTED_RESPONSE, Kind.FOREIGN_SHARE)
        or (f.confidence is Confidence.FULL and f.kind is not Kind.STREAM_GAP)
    ]


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
    model = Model(iter(random_choices(seed)), pages=PAGES)
    model.run(steps)
    # Arrival in any order wants a guard that waits; in the order of time, one that gives up.
    records, window_ms = (interleaved(model.log, seed), None) if shuffled else (model.log, 20)
    before: Restored | None = None
    start = 0
    for fraction in sorted(cuts):
        cut = start + int((len(records) - start) * fraction)
        taken = records[start:cut]
        known = len(taken) if torn else max(0, len(taken) - stale)
        guard = Guard(window_ms, before)
        guard.feed(taken[:known])
        before = restored_from(guard.ledger)
        if torn:
            behind = Guard(window_ms)
            behind.feed(records[: max(0, cut - stale)])
            marks = {s.name: s for s in restored_from(behind.ledger).streams}
            before = replace(
                before,
                streams=tuple(
                    marks[s.name] if s.name in marks and marks[s.name].epoch == s.epoch else replace(s, processed=-1)
                    for s in before.streams
                ),
            )
        assert accused(guard) == []
        start = max(0, cut - resent)
    guard = Guard(window_ms, before)
    guard.feed(records[start:])
    guard.finish()
    assert accused(guard) == []
