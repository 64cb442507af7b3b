"""What goes into a page and what comes out of it: `kv.read` and `kv.write`."""

from __future__ import annotations

import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Kind
from guard.records import Scope

pytestmark = both_ledgers

# foreign-read


def test_foreign_read() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-3")
    rig.alloc("d", "b1", "2-3")
    read = rig.read("d", "b1", "2-3")
    rig.end()
    assert rig.kinds() == {"foreign-read", "stale-read"}
    assert rig.one(Kind.FOREIGN_READ).as_json() == {
        "kind": "foreign-read", "severity": "critical", "action": "kill", "request": "b1", "tenant": "tenant-b",
        "other_tenants": ["tenant-a"], "other_requests": ["a1"], "pool": "d", "pages": "2-3", "transfer": None,
        "stream": "d", "seq": read.seq, "confidence": "full",
    }  # fmt: skip
    assert rig.one(Kind.FOREIGN_READ).kills == {"b1"}
    assert rig.ledger.requests["b1"].verdict == "kill"
    assert rig.ledger.requests["b1"].lineage == {"tenant-a", "tenant-b"}
    assert rig.ledger.requests["a1"].verdict == "allow"


def test_pages_that_were_overwritten_are_the_requests_own() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    assert rig.end() == []


def test_only_the_pages_that_were_not_overwritten_are_named() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-3")
    rig.alloc("d", "b1", "0-3")
    rig.write("d", "b1", "0,2")
    rig.read("d", "b1", "0-3", tokens=8)
    rig.end()
    assert rig.one(Kind.FOREIGN_READ).pages == pages("1,3")
    assert rig.one(Kind.STALE_READ).pages == pages("1,3")


def test_further_reads_add_to_the_one_finding() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0-1")
    rig.left_behind("d", "c1", "2")
    rig.alloc("d", "b1", "0-2")
    first = rig.read("d", "b1", "0")
    told = rig.told
    rig.read("d", "b1", "1-2")
    rig.end()
    finding = rig.one(Kind.FOREIGN_READ)
    assert finding.pages == pages("0-2")
    assert finding.other_tenants == {"tenant-a", "tenant-c"}
    assert finding.seq == first.seq
    assert rig.told > told


def test_public_pages_may_be_read_by_all() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0", scope=Scope.PUBLIC)
    rig.cache("d", "a1", "0")
    rig.over("d", "a1")
    rig.share("d", "b1", "0")
    rig.read("d", "b1", "0")
    rig.respond("d", "b1")
    assert rig.end() == []
    assert rig.ledger.requests["b1"].lineage == {"public", "tenant-b"}


def test_the_same_tenants_leftovers_are_stale_not_foreign() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0")
    rig.alloc("d", "a2", "0")
    rig.read("d", "a2", "0")
    rig.end()
    assert rig.kinds() == {"stale-read"}


def test_a_scrubbed_page_holds_nobodys_data() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0")
    rig.scrub("d", "0")
    rig.alloc("d", "b1", "0")
    rig.read("d", "b1", "0")
    rig.end()
    assert rig.kinds() == {"stale-read"}


def test_what_a_request_writes_carries_what_it_has_read() -> None:
    rig = Rig()
    rig.left_behind("d", "a1", "0")
    rig.alloc("d", "b1", "0-1")
    rig.read("d", "b1", "0")
    rig.write("d", "b1", "1")
    rig.cache("d", "b1", "1")
    rig.share("d", "b2", "1")
    rig.read("d", "b2", "1")
    rig.end()
    assert rig.one(Kind.FOREIGN_READ, "b2").other_tenants == {"tenant-a"}
    assert rig.one(Kind.FOREIGN_SHARE).request == "b2"


def test_a_label_travels_with_a_transfer() -> None:
    rig = Rig()
    rig.left_behind("p", "a1", "0-1")
    rig.alloc("p", "b1", "0-1")  # and never written: the transfer carries what was left behind
    rig.alloc("d", "b1", "4-5")
    rig.sent("b1", "0-1", "4-5")
    rig.read("d", "b1", "4-5")
    rig.end()
    assert rig.kinds() == {"foreign-read"}
    assert rig.one(Kind.FOREIGN_READ).pool == "d"
    assert rig.one(Kind.FOREIGN_READ).pages == pages("4-5")


# stale-read


