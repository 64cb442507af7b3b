"""Transfers: what begins, what arrives, and source pages that are given up meanwhile."""

from __future__ import annotations

import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Action, Kind, Severity
from guard.policy import Policy

pytestmark = both_ledgers


def test_a_transfer_that_goes_well() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.read("d", "a1", "0-1")
    assert rig.end() == []
    assert rig.ledger.sizes["transfers"] == 0


@pytest.mark.parametrize("first", ["send", "recv"])
def test_either_side_may_end_first(first: str) -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    ends = [("p", "send"), ("d", "recv")]
    for stream, side in ends if first == "send" else reversed(ends):
        rig.ended(stream, side, "a1", "0-1")
    rig.read("d", "a1", "0-1")
    assert rig.end() == []


# short-transfer


@pytest.mark.parametrize(("arrived", "tokens"), [("0", 4), ("0-1", 7), ("0", 8)])
def test_less_arrived_than_was_begun(arrived: str, tokens: int) -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.ended("p", "send", "a1", "0-1")
    end = rig.ended("d", "recv", "a1", arrived, tokens=tokens)
    rig.end()
    assert rig.kinds() == {"short-transfer"}
    finding = rig.one(Kind.SHORT_TRANSFER)
    assert (finding.request, finding.pool, finding.seq, finding.transfer) == ("a1", "d", end.seq, "x1")
    assert (finding.severity, finding.kills) == (Severity.HIGH, {"a1"})
    assert finding.pages == pages("1" if arrived == "0" else "")


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_what_failed_may_be_short(status: str) -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.ended("p", "send", "a1", "0-1", status=status)
    rig.ended("d", "recv", "a1", "", tokens=0, status=status)
    assert rig.end() == []
    rig.read("d", "a1", "0-1")
    assert rig.kinds() == {"stale-read"}


def test_what_did_not_arrive_may_not_be_read() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.read("d", "a1", "0-1")
    rig.end()
    assert rig.kinds() == {"stale-read"}


# Pieces


def pieces(rig: Rig) -> None:
    rig.prefilled("a1", "0-2")
    rig.alloc("d", "a1", "0-2")
    rig.begin("a1", "0-1", "0-1", "x1/0")
    rig.ended("p", "send", "a1", "0-1", "x1/0")
    rig.begin("a1", "2", "2", "x1/1")
    rig.ended("p", "send", "a1", "2", "x1/1")


def test_pieces_may_be_ended_all_at_once_with_the_bare_id() -> None:
    rig = Rig()
    pieces(rig)
    rig.ended("d", "recv", "a1", "0-2")
    rig.read("d", "a1", "0-2")
    assert rig.end() == []
    assert rig.ledger.sizes["transfers"] == 0


def test_pieces_may_be_ended_piece_by_piece() -> None:
    rig = Rig()
    pieces(rig)
    rig.ended("d", "recv", "a1", "0-1", "x1/0")
    rig.read("d", "a1", "0-1")
    rig.ended("d", "recv", "a1", "2", "x1/1")
    rig.read("d", "a1", "0-2")
    assert rig.end() == []


def test_the_bare_id_waits_for_the_pieces_of_all_its_pages() -> None:
    rig = Rig()
    rig.prefilled("a1", "0-2")
    rig.alloc("d", "a1", "0-2")
    rig.begin("a1", "0-1", "0-1", "x1/0")
    end = rig.ended("d", "recv", "a1", "0-2")
    assert rig.ledger.watermark("d") == (1, end.seq - 1)
    rig.begin("a1", "2", "2", "x1/1")
    assert rig.ledger.watermark("d") == (1, end.seq)
    rig.read("d", "a1", "0-2")
    assert rig.end() == []


@pytest.mark.parametrize("how", ["failed", "restart"])
@pytest.mark.parametrize("end_first", [False, True])
def test_the_bare_id_does_not_wait_for_pieces_that_will_not_come(how: str, end_first: bool) -> None:
    rig = Rig(restart_records=1)
    rig.prefilled("a1", "0-2")
    rig.alloc("d", "a1", "0-2")
    rig.begin("a1", "0-1", "0-1", "x1/0")
    if end_first:
        rig.ended("d", "recv", "a1", "0-2", status="failed")
    if how == "failed":
        rig.ended("p", "send", "a1", "0-1", "x1/0", status="failed")
    else:
        rig.ended("p", "send", "a1", "0-1", "x1/0")
        rig.restart("p")
        rig.admit("p", "a2")
    if not end_first:
        rig.ended("d", "recv", "a1", "0-2", status="failed")
    assert rig.ledger.sizes["records_held"] == 0
    rig.over("d", "a1", "failed")
    rig.free("d", "a1", "0-2")
    assert rig.end() == []
    assert rig.ledger.sizes["transfers"] == 0


