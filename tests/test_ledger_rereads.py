"""A sequence reads the pages that it has read before and a few more: what has become of the old ones counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Kind

pytestmark = both_ledgers

Change = Callable[[Rig], object]


def reader() -> Rig:
    """``a1`` has read three pages that are no neighbours, and nothing was amiss."""
    rig = Rig()
    rig.alloc("d", "a1", "0,2,4,6")
    rig.write("d", "a1", "0,2,4,6", tokens=16)
    rig.read("d", "a1", "0,2,4", tokens=12)
    return rig


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rig: rig.scrub("d", "2"), id="scrubbed"),
        pytest.param(lambda rig: rig.free("d", "a1", "2"), id="given back"),
        pytest.param(lambda rig: rig.alloc("d", "a1", "2"), id="handed to it once more"),
        pytest.param(lambda rig: rig.alloc("d", "b1", "2"), id="handed to another"),
        pytest.param(lambda rig: (rig.read("d", "b1", "0,2"), rig.scrub("d", "2")), id="read by another and scrubbed"),
        pytest.param(lambda rig: (rig.refuse("d", "b1", "2"), rig.scrub("d", "2")), id="refused another and scrubbed"),
        pytest.param(lambda rig: (rig.read("d", "a1", "0,2,4"), rig.scrub("d", "2")), id="read twice and scrubbed"),
    ],
)
def test_what_is_not_valid_any_more_is_noticed(change: Change) -> None:
    rig = reader()
    change(rig)
    again = rig.read("d", "a1", "0,2,4,6", tokens=16)
    rig.end()
    finding = next(f for f in rig.found if f.kind is Kind.STALE_READ and f.request == "a1")
    assert (finding.pages, finding.seq) == (pages("2"), again.seq)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rig: rig.write("d", "b1", "2"), id="written into"),
        pytest.param(lambda rig: (rig.read("d", "b1", "2"), rig.write("d", "b1", "2")), id="read, then written into"),
        pytest.param(lambda rig: rig.handed_over("b1", "1", "2"), id="landed in"),
    ],
)
def test_anothers_bytes_are_noticed(change: Change) -> None:
    rig = reader()
    change(rig)
    again = rig.read("d", "a1", "0,2,4,6", tokens=16)
    rig.end()
    finding = next(f for f in rig.found if f.kind is Kind.FOREIGN_READ and f.request == "a1")
    assert (finding.pages, finding.seq, finding.other_tenants) == (pages("2"), again.seq, {"tenant-b"})


def test_a_pool_that_is_smaller_than_it_was_is_noticed() -> None:
    rig = reader()
    rig.pool("d", size=2)
    again = rig.read("d", "a1", "0,2,4,6", tokens=16)
    rig.end()
    finding = next(f for f in rig.found if f.kind is Kind.STALE_READ)
    assert (finding.pages, finding.seq) == (pages("2,4,6"), again.seq)


def test_what_the_guard_has_lost_sight_of_is_doubtful_from_then_on() -> None:
    rig = reader()
    rig.lose("d")
    rig.write("d", "b1", "2")
    rig.read("d", "a1", "0,2,4,6", tokens=16)
    rig.end()
    finding = next(f for f in rig.found if f.kind is Kind.FOREIGN_READ and f.request == "a1")
    assert (finding.pages, finding.confidence.value) == (pages("2"), "degraded")


def test_as_often_as_one_likes() -> None:
    rig = reader()
    for _ in range(3):
        rig.read("d", "a1", "0,2,4,6", tokens=16)
        rig.write("d", "a1", "6", tokens=16)
    assert rig.end() == []
