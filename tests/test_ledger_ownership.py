"""Who owns a page, and how much a pool can hold."""

from __future__ import annotations

import pytest
from ledger_rig import Rig, both_ledgers, pages

from guard.findings import Action, Kind, Severity
from guard.policy import Policy
from guard.records import Scope

pytestmark = both_ledgers

# double-owner


def test_a_page_handed_out_twice_kills_both() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-2")
    alloc = rig.alloc("d", "b1", "2-3")
    rig.end()
    assert rig.kinds() == {"double-owner"}
    finding = rig.one(Kind.DOUBLE_OWNER)
    assert (finding.request, finding.seq, finding.pages) == ("b1", alloc.seq, pages("2"))
    assert (finding.other_requests, finding.other_tenants) == ({"a1"}, {"tenant-a"})
    assert finding.kills == {"a1", "b1"}
    assert {r.verdict for r in rig.ledger.requests.values()} == {"kill"}


def test_a_page_of_a_request_that_is_over_has_one_owner() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.over("d", "a1")
    rig.alloc("d", "b1", "0")
    rig.end()
    assert "double-owner" not in rig.kinds()


def test_a_request_may_allocate_its_own_page_again() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.alloc("d", "a1", "0")
    assert rig.end() == []


def test_the_same_index_in_another_pool_is_another_page() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.alloc("p", "b1", "0")
    assert rig.end() == []


# double-free


@pytest.mark.parametrize("how", ["free", "cache"])
def test_what_is_free_cannot_be_given_back(how: str) -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-1")
    rig.free("d", "a1", "1")
    given = getattr(rig, how)("d", "a1", "0-1")
    rig.end()
    assert rig.kinds() == {"double-free"}
    finding = rig.one(Kind.DOUBLE_FREE)
    assert (finding.request, finding.pages, finding.seq) == ("a1", pages("1"), given.seq)
    assert (finding.severity, finding.action, finding.kills) == (Severity.HIGH, Action.ALERT, set())


def test_nor_what_another_owns() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.free("d", "b1", "0")
    rig.end()
    finding = rig.one(Kind.DOUBLE_FREE)
    assert (finding.request, finding.other_requests, finding.other_tenants) == ("b1", {"a1"}, {"tenant-a"})
    rig.write("d", "a1", "0")
    rig.read("d", "a1", "0")
    assert rig.kinds() == {"double-free"}, "the page is still its owner's"


def test_anybody_may_evict_a_cached_page_once() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.cache("d", "a1", "0")
    rig.free("d", "b1", "0")
    assert rig.found == []
    rig.free("d", "b1", "0")
    rig.end()
    assert rig.kinds() == {"double-free"}


# foreign-share


def cached(rig: Rig, request: str = "a1", scope: Scope = Scope.TENANT) -> None:
    rig.alloc("d", request, "0-1")
    rig.write("d", request, "0-1", scope=scope)
    rig.over("d", request)
    rig.cache("d", request, "0-1")


def test_a_prefix_hit_on_another_tenants_pages() -> None:
    rig = Rig()
    cached(rig)
    share = rig.share("d", "b1", "0-1")
    rig.end()
    assert rig.kinds() == {"foreign-share"}
    finding = rig.one(Kind.FOREIGN_SHARE)
    assert (finding.request, finding.pages, finding.seq) == ("b1", pages("0-1"), share.seq)
    assert (finding.other_tenants, finding.other_requests) == ({"tenant-a"}, {"a1"})
    assert (finding.severity, finding.kills) == (Severity.HIGH, {"b1"})
    rig.read("d", "b1", "0-1")
    assert rig.kinds() == {"foreign-share", "foreign-read"}


