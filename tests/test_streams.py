"""Order within streams and between them: holes, repeats, restarts, waiting."""

from __future__ import annotations

import random

import msgspec
import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Action, Confidence, Kind, Severity
from guard.policy import Policy
from guard.records import Free, Record, RequestEnd

pytestmark = both_ledgers


def clean(rig: Rig, request: str = "a1", at: str = "0-1") -> list[Record]:
    """A request that is served as it should be on decode alone, kept back."""
    return [
        rig.alloc("d", request, at, feed=False),
        rig.write("d", request, at, feed=False),
        rig.read("d", request, at, feed=False),
        rig.over("d", request, feed=False),
        rig.free("d", request, at, feed=False),
    ]


# Holes


def test_order_is_the_sequence_not_the_arrival() -> None:
    for seed in range(20):
        rig = Rig()
        records = clean(rig)
        random.Random(seed).shuffle(records)
        rig.feed(*records)
        assert rig.end() == []
        assert rig.ledger.watermark("d") == (1, 5)


def test_nothing_beyond_a_hole_is_judged_before_it_is_filled() -> None:
    rig = Rig(window_ms=200)
    alloc, *rest = clean(rig)
    rig.feed(*rest)
    assert rig.ledger.watermark("d") == (1, 0)
    assert rig.ledger.sizes["records_held"] == 4
    rig.advance(199)
    assert rig.ledger.watermark("d") == (1, 0)
    rig.feed(alloc)
    assert rig.ledger.watermark("d") == (1, 5)
    assert rig.ledger.sizes["records_held"] == 0
    rig.advance(1000)
    assert rig.found == []
    assert rig.ledger.gaps == 0


def test_a_hole_that_does_not_fill_is_a_finding() -> None:
    rig = Rig(window_ms=200)
    rig.alloc("d", "a1", "0-1")
    rig.write("d", "a1", "0-1")
    rig.lose("d", 2)
    rig.read("d", "a1", "0-1")
    rig.advance(199)
    assert rig.found == []
    rig.advance(2)
    assert rig.kinds() == {"stream-gap"}
    finding = rig.one(Kind.STREAM_GAP)
    assert (finding.request, finding.pool, finding.stream, finding.seq) == (None, "d", "d", 3)
    assert finding.pages == pages("0-1"), "the pages it cannot vouch for: those owned at the time"
    assert (finding.severity, finding.action) == (Severity.WARNING, Action.ALERT)
    assert rig.ledger.watermark("d") == (1, 5)
    assert rig.ledger.gaps == 1


def test_a_hole_before_the_first_record_is_one_too() -> None:
    rig = Rig(pools="")
    rig.lose("d")
    rig.alloc("d", "a1", "0")
    rig.end()
    assert rig.one(Kind.STREAM_GAP).seq == 0


def test_each_hole_counts_and_one_finding_tells_of_them() -> None:
    rig = Rig()
    for page in range(3):
        rig.lose("d")
        rig.alloc("d", "a1", str(page))
    rig.end()
    assert rig.one(Kind.STREAM_GAP).pages == pages("0-1")
    assert rig.ledger.gaps == 3


def test_what_comes_after_its_place_was_given_up_is_counted_and_does_nothing() -> None:
    rig = Rig(window_ms=200)
    alloc, *rest = clean(rig)
    rig.feed(*rest)
    rig.advance(201)
    found = len(rig.found)
    rig.feed(alloc)
    assert len(rig.found) == found
    assert rig.ledger.streams["d"].late == 1


def test_another_streams_hole_holds_nobody_up() -> None:
    rig = Rig(window_ms=200)
    rig.lose("p")
    rig.admit("p", "a1")
    rig.feed(*clean(rig))
    assert rig.ledger.watermark("d") == (1, 5)


@pytest.mark.parametrize(("on_degraded", "verdict"), [("alert", "allow"), ("act", "kill")])
def test_findings_on_pages_the_guard_lost_sight_of_are_degraded(on_degraded: str, verdict: str) -> None:
    rig = Rig(Policy.model_validate({"on_degraded": on_degraded}))
    rig.left_behind("d", "a1", "0")
    rig.alloc("d", "b1", "0")
    rig.lose("d")  # was it a write?
    rig.read("d", "b1", "0")
    rig.respond("d", "b1")
    rig.end()
    for kind in (Kind.FOREIGN_READ, Kind.STALE_READ, Kind.TAINTED_RESPONSE):
        finding = rig.one(kind)
        assert finding.confidence is Confidence.DEGRADED
        assert finding.action is (Action.ALERT if verdict == "allow" else Action.KILL)
    assert rig.ledger.requests["b1"].verdict == verdict


