"""What a restarted ledger makes of records that rest on what the one before it saw; the native one likewise."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_rig import MS, Rig, pages

from guard.findings import Action, Confidence, Kind
from guard.ledger.restored import Restored, RestoredPool, RestoredRequest, RestoredStream
from guard.native.ledger import Ledger as NativeLedger
from guard.policy import Policy
from guard.records import PageSet, Role

BEFORE = Restored(
    streams=(
        RestoredStream("p", 3, 9, 5 * MS, (1, 2)),
        RestoredStream("d", 3, 19, 6 * MS),
        RestoredStream("r", 3, 4, 6 * MS),
    ),
    pools=(RestoredPool("p", "p", 16, 4, Role.PREFILL), RestoredPool("d", "d", 16, 4, Role.DECODE)),
    requests=(
        RestoredRequest("a1", "p", "tenant-a"),
        RestoredRequest("a1", "d", "tenant-a"),
        RestoredRequest("b1", "d", "tenant-b", ended=True),
    ),
)
RESTARTED = "the guard was restarted: it cannot vouch for this pool's pages until they are handed out again"


@pytest.fixture(params=["python", "native"])
def kind_of_ledger(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(kind_of_ledger: str) -> Rig:
    return restarted(kind_of_ledger)


def restarted(kind_of_ledger: str, policy: Policy | None = None, before: Restored = BEFORE, **settings: Any) -> Rig:
    rig = Rig(policy, pools="", **settings)
    if kind_of_ledger == "native":
        limits = rig.ledger._world.settings
        rig.ledger = NativeLedger(policy, limits, rig._on_finding)  # type: ignore[assignment]
    rig.now_ms = 100
    rig.places = {"p": (3, 10), "d": (3, 20), "r": (3, 5)}
    rig.ledger.restore(before)
    return rig


def others(rig: Rig) -> list[Any]:
    """The findings but those that say that the guard was restarted."""
    return [f for f in rig.found if f.reason != RESTARTED]


def test_each_pool_is_said_not_to_be_vouched_for(rig: Rig) -> None:
    assert [(f.kind, f.request, f.pool, f.confidence, f.action) for f in rig.found] == [
        (Kind.STREAM_GAP, None, pool, Confidence.DEGRADED, Action.ALERT) for pool in ("p", "d", "r")
    ]
    assert {f.reason for f in rig.found} == {RESTARTED}
    assert [(f.stream, f.epoch, f.seq, f.time_ns) for f in rig.found][:2] == [
        ("p", 3, 9, 5 * MS + 1),
        ("d", 3, 19, 6 * MS + 1),
    ]
    assert rig.ledger.gaps == 3
    assert rig.ledger.watermark("d") == (3, 19)
    assert rig.ledger.sizes["requests_live"] == 1
    assert rig.ledger.sizes["requests_ended"] == 1


def test_a_stream_goes_on_where_it_was(rig: Rig) -> None:
    rig.admit("d", "a2")
    rig.alloc("d", "a2", "0")
    assert rig.ledger.watermark("d") == (3, 21)
    assert others(rig) == []


def test_what_was_missed_is_named(kind_of_ledger: str) -> None:
    rig = restarted(kind_of_ledger, window_ms=50)
    rig.lose("d", 3)
    rig.admit("d", "a2")
    assert rig.ledger.watermark("d") == (3, 19)
    rig.advance(60)
    assert rig.ledger.watermark("d") == (3, 23)
    (gap,) = [f for f in rig.found if f.pool == "d"]
    assert gap.reason.startswith("a hole in kv.seq: records 20 to 22 of epoch 3 are missing; the guard was restarted")
    assert (gap.seq, gap.confidence) == (20, Confidence.DEGRADED)
    assert rig.ledger.gaps == 4


def test_what_was_judged_before_may_be_sent_again(rig: Rig) -> None:
    rig.places["d"] = (3, 12)
    for _ in range(8):
        rig.admit("d", "a2")
    assert rig.ledger.streams["d"].duplicates == 8
    rig.admit("d", "a3")
    assert rig.ledger.watermark("d") == (3, 20)
    assert others(rig) == []


def test_an_epoch_that_is_over_does_not_begin_again(rig: Rig) -> None:
    rig.places["p"] = (2, 40)
    rig.admit("p", "a2")
    rig.places["p"] = (3, 10)
    rig.admit("p", "a2")
    rig.end()
    assert rig.ledger.watermark("p") == (3, 10)
    assert rig.ledger.streams["p"].late == 1


def test_a_new_epoch_starts_afresh(rig: Rig) -> None:
    rig.restart("d")
    rig.alloc("d", "a2", "0")
    rig.read("d", "a2", "0")
    rig.end()
    assert rig.one(Kind.STALE_READ).confidence is Confidence.FULL
    assert rig.ledger.watermark("d") == (4, 2)


def test_reading_what_was_written_before_is_doubtful_and_kills_nobody(rig: Rig) -> None:
    rig.read("d", "a1", "0-3")
    assert rig.one(Kind.STALE_READ).confidence is Confidence.DEGRADED
    assert rig.one(Kind.STALE_READ).kills == set()


def test_who_fails_closed_kills(kind_of_ledger: str) -> None:
    rig = restarted(kind_of_ledger, Policy(on_degraded="act"))
    rig.read("d", "a1", "0-3")
    assert rig.one(Kind.STALE_READ).kills == {"a1"}


def test_going_on_in_pages_from_before_is_doubtful(rig: Rig) -> None:
    rig.write("d", "a1", "3", tokens=16)
    rig.alloc("d", "a1", "4")
    rig.write("d", "a1", "4", tokens=20)
    rig.read("d", "a1", "0-4", tokens=20)
    rig.begin("a1", "0-1", "8-9")
    rig.free("d", "a1", "0-4")
    rig.cache("p", "a1", "2-3")
    assert {f.kind for f in others(rig)} == {
        Kind.FOREIGN_WRITE, Kind.STALE_READ, Kind.FREE_IN_FLIGHT, Kind.DOUBLE_FREE,
    }  # fmt: skip
    assert {f.confidence for f in others(rig)} == {Confidence.DEGRADED}


def test_pages_that_are_handed_out_again_are_vouched_for(rig: Rig) -> None:
    rig.admit("d", "a2")
    rig.left_behind("d", "a2", "0")
    rig.admit("d", "b2")
    rig.alloc("d", "b2", "0")
    rig.read("d", "b2", "0", tokens=0)
    found = rig.one(Kind.FOREIGN_READ)
    assert (found.confidence, found.kills) == (Confidence.FULL, {"b2"})


def test_a_transfer_that_began_before_is_known_to_be_unknown(kind_of_ledger: str) -> None:
    rig = restarted(kind_of_ledger, window_ms=50)
    rig.admit("d", "a2")
    rig.left_behind("d", "a2", "4-5")
    rig.admit("d", "b2")
    rig.alloc("d", "b2", "4-5")
    rig.ended("d", "recv", "b2", "4-5")
    rig.read("d", "b2", "4-5")
    rig.advance(60)
    gap = rig.one(Kind.STREAM_GAP, "b2")
    assert (gap.confidence, gap.transfer, gap.pages) == (Confidence.DEGRADED, "x1", pages("4-5"))
    assert rig.one(Kind.STALE_READ).confidence is Confidence.DEGRADED
    assert len(others(rig)) == 2  # above all no foreign-read: what was sent has replaced what a2 left


def test_a_transfer_whose_begin_was_lost_since_is_not_taken_for_one_from_before(kind_of_ledger: str) -> None:
    rig = restarted(kind_of_ledger, window_ms=50)
    rig.admit("d", "a2")
    rig.left_behind("d", "a2", "4-5")
    rig.admit("p", "b2")
    rig.admit("d", "b2")
    rig.alloc("d", "b2", "4-5")
    rig.ended("d", "recv", "b2", "4-5")
    rig.read("d", "b2", "4-5")
    rig.advance(60)
    assert rig.one(Kind.STREAM_GAP, "b2").confidence is Confidence.FULL
    assert rig.one(Kind.FOREIGN_READ).confidence is Confidence.DEGRADED


def test_pieces_that_were_begun_before_leave_the_others_valid(kind_of_ledger: str) -> None:
    rig = restarted(kind_of_ledger, window_ms=50)
    rig.alloc("p", "a1", "1")
    rig.write("p", "a1", "1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "1", "1", "x1/1")
    rig.ended("p", "send", "a1", "1", "x1/1")
    rig.ended("d", "recv", "a1", "0-1", "x1")
    rig.read("d", "a1", "0-1")
    rig.advance(60)
    assert rig.one(Kind.STREAM_GAP, "a1").pages == pages("0")
    assert rig.one(Kind.STALE_READ).pages == pages("0-1")
    assert {f.confidence for f in others(rig)} == {Confidence.DEGRADED}


def test_going_on_after_an_end_that_only_the_guard_before_saw_is_doubtful(rig: Rig) -> None:
    rig.alloc("d", "b1", "0")
    assert rig.one(Kind.ZOMBIE_REQUEST).confidence is Confidence.DEGRADED
    rig.over("d", "b1")
    rig.alloc("d", "b1", "1")
    assert rig.one(Kind.ZOMBIE_REQUEST).confidence is Confidence.FULL


def test_what_a_request_gave_up_before_makes_nobody_suspect(rig: Rig) -> None:
    # b1 had page 0 on decode, took what was sent to it and gave the page back; only the begin comes now.
    rig.admit("d", "a2")
    rig.alloc("d", "a2", "0")
    rig.write("d", "a2", "0")
    rig.alloc("p", "b1", "0")
    rig.write("p", "b1", "0")
    rig.begin("b1", "0", "0")
    rig.ended("p", "send", "b1", "0")
    rig.read("d", "a2", "0")
    rig.end()
    assert others(rig) == []


def test_a_pool_that_was_not_announced_to_this_guard_is_not_vouched_for(kind_of_ledger: str) -> None:
    rig = restarted(kind_of_ledger, before=Restored(streams=(RestoredStream("d", 3, 19, 0),)))
    assert [f.pool for f in rig.found] == ["d"]
    record = rig.read("d", "a1", "0", tokens=0)
    elsewhere = rig.emit("d", type(record)(request="a1", tenant="tenant-a", pool="d2", pages=PageSet.of([0]), tokens=0))  # type: ignore[call-arg]
    assert elsewhere.pool_id == "d2"
    stale = [f for f in rig.found if f.kind is Kind.STALE_READ]
    assert [(f.pool, f.confidence) for f in stale] == [(pool, Confidence.DEGRADED) for pool in ("d", "d2")]


@pytest.mark.parametrize(("admitted", "confidence"), [(True, Confidence.FULL), (False, Confidence.DEGRADED)])
def test_a_request_that_may_have_begun_before_has_valid_tokens_that_are_not_known(
    rig: Rig, admitted: bool, confidence: Confidence
) -> None:
    if admitted:
        rig.admit("d", "a2")
    rig.alloc("d", "a2", "0-1")
    rig.write("d", "a2", "0-1", tokens=5)
    rig.read("d", "a2", "0-1", tokens=8)
    assert rig.one(Kind.STALE_READ).confidence is confidence


def test_a_restored_guard_can_be_restored_from_a_stream_that_it_never_heard_again(kind_of_ledger: str) -> None:
    before = Restored(pools=(RestoredPool("d", "d", 16, 4, Role.DECODE),), requests=BEFORE.requests)
    rig = restarted(kind_of_ledger, before=before)
    assert [(f.pool, f.stream, f.seq) for f in rig.found] == [("d", "d", 0)]
    rig.admit("d", "a2")
    rig.end()
    assert rig.ledger.watermark("d") == (3, 20)
    assert "records 0 to 19 of epoch 3 are missing" in {f.pool: f.reason for f in rig.found}["d"]


def test_a_refusal_of_pages_from_before_is_in_doubt_and_contradicts_nobody(rig: Rig) -> None:
    rig.refuse("d", "a1", "0-1")
    [finding] = others(rig)
    assert (finding.kind, finding.confidence, str(finding.pages)) == (Kind.STALE_READ, Confidence.DEGRADED, "0-1")
    # Handed out and written since, they are known again.
    rig.alloc("d", "a1", "2-3")
    rig.write("d", "a1", "2-3")
    rig.refuse("d", "a1", "2-3")
    rig.end()
    divergence = rig.one(Kind.HOOK_DIVERGENCE)
    assert (divergence.confidence, str(divergence.pages)) == (Confidence.FULL, "2-3")