def test_a_prefix_hit_within_a_tenant_or_on_public_pages() -> None:
    rig = Rig()
    cached(rig)
    rig.share("d", "a2", "0-1")
    rig.read("d", "a2", "0-1")
    rig.free("d", "a2", "0-1")
    cached(rig, "c1", Scope.PUBLIC)
    rig.share("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    assert rig.end() == []


def test_permitted_sharing_is_no_finding_but_is_in_the_lineage_of_nobody() -> None:
    rig = Rig(Policy(prefix_sharing="permit"))
    cached(rig)
    rig.share("d", "b1", "0-1")
    rig.read("d", "b1", "0-1")
    rig.respond("d", "b1")
    assert rig.end() == []
    assert rig.ledger.requests["b1"].verdict == "allow"


def test_permission_is_for_the_page_as_it_was_shared() -> None:
    rig = Rig(Policy(prefix_sharing="permit"))
    cached(rig)
    rig.share("d", "b1", "0-1")
    rig.free("d", "a1", "0-1")  # evicted
    rig.left_behind("d", "c1", "0-1")
    rig.read("d", "b1", "0-1")
    rig.end()
    assert rig.kinds() == {"foreign-read", "stale-read"}
    assert rig.one(Kind.FOREIGN_READ).other_tenants == {"tenant-c"}


# unscrubbed-reuse


def test_unscrubbed_reuse_only_where_policy_asks() -> None:
    for policy in (Policy(), Policy(scrub="require")):
        rig = Rig(policy)
        rig.left_behind("d", "a1", "0-1")
        rig.scrub("d", "1")
        rig.alloc("d", "b1", "0-1")
        rig.end()
        assert rig.kinds() == (set() if policy.scrub == "optional" else {"unscrubbed-reuse"})
    finding = rig.one(Kind.UNSCRUBBED_REUSE)
    assert (finding.request, finding.pages) == ("b1", pages("0"))
    assert (finding.other_tenants, finding.other_requests) == ({"tenant-a"}, {"a1"})
    assert (finding.severity, finding.action) == (Severity.WARNING, Action.OBSERVE)


def test_reuse_within_a_tenant_needs_no_scrubbing() -> None:
    rig = Rig(Policy(scrub="require"))
    rig.left_behind("d", "a1", "0-1")
    rig.alloc("d", "a2", "0-1")
    assert rig.end() == []


# page-leak


def test_a_leak_by_the_streams_own_clock() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-2")
    end = rig.over("d", "a1")
    rig.free("d", "a1", "1")
    rig.now_ms += 30_000
    rig.admit("p", "b1")  # another stream's clock says nothing
    assert rig.found == []
    rig.admit("d", "b1")
    rig.end()
    assert rig.kinds() == {"page-leak"}
    finding = rig.one(Kind.PAGE_LEAK)
    assert (finding.request, finding.pool, finding.pages, finding.seq) == ("a1", "d", pages("0,2"), end.seq)
    assert (finding.severity, finding.action) == (Severity.WARNING, Action.ALERT)


def test_a_leak_by_the_clock_when_nothing_comes() -> None:
    rig = Rig(window_ms=200)
    rig.alloc("d", "a1", "0-2")
    rig.over("d", "a1")
    rig.advance(30_000)
    assert rig.found == []
    rig.advance(202)
    assert rig.kinds() == {"page-leak"}


def test_pages_given_back_in_time_are_no_leak() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-2")
    rig.over("d", "a1")
    rig.now_ms += 29_000
    rig.free("d", "a1", "0-2")
    rig.now_ms += 10_000
    rig.admit("d", "b1")
    assert rig.end() == []


def test_cached_pages_and_pages_of_a_live_request_are_no_leak() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0-2")
    rig.cache("d", "a1", "0-2")
    rig.over("d", "a1")
    rig.alloc("d", "b1", "3")
    rig.now_ms += 60_000
    rig.admit("d", "c1")
    assert rig.end() == []


def test_the_grace_is_a_setting() -> None:
    rig = Rig(leak_grace_s=0.5)
    rig.alloc("d", "a1", "0")
    rig.over("d", "a1")
    rig.now_ms += 501
    rig.admit("d", "b1")
    assert rig.kinds() == {"page-leak"}


# over-capacity


def test_a_pool_that_holds_less_than_its_worker_advertises() -> None:
    rig = Rig(pools="")
    rig.pool("d", size=16, context=65)
    rig.pool("p", size=16, context=64)
    rig.pool("r", size=0, context=1 << 20)  # a router has no pages
    rig.end()
    finding = rig.one(Kind.OVER_CAPACITY)
    assert (finding.request, finding.pool, finding.seq) == (None, "d", 0)
    assert (finding.severity, finding.action, finding.kills) == (Severity.HIGH, Action.ALERT, set())


@pytest.mark.parametrize("then", ["begin", "read", "respond", "finished"])
def test_a_prompt_that_does_not_fit_and_is_not_rejected(then: str) -> None:
    rig = Rig()
    rig.admit("p", "a1", tokens=65)
    rig.alloc("p", "a1", "0")
    rig.write("p", "a1", "0")
    if then == "begin":
        rig.begin("a1", "0", "0")
    elif then == "read":
        rig.read("p", "a1", "0")
    elif then == "respond":
        rig.respond("p", "a1")
    else:
        rig.over("p", "a1")
    finding = rig.one(Kind.OVER_CAPACITY)
    assert (finding.request, finding.pool, finding.kills) == ("a1", "p", set())


@pytest.mark.parametrize("outcome", ["rejected", "aborted", "failed"])
def test_a_prompt_that_does_not_fit_and_goes_no_further(outcome: str) -> None:
    rig = Rig()
    rig.admit("p", "a1", tokens=65)
    rig.over("p", "a1", outcome)
    assert rig.end() == []


def test_a_prompt_that_just_fits() -> None:
    rig = Rig()
    rig.admit("p", "a1", tokens=64)
    rig.alloc("p", "a1", "0-15")
    rig.write("p", "a1", "0-15")
    rig.over("p", "a1")
    rig.free("p", "a1", "0-15")
    assert rig.end() == []


def test_a_router_admits_what_workers_must_reject() -> None:
    rig = Rig(pools="r p d")
    rig.admit("r", "a1", tokens=65)
    rig.respond("r", "a1", 400)
    rig.over("r", "a1")
    assert rig.end() == []
