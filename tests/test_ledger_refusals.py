"""`kv.refuse`: what the worker's own check refused is judged as if it had been read, and nothing follows from it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_rig import Rig, both_ledgers, pages, who
from test_ledger_properties import few, interleaved, judge, modelled, random_choices

from guard.findings import Confidence, Kind
from guard.policy import Policy
from guard.records import Read, Record, Refuse

pytestmark = both_ledgers


def test_a_page_that_the_records_call_the_requests_own_contradicts_them() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.read("d", "a1", "0-1")
    refusal = rig.refuse("d", "a1", "1")
    rig.over("d", "a1", "failed")
    rig.free("d", "a1", "0-1")
    [finding] = rig.found
    assert (finding.kind, finding.request, finding.tenant, finding.pool, str(finding.pages)) == (
        Kind.HOOK_DIVERGENCE, "a1", "tenant-a", "d", "1",
    )  # fmt: skip
    assert (finding.severity.value, finding.action.value, finding.confidence) == ("high", "alert", Confidence.FULL)
    assert (finding.stream, finding.seq) == ("d", refusal.seq)
    assert finding.reason == "the worker refused pages that the records say are the request's"
    assert rig.end() == [finding]


def test_pages_that_are_not_the_requests_are_stale_and_no_contradiction() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.alloc("d", "a1", "2")  # never written
    rig.refuse("d", "a1", "2-3")
    [finding] = rig.end()
    assert (finding.kind, str(finding.pages)) == (Kind.STALE_READ, "2-3")
    assert finding.reason == "the worker refused 2 pages, 2 of them not valid for the request"


def test_another_tenants_page_in_the_block_table_is_foreign_and_stale() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.handed_over("b1", "2-3", "2-3", "x2")
    rig.refuse("d", "b1", "0,3")
    assert rig.kinds() == {"foreign-read", "stale-read", "hook-divergence"}
    foreign = rig.one(Kind.FOREIGN_READ)
    assert (foreign.other_tenants, foreign.other_requests, str(foreign.pages)) == ({"tenant-a"}, {"a1"}, "0")
    assert foreign.reason == "the worker refused pages that hold other tenants' data"
    assert str(rig.one(Kind.STALE_READ).pages) == "0"
    assert str(rig.one(Kind.HOOK_DIVERGENCE).pages) == "3"


def test_nothing_follows_from_what_was_not_read() -> None:
    rig = Rig(pools="p d r")
    rig.left_behind("d", "a1", "0-1")
    rig.alloc("d", "b1", "0-1")
    rig.refuse("d", "b1", "0-1")
    rig.write("d", "b1", "0-1")
    rig.respond("r", "b1")
    rig.over("d", "b1")
    rig.free("d", "b1", "0-1")
    rig.alloc("d", "c1", "0-1")
    rig.over("r", "b1", "failed")
    rig.end()
    assert rig.kinds() == {"foreign-read", "stale-read"}
    request = rig.ledger.requests["b1"]
    assert (set(request.lineage), request.disclosed) == ({"tenant-b"}, False)
    rig.alloc("d", "c1", "2")
    rig.read("d", "c1", "0")
    assert rig.one(Kind.FOREIGN_READ, "c1").other_tenants == {"tenant-b"}, "what it wrote is its own"


def test_no_tokens_are_judged() -> None:
    rig = Rig()
    rig.alloc("d", "a1", "0")
    rig.write("d", "a1", "0", tokens=0)
    rig.refuse("d", "a1", "0")
    rig.end()
    assert rig.kinds() == {"hook-divergence"}


def test_a_refusal_is_no_sign_of_life() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.over("p", "a1", "rejected")
    rig.over("d", "a1", "failed")
    rig.refuse("d", "a1", "0")
    rig.end()
    assert rig.kinds() == {"hook-divergence"}, "and no zombie-request"


def test_a_page_freed_by_then_is_stale() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.over("d", "a1", "failed")
    rig.free("d", "a1", "0-1")
    rig.refuse("d", "a1", "0-1")
    assert rig.one(Kind.STALE_READ).pages == pages("0-1")


@pytest.mark.parametrize("sharing", ["isolate", "permit"])
def test_pages_shared_to_it_are_its_own_where_that_is_permitted(sharing: str) -> None:
    rig = Rig(Policy.model_validate({"prefix_sharing": sharing}))
    rig.alloc("p", "a1", "0")
    rig.write("p", "a1", "0")
    rig.cache("p", "a1", "0")
    rig.share("p", "b1", "0")
    rig.refuse("p", "b1", "0")
    rig.end()
    expected = {"hook-divergence"} if sharing == "permit" else {"foreign-share", "foreign-read"}
    assert rig.kinds() == expected


def test_its_tenants_own_prefix_is_its_own() -> None:
    rig = Rig()
    rig.alloc("p", "a1", "0")
    rig.write("p", "a1", "0")
    rig.cache("p", "a1", "0")
    rig.share("p", "a2", "0")
    rig.refuse("p", "a2", "0")
    assert rig.one(Kind.HOOK_DIVERGENCE).request == "a2"


def test_pages_beyond_the_pool_are_not_the_requests() -> None:
    rig = Rig()
    rig.refuse("d", "a1", "15-17,9000000")
    assert (rig.one(Kind.STALE_READ).pages, rig.kinds()) == (pages("15-17,9000000"), {"stale-read"})


def test_a_pool_that_was_never_announced_and_a_request_that_was_never_heard_of() -> None:
    rig = Rig(pools="")
    rig.refuse("d", "a1", "3")
    rig.end()
    finding = rig.one(Kind.STALE_READ)
    assert (finding.pool, finding.request, str(finding.pages)) == ("d", "a1", "3")
    assert rig.kinds() == {"stale-read"}


def test_a_page_of_another_pool() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.emit("d", Refuse(**who("a1"), pool="p", pages=pages("0")))
    rig.end()
    assert (rig.one(Kind.STALE_READ).pool, rig.kinds()) == ("p", {"stale-read"})


def test_the_tenant_that_the_record_names_counts() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.emit("d", Refuse(request="a1", tenant="tenant-b", pages=pages("0")))
    rig.end()
    assert rig.one(Kind.FOREIGN_READ).other_tenants == {"tenant-a"}
    assert rig.kinds() == {"foreign-read"}


def test_after_a_hole_the_contradiction_is_in_doubt() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.lose("d")
    rig.refuse("d", "a1", "0-1")
    rig.end()
    finding = rig.one(Kind.HOOK_DIVERGENCE)
    assert finding.confidence is Confidence.DEGRADED
    # A page handed out since is seen in full.
    rig.alloc("d", "a1", "2")
    rig.write("d", "a1", "2")
    rig.refuse("d", "a1", "2")
    assert (finding.confidence, str(finding.pages)) == (Confidence.FULL, "0-2")


def test_sight_lost_after_the_refusal_casts_no_doubt_on_it() -> None:
    rig = Rig()
    rig.prefilled("a1")
    rig.alloc("d", "a1", "0-1")
    rig.begin("a1", "0-1", "0-1")
    rig.ended("d", "recv", "a1", "0-1")
    rig.refuse("d", "a1", "0-1")  # the sender's end is still to come: not judged yet
    assert not rig.found
    rig.lose("d")
    rig.over("d", "a1", "failed")
    rig.end()
    assert rig.one(Kind.HOOK_DIVERGENCE).confidence is Confidence.FULL


def test_a_new_epoch_knows_nothing_of_the_pages() -> None:
    rig = Rig()
    rig.handed_over("a1")
    rig.restart("d")
    rig.refuse("d", "a1", "0")
    rig.end()
    assert rig.kinds() == {"stale-read"}


def foreign_source(rig: Rig) -> None:
    """The source page changes hands while the transfer is under way."""
    rig.prefilled("b1", "0")
    rig.alloc("d", "b1", "0")
    rig.begin("b1", "0", "0")
    rig.ended("d", "recv", "b1", "0")
    rig.refuse("d", "b1", "0")
    rig.over("p", "b1")
    rig.free("p", "b1", "0")
    rig.alloc("p", "a1", "0")
    rig.write("p", "a1", "0")
    rig.ended("p", "send", "b1", "0")


def test_a_label_that_becomes_foreign_afterwards_explains_the_refusal() -> None:
    rig = Rig(pools="p d")
    foreign_source(rig)
    rig.end()
    assert str(rig.one(Kind.FOREIGN_READ, "b1").pages) == "0"
    assert rig.kinds() == {"foreign-read", "free-in-flight"}


def test_live_it_is_judged_once_the_window_is_over() -> None:
    rig = Rig(window_ms=100)
    rig.prefilled("a1", "0")
    rig.alloc("d", "a1", "0")
    rig.begin("a1", "0", "0")
    rig.ended("d", "recv", "a1", "0")
    rig.refuse("d", "a1", "0")
    rig.advance(90)
    assert not rig.found
    rig.advance(20)
    assert rig.kinds() == {"hook-divergence"}


def test_a_request_that_is_forgotten_is_judged_before() -> None:
    rig = Rig(window_ms=None, max_ended=1)
    rig.prefilled("a1", "0")
    rig.alloc("d", "a1", "0")
    rig.begin("a1", "0", "0")
    rig.ended("d", "recv", "a1", "0")
    rig.refuse("d", "a1", "0")
    for stream in "dp":
        rig.over(stream, "a1", "failed")
        rig.free(stream, "a1", "0")
    for request in ("b1", "b2"):
        rig.over("d", request)
    assert [request.id for request in rig.retired] == ["a1", "b1"]
    assert rig.one(Kind.HOOK_DIVERGENCE).request == "a1"
    rig.end()
    rig.one(Kind.HOOK_DIVERGENCE)


def late_writer(rig: Rig) -> None:
    """What an earlier owner's transfer wrote over, tag and all."""
    rig.prefilled("a1", "0")
    rig.alloc("d", "a1", "0")
    rig.begin("a1", "0", "0")
    rig.over("d", "a1", "aborted")
    rig.free("d", "a1", "0")
    rig.prefilled("b1", "1")
    rig.alloc("d", "b1", "0")
    rig.sent("b1", "1", "0", "x2")
    rig.read("d", "b1", "0")
    rig.refuse("d", "b1", "0")
    rig.over("d", "b1", "failed")
    rig.free("d", "b1", "0")
    rig.ended("p", "send", "a1", "0")


