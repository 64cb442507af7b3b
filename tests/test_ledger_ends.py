"""Answers to clients, and requests that are over and go on."""

from __future__ import annotations

import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Action, Kind, Severity

pytestmark = both_ledgers

# tainted-response, wrong-status


def crossed(rig: Rig) -> None:
    rig.left_behind("d", "a1", "0")
    rig.alloc("d", "b1", "0")
    rig.read("d", "b1", "0")


def test_an_answer_after_a_foreign_read_is_a_disclosure() -> None:
    rig = Rig()
    crossed(rig)
    rig.respond("d", "b1", 503)
    assert not rig.ledger.requests["b1"].disclosed
    answer = rig.respond("d", "b1")
    rig.end()
    finding = rig.one(Kind.TAINTED_RESPONSE)
    assert (finding.request, finding.seq, finding.kills) == ("b1", answer.seq, {"b1"})
    assert (finding.other_tenants, finding.other_requests) == ({"tenant-a"}, {"a1"})
    assert rig.ledger.requests["b1"].disclosed
    assert not rig.ledger.requests["a1"].disclosed


def test_an_answer_before_the_foreign_read_gave_nothing_away() -> None:
    rig = Rig()
    rig.respond("d", "b1")
    crossed(rig)
    rig.end()
    assert "tainted-response" not in rig.kinds()


@pytest.mark.parametrize("answer_first", [False, True])
def test_an_answer_on_another_stream_counts_in_any_order(answer_first: bool) -> None:
    rig = Rig()
    if answer_first:
        rig.respond("r", "b1")
    crossed(rig)
    if not answer_first:
        rig.respond("r", "b1")
    rig.end()
    assert rig.one(Kind.TAINTED_RESPONSE).stream == "r"
    assert rig.ledger.requests["b1"].disclosed


def test_a_clean_answer_is_none_of_these() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.read("d", "a1", "0-1")
    rig.respond("d", "a1")
    rig.respond("r", "a1")
    rig.over("p", "a1")
    rig.free("p", "a1", "0-1")
    rig.over("d", "a1")
    rig.free("d", "a1", "0-1")
    assert rig.end() == []


@pytest.mark.parametrize("answer_first", [False, True])
def test_a_2xx_for_a_rejected_request_is_the_wrong_status(answer_first: bool) -> None:
    rig = Rig()
    if answer_first:
        rig.respond("r", "a1")
    rig.over("p", "a1", "rejected")
    if not answer_first:
        rig.respond("r", "a1")
    rig.end()
    assert rig.kinds() == {"wrong-status", "zombie-request"}
    finding = rig.one(Kind.WRONG_STATUS)
    assert (finding.action, finding.severity, finding.kills) == (Action.ALERT, Severity.HIGH, set())


def test_a_rejection_that_is_told_is_as_it_should_be() -> None:
    rig = Rig()
    rig.over("p", "a1", "rejected")
    rig.respond("r", "a1", 400)
    assert rig.end() == []


@pytest.mark.parametrize("outcome", ["failed", "aborted", "finished"])
def test_only_a_rejection_has_a_wrong_status(outcome: str) -> None:
    rig = Rig()
    rig.over("p", "a1", outcome)
    rig.respond("r", "a1")
    rig.end()
    assert "wrong-status" not in rig.kinds()


# zombie-request


@pytest.mark.parametrize("outcome", ["rejected", "failed"])
@pytest.mark.parametrize("read_first", [False, True])
def test_a_read_elsewhere_of_a_request_that_was_given_up(outcome: str, read_first: bool) -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    if read_first:
        rig.read("d", "a1", "0")
    rig.over("p", "a1", outcome)
    if not read_first:
        rig.read("d", "a1", "0")
    rig.end()
    finding = rig.one(Kind.ZOMBIE_REQUEST)
    assert (finding.request, finding.stream, finding.pool, finding.kills) == ("a1", "d", "d", {"a1"})
    assert finding.pages == pages("0")


@pytest.mark.parametrize("outcome", ["finished", "aborted"])
def test_the_other_side_may_finish_what_it_has_begun(outcome: str) -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.over("p", "a1", outcome)
    rig.read("d", "a1", "0-1")
    rig.respond("d", "a1")
    assert rig.end() == []


def test_what_prefill_read_before_the_hand_over_is_no_zombie_when_decode_fails() -> None:
    rig = Rig()
    rig.alloc("p", "a1", "0-1")
    rig.write("p", "a1", "0", tokens=4)
    rig.read("p", "a1", "0")
    rig.write("p", "a1", "1", tokens=8)
    rig.alloc("d", "a1", "0-1")
    rig.sent("a1", "0-1", "0-1")
    rig.over("d", "a1", "failed")
    assert rig.end() == []
    rig.read("p", "a1", "0-1")
    assert rig.kinds() == {"zombie-request"}


@pytest.mark.parametrize("record", ["alloc", "share", "write", "read", "begin", "respond"])
def test_nothing_new_after_the_end_on_the_same_stream(record: str) -> None:
    rig = Rig()
    rig.alloc("p", "a1", "0")
    rig.write("p", "a1", "0")
    rig.over("p", "a1")
    if record == "begin":
        rig.begin("a1", "0", "0")
    elif record == "respond":
        rig.respond("p", "a1")
    else:
        getattr(rig, record)("p", "a1", "0")
    assert rig.kinds() == {"zombie-request"}
    assert rig.one(Kind.ZOMBIE_REQUEST).kills == {"a1"}


def test_pages_may_be_given_back_after_the_end() -> None:
    rig = Rig()
    rig.prefilled("a1", "0-1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.over("p", "a1")
    rig.over("d", "a1", "aborted")
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1")
    rig.cache("p", "a1", "0")
    rig.free("p", "a1", "1")
    rig.free("d", "a1", "0-1")
    rig.scrub("d", "0-1")
    rig.over("d", "a1", "aborted")
    assert rig.end() == []


def test_a_request_may_come_again_after_the_worker_restarted() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.over("d", "a1", "failed")
    rig.restart("d")
    rig.admit("d", "a1")
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.read("d", "a1", "0")
    rig.respond("d", "a1")
    assert rig.end() == []