def test_a_page_handed_out_after_the_gap_is_vouched_for_again() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-1")
    rig.lose("d")
    rig.alloc("d", "b1", "0")
    rig.read("d", "b1", "0", tokens=0)
    rig.end()
    assert rig.one(Kind.FOREIGN_READ).confidence is Confidence.FULL
    assert rig.ledger.requests["b1"].verdict == "kill"


def test_a_finding_is_sure_when_one_of_its_pages_is() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-1")
    rig.alloc("d", "b1", "0")
    rig.lose("d")
    rig.alloc("d", "b1", "1")
    rig.read("d", "b1", "0-1", tokens=0)
    rig.end()
    assert rig.one(Kind.FOREIGN_READ).confidence is Confidence.FULL


# Repeats


def test_what_is_made_from_pages_out_of_sight_is_doubtful_too() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-1")
    rig.prefilled("b1")
    rig.alloc("d", "b1", "0-1")
    rig.lose("p")  # the begin: as far as the guard can see, a1's bytes are in the pages yet
    rig.ended("d", "recv", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    rig.alloc("d", "b1", "2")
    rig.write("d", "b1", "2", tokens=12)
    rig.read("d", "b1", "0-2")
    rig.respond("d", "b1")
    rig.end()
    assert rig.one(Kind.FOREIGN_READ).pages == pages("0-2")
    others = [finding for finding in rig.found if finding.kind is not Kind.STREAM_GAP]
    assert {finding.confidence for finding in others} == {Confidence.DEGRADED}
    assert rig.ledger.requests["b1"].verdict == "allow"


def test_doubt_goes_with_the_bytes_to_the_other_side_and_into_the_cache() -> None:
    rig = Rig()
    rig.left_behind("p", "a1", "0")
    rig.alloc("p", "b1", "0")
    rig.lose("p")  # b1's write
    rig.alloc("p", "b1", "1")
    rig.write("p", "b1", "1", tokens=8)
    rig.alloc("d", "b1", "0-1")
    rig.sent("b1", "0-1", "0-1")
    rig.read("d", "b1", "0-1")
    rig.over("p", "b1")
    rig.cache("p", "b1", "0-1")
    rig.share("p", "b2", "0-1")
    rig.read("p", "b2", "0-1")
    rig.end()
    assert rig.kinds() == {"stream-gap", "stale-read", "foreign-read", "foreign-share"}
    others = [finding for finding in rig.found if finding.kind is not Kind.STREAM_GAP]
    assert {finding.confidence for finding in others} == {Confidence.DEGRADED}


def test_a_record_told_again_is_silent() -> None:
    rig = Rig()
    records = clean(rig)
    rig.feed(*records, *records)
    rig.feed(*records[2:])
    assert rig.end() == []
    assert rig.ledger.streams["d"].duplicates == 8


def test_a_record_told_again_while_it_is_held_is_silent() -> None:
    rig = Rig()
    records = clean(rig)
    rig.feed(*records[1:], *records[1:], records[0])
    assert rig.end() == []


def test_a_repeat_of_a_huge_page_set_is_compared_by_its_runs() -> None:
    rig = Rig()
    free = rig.emit("d", Free(request="a1", tenant="tenant-a", pages=pages("0-16777215")), feed=False)
    again = msgspec.structs.replace(free, pages=pages("0-16777215"))
    rig.feed(free, again)
    assert "stream-gap" not in {f.kind.value for f in rig.end()}


@pytest.mark.parametrize("held", [False, True])
def test_another_record_in_a_place_already_taken(held: bool) -> None:
    rig = Rig()
    if held:
        rig.lose("d")
    first = rig.alloc("d", "a1", "0")
    rig.feed(msgspec.structs.replace(first, pages=pages("1")))
    assert rig.kinds() == {"stream-gap"}
    assert rig.one(Kind.STREAM_GAP).seq == first.seq
    assert rig.ledger.gaps == 1


# Restarts


def test_a_new_epoch_starts_afresh() -> None:
    rig = Rig()
    rig.left_behind("d", "b1", "1")
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.restart("d")
    rig.alloc("d", "b2", "0-1")  # neither owned nor full of others' bytes any more
    rig.read("d", "b2", "0-1")
    rig.end()
    assert rig.kinds() == {"stale-read"}
    assert rig.ledger.watermark("d") == (2, 2)
    assert rig.ledger.sizes["requests_live"] == 1, "a1 is over, b2 is not"


def test_a_new_epoch_waits_for_what_is_left_of_the_old_one() -> None:
    rig = Rig(window_ms=200)
    *early, free = clean(rig)
    rig.feed(*early)
    rig.restart("d")
    assert rig.ledger.watermark("d") == (1, 4)
    rig.feed(free)
    assert rig.ledger.watermark("d") == (1, 5)
    rig.advance(201)
    assert rig.ledger.watermark("d") == (2, 0)
    assert rig.found == []


def test_a_record_of_an_epoch_that_is_over_is_late() -> None:
    rig = Rig(window_ms=200)
    *early, free = clean(rig)
    rig.feed(*early)
    rig.restart("d")
    rig.advance(201)
    rig.feed(free)
    assert rig.ledger.streams["d"].late == 1
    assert rig.found == []


def test_an_epoch_never_heard_of_is_a_restart_even_when_it_is_lower() -> None:
    rig = Rig(window_ms=200)
    rig.restart("d", epoch=50)
    rig.advance(201)
    rig.alloc("d", "a1", "0")
    rig.restart("d", epoch=7)  # the emitter's clock was set back
    rig.advance(201)
    assert rig.ledger.watermark("d") == (7, 0)
    rig.alloc("d", "b1", "0")
    assert rig.found == []


def test_a_hole_at_the_end_of_an_epoch_cannot_be_seen_but_one_inside_it_can() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.lose("d")
    rig.write("d", "a1", "0")
    rig.restart("d")
    rig.alloc("d", "b1", "0")
    rig.end()
    assert rig.kinds() == {"stream-gap"}
    assert rig.one(Kind.STREAM_GAP).epoch == 1


def test_a_transfer_whose_sender_restarted_wrote_nothing_more() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.restart("p")
    rig.ended("d", "recv", "a1", "", status="failed")
    rig.over("d", "a1", "aborted")
    rig.free("d", "a1", "0-1")
    assert rig.end() == []
    assert rig.ledger.sizes["transfers"] == 0


def test_replay_begins_a_new_epoch_after_a_while_not_only_at_the_end() -> None:
    rig = Rig(restart_records=10)
    rig.alloc("d", "a1", "0")
    rig.restart("d")
    for _ in range(10):
        rig.admit("p", "a1")
    assert rig.ledger.watermark("d") == (2, 0)


# Waiting for another stream


def arrived_first(rig: Rig) -> tuple[Record, Record]:
    """Decode says that a transfer ended, and reads; the sender's begin and end are kept back."""
    rig.prefilled("a1")
    begin = rig.begin("a1", "0-1", "0-1", feed=False)
    end = rig.ended("p", "send", "a1", "0-1", feed=False)
    rig.alloc("d", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1")
    rig.read("d", "a1", "0-1")
    return begin, end


def test_the_receivers_end_waits_for_the_begin_and_its_stream_with_it() -> None:
    rig = Rig(window_ms=200)
    begin, end = arrived_first(rig)
    assert rig.ledger.watermark("d") == (1, 1)
    assert rig.ledger.sizes["records_held"] == 2
    rig.advance(198)  # the read came a millisecond later
    assert rig.ledger.watermark("d") == (1, 1)
    rig.feed(begin)
    assert rig.ledger.watermark("d") == (1, 3)
    rig.feed(end)
    rig.advance(1000)
    assert rig.found == []


def test_a_begin_that_never_comes_is_an_unknown_transfer() -> None:
    rig = Rig(window_ms=200)
    arrived_first(rig)
    rig.advance(201)
    assert rig.ledger.watermark("d") == (1, 3)
    finding = rig.one(Kind.STREAM_GAP)
    assert (finding.request, finding.transfer, finding.pages) == ("a1", "x1", pages("0-1"))
    assert finding.stream == "d"
    assert rig.ledger.gaps == 1
    stale = rig.one(Kind.STALE_READ)
    assert stale.confidence is Confidence.DEGRADED
    assert stale.kills == set()


def test_at_the_end_of_a_replay_holes_are_given_up_before_transfers_are() -> None:
    rig = Rig()
    arrived = arrived_first(rig)
    rig.lose("p")  # nothing to do with the transfer
    rig.feed(*arrived)
    rig.admit("p", "a2")
    rig.end()
    assert rig.kinds() == {"stream-gap"}
    assert rig.one(Kind.STREAM_GAP).stream == "p"


def test_records_that_say_nothing_of_pages_still_wait_their_turn() -> None:
    rig = Rig(window_ms=200)
    begin, _ = arrived_first(rig)
    answer = rig.respond("d", "a1")
    assert rig.ledger.watermark("d")[1] < answer.seq
    rig.feed(begin)
    assert rig.ledger.watermark("d")[1] == answer.seq


# What cannot be read, and what changes


def test_an_invalid_record_takes_its_place_and_does_nothing() -> None:
    rig = Rig(window_ms=200)
    rig.alloc("d", "a1", "0")
    broken = rig.emit("d", RequestEnd(request="a1", tenant="tenant-a", outcome="finished"), feed=False)  # type: ignore[arg-type]
    rig.ledger.feed_invalid(Record(stream="d", epoch=1, seq=broken.seq, time_ns=broken.time_ns))
    rig.write("d", "a1", "0")
    rig.advance(1000)
    assert rig.found == []
    assert rig.ledger.watermark("d") == (1, 3)