def own_pages(rig: Rig) -> None:
    rig.handed_over("a1")
    rig.refuse("d", "a1", "0-1")
    rig.over("d", "a1", "failed")
    rig.free("d", "a1", "0-1")


def after_a_hole(rig: Rig) -> None:
    rig.handed_over("a1")
    rig.lose("p")
    rig.lose("d")
    rig.refuse("d", "a1", "0-1")
    rig.handed_over("b1", "2", "2", "x2")
    rig.refuse("d", "b1", "0-2")
    rig.refuse("p", "b1", "2")


def shared_prefix(rig: Rig) -> None:
    rig.alloc("p", "a1", "0")
    rig.write("p", "a1", "0")
    rig.cache("p", "a1", "0")
    rig.share("p", "a2", "0")
    rig.alloc("p", "a2", "1")
    rig.write("p", "a2", "1", tokens=8)
    rig.alloc("d", "a2", "0-1")
    rig.sent("a2", "0-1", "0-1")
    rig.refuse("p", "a2", "0-1")
    rig.refuse("d", "a2", "0")


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        (foreign_source, {"foreign-read", "free-in-flight"}),
        (late_writer, {"foreign-read", "foreign-write", "free-in-flight"}),
        (own_pages, {"hook-divergence"}),
        (after_a_hole, {"stream-gap", "stale-read", "foreign-read", "hook-divergence"}),
        (shared_prefix, {"hook-divergence"}),
    ],
)
def test_the_order_of_arrival_does_not_matter(what: Callable[[Rig], None], kinds: set[str]) -> None:
    rig = Rig(pools="p d")
    what(rig)
    _, in_order = judge(rig.log)
    assert {kind.value for kind, _, _ in in_order} == kinds  # type: ignore[attr-defined]
    for seed in range(60):
        _, found = judge(interleaved(rig.log, seed))
        assert found == in_order


