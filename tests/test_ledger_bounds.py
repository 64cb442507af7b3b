"""The ledger's limits on what senders can make it keep: what is beyond is dropped, counted and told of once."""

from __future__ import annotations

import pytest
from ledger_rig import Rig, both_ledgers, pages, python_only

from guard.findings import Confidence, Finding, Kind
from guard.ledger.limits import BLOCK, LIMITS, MAX_PAGE_TRANSFERS
from guard.policy import Policy
from guard.records import Alloc, Pool, Record, Role, Scrub

pytestmark = both_ledgers


def dropped(rig: Rig) -> dict[str, int]:
    assert sum(rig.ledger.dropped_by.values()) == rig.ledger.dropped
    assert list(rig.ledger.dropped_by) == list(LIMITS)
    return {name: count for name, count in rig.ledger.dropped_by.items() if count}


def limit_finding(rig: Rig) -> Finding:
    (finding,) = (f for f in rig.found if f.kind is Kind.STREAM_GAP and f.pool is None)
    assert finding.request is None
    return finding


def test_streams() -> None:
    rig = Rig(pools="p d", max_streams=2)
    rig.admit("d1", "a1")
    rig.admit("d2", "a1")
    assert dropped(rig) == {"streams": 2}
    assert limit_finding(rig).reason == "more than 2 streams (ledger.max_streams): records of others are dropped"


def test_pools() -> None:
    rig = Rig(pools="p d", max_pools=2)
    rig.alloc("d", "a1", "0")
    place = rig.emit("d", Scrub(pool="elsewhere", pages=pages("0")))
    assert dropped(rig) == {"pools": 1}
    finding = limit_finding(rig)
    assert (finding.stream, finding.epoch, finding.seq) == (place.stream, place.epoch, place.seq)
    assert finding.reason == "more than 2 pools (ledger.max_pools): records of others are dropped"
    rig.begin("a1", "0", "0", receiver="nowhere")
    rig.emit("d", Pool(pool="e", pages=1, page_tokens=1, page_bytes=1, role=Role.DECODE, context_limit=1))
    assert dropped(rig) == {"pools": 3}
    assert limit_finding(rig).seq == place.seq
    # A dropped record has its place all the same, and pools that are known go on.
    assert rig.ledger.watermark("d") == (1, 3)
    rig.left_behind("d", "b1", "1")
    rig.alloc("d", "a1", "1")
    rig.read("d", "a1", "1")
    assert rig.one(Kind.FOREIGN_READ).request == "a1"


def test_two_new_pools_in_one_record() -> None:
    rig = Rig(pools="p", max_pools=2)
    rig.begin("a1", "0", "0", receiver="d")
    assert dropped(rig) == {}
    rig = Rig(pools="", max_pools=1)
    rig.begin("a1", "0", "0", receiver="p")
    assert dropped(rig) == {}
    rig = Rig(pools="", max_pools=1)
    rig.begin("a1", "0", "0", receiver="d")
    assert dropped(rig) == {"pools": 1}


def test_pages_are_counted_in_blocks() -> None:
    rig = Rig(pools="", max_pages=2 * BLOCK)
    rig.pool("d", size=10 * BLOCK, context=0)
    rig.alloc("d", "a1", f"0,{BLOCK}")
    rig.alloc("d", "a2", f"1-{2 * BLOCK - 1}")
    assert dropped(rig) == {}
    rig.alloc("d", "a3", f"{2 * BLOCK}")
    rig.scrub("d", f"{9 * BLOCK}")
    assert dropped(rig) == {"pages": 2}
    assert limit_finding(rig).reason == "more than 1024 pages (ledger.max_pages): records of others are dropped"
    assert rig.ledger.sizes["pages"] == 2 * BLOCK
    assert "a3" not in rig.ledger.requests
    rig.alloc("d", "a1", f"{20 * BLOCK}")  # beyond the pool: makes no page
    assert dropped(rig) == {"pages": 2}


def test_a_restart_gives_blocks_back() -> None:
    rig = Rig(pools="d", max_pages=BLOCK)
    rig.alloc("d", "a1", "0")
    rig.pool("p")
    rig.alloc("p", "a1", "0")
    assert dropped(rig) == {"pages": 1}
    rig.restart("d")
    rig.end()
    rig.alloc("p", "a2", "0")
    assert dropped(rig) == {"pages": 1}
    assert "a2" in rig.ledger.requests