def test_a_piece_less_is_short() -> None:
    rig = Rig()
    pieces(rig)
    rig.ended("d", "recv", "a1", "0-1")
    rig.end()
    assert rig.one(Kind.SHORT_TRANSFER).pages == pages("2")


def test_an_end_that_is_told_again_is_nothing_new() -> None:
    rig = Rig()
    rig.prefilled("a1", "0-2")
    rig.alloc("d", "a1", "0-2")
    for number, (src, last) in enumerate([("0-1", False), ("2", True)]):
        rig.begin("a1", src, src, f"x1/{number}")
        rig.ended("d", "recv", "a1", src, f"x1/{number}")
        if last:
            rig.ended("d", "recv", "a1", "0-2")  # while the sender has not ended yet
    for number, src in enumerate(["0-1", "2"]):
        rig.ended("p", "send", "a1", src, f"x1/{number}")
    rig.ended("d", "recv", "a1", "0-2")  # when both sides have
    rig.read("d", "a1", "0-2")
    assert rig.end() == []


def test_only_the_pool_it_goes_to_can_say_that_it_arrived() -> None:
    rig = Rig(pools="p d d2")
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.ended("d2", "recv", "a1", "0-1")
    rig.ended("d2", "send", "a1", "0-1")
    assert rig.kinds() == {"stream-gap"}
    assert rig.one(Kind.STREAM_GAP).stream == "d2"
    assert rig.ledger.sizes["transfers"] == 1
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1")
    rig.read("d", "a1", "0-1")
    assert len(rig.end()) == 1
    assert rig.ledger.sizes["transfers"] == 0


# digest-mismatch, unverified-transfer


def test_a_digest_that_differs_names_its_page() -> None:
    rig = Rig()
    rig.left_behind("d", "b1", "0-1")
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1", digests="aa,bb")
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1", digests="aa,bc")
    rig.end()
    assert rig.kinds() == {"digest-mismatch"}
    finding = rig.one(Kind.DIGEST_MISMATCH)
    assert (finding.pages, finding.kills, finding.severity) == (pages("1"), {"a1"}, Severity.CRITICAL)
    rig.read("d", "a1", "0-1")
    assert rig.one(Kind.FOREIGN_READ).pages == pages("1"), "it may still hold what was there before"


def test_a_receiver_that_refused_what_arrived_tells_by_its_digests() -> None:
    rig = Rig(Policy(digests="require"))
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1", digests="aa,bb")
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1", status="failed", digests="aa,bc")
    rig.begin("a1", "0-1", "0-1", "x2", digests="aa,bb")
    rig.ended("d", "recv", "a1", "0-1", "x2", status="failed")
    rig.end()
    finding = rig.one(Kind.DIGEST_MISMATCH)
    assert (finding.pages, finding.transfer) == (pages("1"), "x1")
    assert rig.kinds() == {"digest-mismatch"}, "what is said to have failed needs no digest"
    rig.read("d", "a1", "0-1")
    assert "stale-read" in rig.kinds(), "it has not landed"


def test_digests_are_compared_by_page_not_by_place() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "1,0", digests="aa,bb")
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1", digests="bb,aa")
    assert rig.end() == []


@pytest.mark.parametrize(("sent", "received"), [(None, None), ("aa,bb", None), (None, "aa,bb"), ("aa,bb", "aa,bb")])
def test_a_missing_digest_matters_only_where_policy_asks(sent: str | None, received: str | None) -> None:
    for policy in (Policy(), Policy(digests="require")):
        rig = Rig(policy)
        rig.prefilled("a1")
        rig.alloc("d", "a1", "0-1")
        rig.begin("a1", "0-1", "0-1", digests=sent)
        rig.ended("p", "send", "a1", "0-1")
        rig.ended("d", "recv", "a1", "0-1", digests=received)
        missing = policy.digests == "require" and None in (sent, received)
        rig.end()
        assert rig.kinds() == ({"unverified-transfer"} if missing else set())
        if missing:
            finding = rig.one(Kind.UNVERIFIED_TRANSFER)
            assert (finding.action, finding.kills) == (Action.OBSERVE, set())


# free-in-flight: the source


@pytest.mark.parametrize("how", ["free", "cache"])
def test_a_source_page_given_up_in_flight(how: str) -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "4-5")
    rig.begin("a1", "0-1", "4-5")
    given = getattr(rig, how)("p", "a1", "1")
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "4-5")
    rig.end()
    assert rig.kinds() == {"free-in-flight"}
    finding = rig.one(Kind.FREE_IN_FLIGHT)
    assert (finding.request, finding.pool, finding.pages, finding.seq) == ("a1", "p", pages("1"), given.seq)
    assert (finding.transfer, finding.action, finding.kills) == ("x1", Action.QUARANTINE, set())