def test_a_page_never_written_is_stale() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-1")
    rig.write("d", "a1", "0")
    rig.read("d", "a1", "0-1", tokens=4)
    rig.end()
    assert rig.kinds() == {"stale-read"}
    assert rig.one(Kind.STALE_READ).pages == pages("1")
    assert rig.one(Kind.STALE_READ).kills == {"a1"}


def test_a_page_is_stale_in_its_next_generation() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.free("d", "a1", "0")
    rig.alloc("d", "a1", "0")
    rig.read("d", "a1", "0")
    rig.end()
    assert rig.kinds() == {"stale-read"}


@pytest.mark.parametrize("how", ["free", "scrub"])
def test_a_page_given_up_or_scrubbed_is_stale(how: str) -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-1")
    rig.write("d", "a1", "0-1")
    if how == "free":
        rig.free("d", "a1", "1")
    else:
        rig.scrub("d", "1")
    rig.read("d", "a1", "0-1")
    rig.end()
    assert rig.kinds() == {"stale-read"}
    assert rig.one(Kind.STALE_READ).pages == pages("1")


def test_a_page_of_somebody_else_is_stale() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.read("d", "a2", "0", tokens=0)
    rig.end()
    assert rig.kinds() == {"stale-read"}
    assert rig.one(Kind.STALE_READ).request == "a2"


def test_pages_beyond_the_pools_end_are_stale() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.read("d", "a1", "0,16-17", tokens=4)
    rig.end()
    assert rig.one(Kind.STALE_READ).pages == pages("16-17")


def test_more_tokens_than_are_valid_name_the_pages_beyond_them() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-2")
    rig.write("d", "a1", "0-2", tokens=9)
    rig.read("d", "a1", "0-2", tokens=9)
    assert rig.found == []
    rig.read("d", "a1", "0-2", tokens=10)
    rig.end()
    assert rig.kinds() == {"stale-read"}
    assert rig.one(Kind.STALE_READ).pages == pages("2")


def test_valid_tokens_are_what_was_shared_plus_what_landed() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.cache("d", "a1", "0")
    rig.share("d", "a2", "0")
    rig.prefilled("a2", "3")
    rig.alloc("d", "a2", "5")
    rig.sent("a2", "3", "5")
    rig.read("d", "a2", "0,5", tokens=8)
    assert rig.end() == []
    rig.read("d", "a2", "0,5", tokens=9)
    assert rig.kinds() == {"stale-read"}


def test_a_share_may_say_how_many_of_its_tokens_are_valid() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-1")
    rig.write("d", "a1", "0-1")
    rig.cache("d", "a1", "0-1")
    rig.share("d", "a2", "0-1", tokens=5)
    rig.read("d", "a2", "0-1", tokens=5)
    assert rig.found == []
    rig.read("d", "a2", "0-1", tokens=6)
    assert rig.kinds() == {"stale-read"}


def test_who_cached_its_pages_may_go_on_reading_them() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.cache("d", "a1", "0")
    rig.read("d", "a1", "0")
    assert rig.end() == []


# foreign-write


def test_a_write_into_anothers_page_kills_its_owner() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.alloc("d", "b1", "1")
    rig.write("d", "b1", "0-1")
    rig.read("d", "a1", "0")
    rig.end()
    finding = rig.one(Kind.FOREIGN_WRITE)
    assert (finding.request, finding.tenant, finding.pages) == ("b1", "tenant-b", pages("0"))
    assert (finding.other_requests, finding.other_tenants) == ({"a1"}, {"tenant-a"})
    assert finding.kills == {"a1"}
    assert rig.one(Kind.FOREIGN_READ).request == "a1"
    assert rig.ledger.requests["b1"].verdict == "allow"


def test_a_write_into_a_free_page_has_no_owner_to_kill() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.free("d", "a1", "0")
    rig.write("d", "a1", "0")
    rig.end()
    assert rig.kinds() == {"foreign-write"}
    assert rig.one(Kind.FOREIGN_WRITE).kills == set()


def test_bytes_that_land_in_anothers_page_kill_its_owner() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.sent("a1", "0-1", "0-1")
    rig.read("d", "b1", "0-1")
    rig.end()
    finding = rig.one(Kind.FOREIGN_WRITE)
    assert (finding.request, finding.transfer, finding.kills) == ("a1", "x1", {"b1"})
    assert finding.pages == pages("0-1")
    assert rig.one(Kind.FOREIGN_READ).request == "b1"