def test_a_begin_counts_the_pages_that_it_goes_to() -> None:
    rig = Rig(pools="p d", max_pages=BLOCK)
    rig.prefilled("a1")
    rig.begin("a1", "0-1", "0-1")
    assert dropped(rig) == {"pages": 1}
    assert rig.ledger.sizes["transfers"] == 0
    rig = Rig(pools="p", max_pages=2 * BLOCK)
    rig.prefilled("a1")
    rig.begin("a1", "0-1", f"0,{BLOCK}", receiver="never-announced")
    assert dropped(rig) == {"pages": 1}


def test_live_requests() -> None:
    rig = Rig(max_requests=2, max_ended=2)
    for request in ("a1", "b1", "c1"):
        rig.alloc("d", request, request[1])
    assert dropped(rig) == {"requests": 1}
    assert limit_finding(rig).reason == "more than 2 live requests (ledger.max_requests): records of others are dropped"
    assert set(rig.ledger.requests) == {"a1", "b1"}
    rig.over("d", "b1")
    rig.free("d", "b1", "1")
    rig.admit("d", "c1")
    assert set(rig.ledger.requests) == {"a1", "b1", "c1"}
    rig.scrub("d", "5")
    rig.pool("u")
    assert dropped(rig) == {"requests": 1}


def test_what_takes_a_place_only_is_beyond_no_limit() -> None:
    rig = Rig(pools="d", max_requests=1, max_pools=1)
    rig.ledger.feed_invalid(Record(stream="q", epoch=1, seq=0, time_ns=1), 0)
    assert dropped(rig) == {}
    assert rig.ledger.watermark("q") == (1, 0)


def test_streams_of_one_request() -> None:
    rig = Rig(pools="p d", max_request_streams=2)
    rig.admit("p", "a1")
    rig.admit("d", "a1")
    rig.admit("r", "a1")
    assert dropped(rig) == {"request_streams": 1}
    assert "more than 2 streams of one request (ledger.max_request_streams)" in limit_finding(rig).reason
    rig.admit("r", "b1")
    rig.admit("d", "a1")
    rig.restart("d")
    rig.end()
    rig.admit("d", "a1")
    assert dropped(rig) == {"request_streams": 2}


def test_transfers_in_flight() -> None:
    rig = Rig(max_transfers=2)
    rig.prefilled("a1", "0-3")
    rig.alloc("d", "a1", "0-3")
    for number in range(3):
        rig.begin("a1", str(number), str(number), f"x{number}")
    assert dropped(rig) == {"transfers": 1}
    assert "more than 2 transfers in flight (ledger.max_transfers)" in limit_finding(rig).reason
    rig.begin("a1", "1", "1", "x1")  # one that is in flight already
    rig.ended("p", "send", "a1", "0", "x0")
    rig.ended("d", "recv", "a1", "0", "x0")
    rig.begin("a1", "3", "3", "x3")
    assert dropped(rig) == {"transfers": 1}


@pytest.mark.parametrize(("src", "dst"), [("0", "{}"), ("{}", "0")])
def test_transfers_of_one_page(src: str, dst: str) -> None:
    rig = Rig(pools="")
    for stream in "pd":
        rig.pool(stream, size=100)
    for number in range(MAX_PAGE_TRANSFERS + 2):
        rig.begin("a1", src.format(number), dst.format(number), f"x{number}")
    assert dropped(rig) == {"page_transfers": 2}
    assert limit_finding(rig).reason == (
        "more than 64 transfers of one page (a constant): records of others are dropped"
    )  # fmt: skip
    assert rig.ledger.sizes["transfers"] == MAX_PAGE_TRANSFERS


def test_a_begin_that_names_a_page_twice_counts_once() -> None:
    rig = Rig()
    rig.prefilled("a1", "0")
    rig.alloc("d", "a1", "0")
    rig.begin("a1", ",".join("0" for _ in range(65)), ",".join("0" for _ in range(65)), tokens=4)
    rig.begin("a1", "0", "0", "x2")
    assert dropped(rig) == {}


def test_all_limits_share_one_finding_and_the_earliest_record_names_it() -> None:
    rig = Rig(pools="d", max_requests=1, max_transfers=1, max_streams=1)
    rig.admit("d", "a1")
    rig.admit("d", "b1")
    rig.admit("p", "a1")
    assert dropped(rig) == {"streams": 1, "requests": 1}
    assert "live requests" in limit_finding(rig).reason
    assert rig.told == 1


# What is kept of one request, page or finding