@few
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 250))
def test_whatever_a_correct_engine_had_refused_would_contradict_its_records(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    log: list[Record] = []
    refused: dict[tuple[str | None, str], set[int]] = {}
    for record in modelled(random_choices(seed), steps).log:
        if isinstance(record, Read) and rng.random() < 0.3:
            record = Refuse(**{name: getattr(record, name) for name in Refuse.__struct_fields__})
            refused.setdefault((record.request, record.pool_id), set()).update(record.pages)
        log.append(record)
    _, found = judge(interleaved(log, seed))
    assert {(request, pool): set(pages(str(f["pages"]))) for (_, request, pool), f in found.items()} == refused
    assert {(kind, f["confidence"]) for (kind, _, _), f in found.items()} <= {(Kind.HOOK_DIVERGENCE, "full")}


def test_live_within_the_window_neither() -> None:
    """The sender's records come up to 40 ms after those of the receiver, or before."""
    rig = Rig(pools="p d")
    late_writer(rig)
    expected = None
    for seed in range(40):
        rng = random.Random(seed)
        delays = {"p": rng.randrange(40), "d": rng.randrange(40)}
        arrivals = sorted(
            ((record.time_ns // 1_000_000 + delays[record.stream], n, record) for n, record in enumerate(rig.log)),
            key=lambda arrival: arrival[:2],
        )
        live = Rig(window_ms=100, pools="")
        for at, _, record in arrivals:
            live.now_ms = at
            live.ledger.advance(at * 1_000_000)
            live.feed(record)
        live.advance(200)
        found = {(f.kind, f.request, f.pool): f.as_json() for f in live.found}
        expected = expected or found
        assert found == expected
    assert {kind.value for kind, _, _ in expected or ()} == {"foreign-read", "foreign-write", "free-in-flight"}


def test_a_refusal_that_names_many_pages_costs_what_its_runs_do() -> None:
    rig = Rig()
    rig.refuse("d", "a1", "0-15,100-16000000")
    finding = rig.one(Kind.STALE_READ)
    assert str(finding.pages) == "0-15,100-1123", "of pages that are not there, 1024 at most"