def test_a_source_page_given_up_once_the_sender_is_done() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "4-5")
    rig.begin("a1", "0-1", "4-5")
    rig.over("p", "a1")
    rig.ended("p", "send", "a1", "0-1")
    rig.free("p", "a1", "0-1")
    rig.ended("d", "recv", "a1", "4-5")
    rig.read("d", "a1", "4-5")
    assert rig.end() == []


def test_a_transfer_from_pages_that_are_the_requests_no_more() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "4-5")
    rig.free("p", "a1", "1")
    begin = rig.begin("a1", "0-1", "4-5")
    rig.end()
    assert rig.kinds() == {"free-in-flight"}
    assert rig.one(Kind.FREE_IN_FLIGHT).seq == begin.seq
    assert rig.one(Kind.FREE_IN_FLIGHT).pages == pages("1")


def test_a_transfer_may_start_from_shared_pages() -> None:
    rig = Rig()
    rig.prefilled("a1", "0")
    rig.cache("p", "a1", "0")
    rig.share("p", "a2", "0")
    rig.prefilled("a2", "1")
    rig.alloc("d", "a2", "4-5")
    rig.sent("a2", "0-1", "4-5")
    rig.read("d", "a2", "4-5")
    assert rig.end() == []


def test_a_source_that_changes_in_flight_taints_what_arrives_even_after_it_was_read() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "4-5")
    rig.begin("a1", "0-1", "4-5")
    rig.ended("d", "recv", "a1", "4-5")
    rig.read("d", "a1", "4-5")
    rig.respond("d", "a1")
    assert rig.found == []
    rig.over("p", "a1")
    rig.free("p", "a1", "0-1")
    rig.alloc("p", "b1", "0")
    rig.write("p", "b1", "0")
    rig.ended("p", "send", "a1", "0-1")
    rig.end()
    assert rig.kinds() == {"free-in-flight", "foreign-read", "tainted-response"}
    assert rig.one(Kind.FOREIGN_READ).kills == {"a1"}
    assert rig.one(Kind.FOREIGN_READ).other_requests == {"b1"}
    assert rig.ledger.requests["a1"].disclosed


def test_what_changes_in_the_source_after_the_senders_end_is_not_in_it() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "4-5")
    rig.begin("a1", "0-1", "4-5")
    rig.over("p", "a1")
    rig.ended("p", "send", "a1", "0-1")
    rig.free("p", "a1", "0-1")
    rig.alloc("p", "b1", "0-1")
    rig.write("p", "b1", "0-1")
    rig.ended("d", "recv", "a1", "4-5")
    rig.read("d", "a1", "4-5")
    assert rig.end() == []


def test_a_transfer_that_is_over_is_forgotten_by_pages_that_its_pool_does_not_have_any_more() -> None:
    rig = Rig()
    rig.prefilled("a1", "0-1")
    rig.begin("a1", "0-1", "0-1", "x1")
    rig.pool("p", size=0)
    rig.ended("p", "send", "a1", "0-1", "x1")
    rig.ended("d", "recv", "a1", "0-1", "x1", "aborted")
    rig.pool("p")
    rig.prefilled("b1", "4-5")
    rig.begin("b1", "4-5", "4-5", "x2")  # may have the room that the first had
    rig.free("p", "a1", "0-1")
    assert not [f for f in rig.end() if f.kind is Kind.FREE_IN_FLIGHT and f.transfer == "x2"]


def test_many_ends_whose_begins_are_lost_wait_together() -> None:
    rig = Rig(window_ms=200)
    for n in range(5):
        rig.alloc("d", f"a{n}", f"{2 * n}-{2 * n + 1}")
        rig.ended("d", "recv", f"a{n}", f"{2 * n}-{2 * n + 1}", transfer=f"x{n}")
    rig.read("d", "a0", "0-1")
    assert rig.ledger.watermark("d")[1] < 9
    rig.advance(100)
    assert rig.ledger.watermark("d")[1] < 9
    rig.advance(100)
    assert rig.ledger.watermark("d")[1] == rig.places["d"][1] - 1, "each would have waited a window of its own"
    assert rig.ledger.gaps == 5


def test_holes_behind_each_other_wait_from_when_they_were_seen() -> None:
    rig = Rig(window_ms=200)
    for n in range(5):
        rig.lose("d")
        rig.admit("d", f"a{n}")
    for _ in range(5):
        rig.advance(200 if rig.ledger.gaps == 0 else 0)
    assert rig.ledger.gaps == 5