@python_only
def test_reads_kept_of_a_request_are_bounded() -> None:
    rig = Rig()
    rig.prefilled("a1", "0-3")
    rig.alloc("d", "a1", "0-3")
    rig.sent("a1", "0-3", "0-3")
    for number in range(3000):
        rig.read("d", "a1", str(number % 4))
    rs = rig.ledger._world.requests["a1"].streams["d"]
    assert len(rs.reads) == 1024
    assert rs.reads[-1].pages == pages("0-3")
    assert rs.reads[-1].where.seq == rig.places["d"][1] - 1
    rig.over("p", "a1", "rejected")
    assert rig.one(Kind.ZOMBIE_REQUEST).pages == pages("0-3")


def test_a_finding_names_the_smallest_ids_of_others() -> None:
    rig = Rig(pools="")
    rig.pool("d", size=200)
    for number in range(150):
        rig.alloc("d", f"{chr(0x100 + number)}1", str(number))
        rig.write("d", f"{chr(0x100 + number)}1", str(number))
    for number in reversed(range(150)):
        rig.read("d", "a1", str(number))
    finding = rig.one(Kind.FOREIGN_READ)
    assert sorted(finding.other_tenants) == [f"tenant-{chr(0x100 + number)}" for number in range(64)]
    assert sorted(finding.other_requests) == [f"{chr(0x100 + number)}1" for number in range(64)]
    assert rig.ledger.requests["a1"].lineage >= {f"tenant-{chr(0x100 + number)}" for number in range(150)}


def test_a_finding_is_told_of_whenever_it_changes() -> None:
    rig = Rig(pools="p d")
    rig.ledger.feed(
        rig.emit("d", Pool(pool="e", pages=1, page_tokens=1, page_bytes=1, role=Role.DECODE, context_limit=9))
    )
    assert rig.told == 1
    earlier = rig.log[-1].time_ns - 1
    record = Pool(
        pool="e", pages=1, page_tokens=1, page_bytes=1, role=Role.DECODE, context_limit=9,
        stream="p", epoch=1, seq=1, time_ns=earlier,
    )  # fmt: skip
    rig.feed(record)
    assert rig.told == 2
    assert rig.found[-1].time_ns == earlier


# What a closure sees is what was so when the record was judged


@pytest.mark.parametrize("kind", [Kind.FOREIGN_SHARE, Kind.UNSCRUBBED_REUSE])
def test_a_finding_that_comes_later_is_as_sure_as_the_page_was_then(kind: Kind) -> None:
    rig = Rig(Policy(scrub="require"), window_ms=0)
    rig.prefilled("b1", "0")
    rig.alloc("d", "b1", "0")
    rig.lose("d")  # the guard loses sight of the page
    rig.cache("d", "b1", "0")
    rig.advance(1)
    rig.begin("b1", "0", "0")
    rig.ended("d", "recv", "b1", "0", feed=True)
    rig.alloc("p", "c1", "1")
    rig.write("p", "c1", "1")
    if kind is Kind.FOREIGN_SHARE:
        rig.share("d", "a1", "0")
    else:
        rig.alloc("d", "a1", "0")
    rig.write("p", "b1", "0")
    rig.ended("p", "send", "b1", "0")
    assert rig.one(kind, "a1").confidence is Confidence.DEGRADED


def test_a_page_of_no_tokens_holds_none() -> None:
    rig = Rig(pools="")
    rig.emit("d", Pool(pages=4, page_tokens=0, page_bytes=1, role=Role.DECODE, context_limit=0))
    rig.alloc("d", "a1", "0-3")
    rig.write("d", "a1", "0-3", tokens=2)
    rig.read("d", "a1", "0-3", tokens=3)
    assert rig.one(Kind.STALE_READ).pages == pages("0-3")


def test_a_pool_that_restarts_takes_the_pages_of_other_streams_requests_too() -> None:
    rig = Rig(pools="d p")
    rig.emit("p", Alloc(request="a1", tenant="tenant-a", pool="d", pages=pages("3")))
    rig.over("p", "a1")
    assert rig.ledger.sizes["requests_ended"] == 0, "it owns a page"
    rig.restart("d")
    rig.end()
    assert rig.ledger.sizes["requests_ended"] == 1
    assert rig.ledger.sizes["requests_live"] == 0


@pytest.mark.parametrize("piece", ["٣", "²"])
def test_a_piece_is_numbered_in_ascii(piece: str) -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1", f"x/{piece}")
    rig.ended("d", "recv", "a1", "0-1", "x")
    assert rig.ledger.sizes["records_held"] == 1
