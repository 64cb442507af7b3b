"""Writers that come too late: a destination page given up before the bytes for it had arrived."""

from __future__ import annotations

import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Kind

pytestmark = both_ledgers


def test_a_destination_given_up_before_its_writer_was_done() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.over("d", "a1", "aborted")
    free = rig.free("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    end = rig.ended("p", "send", "a1", "0-1")
    rig.end()
    assert rig.kinds() == {"free-in-flight", "foreign-write", "foreign-read"}
    freed = rig.one(Kind.FREE_IN_FLIGHT)
    assert (freed.request, freed.pool, freed.pages, freed.seq) == ("a1", "d", pages("0-1"), free.seq)
    written = rig.one(Kind.FOREIGN_WRITE)
    assert (written.request, written.other_requests, written.kills) == ("a1", {"b1"}, {"b1"})
    assert (written.stream, written.seq) == ("p", end.seq)
    assert rig.one(Kind.FOREIGN_READ).request == "b1"
    assert rig.ledger.requests["a1"].verdict == "allow"


def test_a_writer_that_failed_wrote_nothing() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.over("d", "a1", "aborted")
    rig.free("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    rig.ended("p", "send", "a1", "0-1", status="failed")
    rig.end()
    assert rig.kinds() == {"free-in-flight"}


@pytest.mark.parametrize("sender_first", [False, True])
def test_ok_on_either_side_means_that_the_bytes_are_there(sender_first: bool) -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.over("d", "a1", "aborted")
    rig.free("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    if sender_first:
        rig.ended("p", "send", "a1", "0-1", status="failed")
    rig.ended("d", "recv", "a1", "0-1")
    if not sender_first:
        rig.ended("p", "send", "a1", "0-1", status="failed")
    rig.end()
    assert rig.one(Kind.FOREIGN_WRITE).kills == {"b1"}


def test_a_deferred_release_waits_for_the_writer() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.over("d", "a1", "aborted")
    rig.ended("p", "send", "a1", "0-1")
    rig.ended("d", "recv", "a1", "0-1", status="aborted")
    rig.free("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    assert rig.end() == []


def test_a_retry_into_the_same_pages() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1", "x1")
    rig.ended("p", "send", "a1", "0-1", "x1", status="failed")
    rig.ended("d", "recv", "a1", "0-1", "x1", status="failed")
    rig.sent("a1", "0-1", "0-1", "x2")
    rig.read("d", "a1", "0-1")
    assert rig.end() == []


@pytest.mark.parametrize("begin_late", [False, True])
def test_pages_given_back_and_taken_again_for_a_retry(begin_late: bool) -> None:
    rig = Rig()
    rig.prefilled("a1")
    begin = rig.begin("a1", "0-1", "0-1", feed=not begin_late)
    end = rig.ended("p", "send", "a1", "0-1", feed=not begin_late)
    rig.alloc("d", "a1", "0-1")
    rig.free("d", "a1", "0-1")
    rig.alloc("d", "a1", "0-1")
    if begin_late:
        rig.feed(begin, end)
    rig.ended("d", "recv", "a1", "0-1")
    rig.read("d", "a1", "0-1")
    assert rig.end() == []


def test_a_begin_that_comes_after_the_page_was_given_up_is_seen_all_the_same() -> None:
    rig = Rig()
    rig.prefilled("a1")
    begin = rig.begin("a1", "0-1", "0-1", feed=False)
    end = rig.ended("p", "send", "a1", "0-1", feed=False)
    rig.alloc("d", "a1", "0-1")
    rig.over("d", "a1", "aborted")
    rig.free("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    assert rig.found == []
    rig.feed(begin, end)
    rig.end()
    assert rig.kinds() == {"free-in-flight", "foreign-write", "foreign-read"}
    assert rig.ledger.requests["b1"].verdict == "kill"


def test_bytes_for_a_request_that_ended_without_ever_having_the_pages() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.over("d", "a1", "aborted")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.ended("p", "send", "a1", "0-1")
    rig.end()
    assert rig.one(Kind.FOREIGN_WRITE).kills == {"b1"}
