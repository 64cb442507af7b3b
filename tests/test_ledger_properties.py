"""Properties of the ledger over runs of a modelled engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from engine_model import PAGE_TOKENS, Model, Worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_rig import both_ledgers, make_ledger

from guard.findings import Finding, Kind
from guard.ledger import LedgerSettings
from guard.policy import Policy
from guard.records import (
    Admit,
    Alloc,
    Cache,
    Free,
    Outcome,
    PageSet,
    Read,
    Record,
    Refuse,
    RequestEnd,
    Respond,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)

pytestmark = both_ledgers

EXAMPLES = int(os.environ.get("KVGUARD_EXAMPLES", "2000"))
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
few = settings(max_examples=max(EXAMPLES // 20, 50), deadline=None, suppress_health_check=list(HealthCheck))

PAGES = 12
"""Pages of each of the model's pools."""
STRICT = Policy(digests="require", scrub="require")


def judge(
    records: list[Record], policy: Policy | None = None, *, grace_s: float = 30
) -> tuple[Any, dict[tuple[object, ...], dict[str, object]]]:
    """The findings by key, once the input is over."""
    found: list[Finding] = []
    ledger = make_ledger(
        policy,
        LedgerSettings(reorder_window_ms=None, leak_grace_s=grace_s),
        lambda finding, new: found.append(finding) if new else None,
    )
    for record in records:
        ledger.feed(record)
    ledger.finish()
    return ledger, {(f.kind, f.request, f.pool): {**f.as_json(), "kills": sorted(f.kills)} for f in found}


def interleaved(records: list[Record], seed: int, in_stream: bool = False) -> list[Record]:
    """The same streams' records in another order of arrival; `in_stream`: those of one stream shuffled too."""
    rng = random.Random(seed)
    streams: dict[str, list[Record]] = {}
    for record in records:
        streams.setdefault(record.stream, []).append(record)
    if in_stream:
        for queue in streams.values():
            rng.shuffle(queue)
    # Streams run at different speeds, so that one may be far ahead of another.
    order = [name for name, queue in streams.items() for _ in queue]
    rng.shuffle(order)
    if rng.random() < 0.5:
        speed = {name: rng.random() for name in streams}
        order.sort(key=lambda name: speed[name] * rng.random())
    taken = dict.fromkeys(streams, 0)
    arrived = []
    for name in order:
        arrived.append(streams[name][taken[name]])
        taken[name] += 1
    return arrived


def modelled(choices: list[int], steps: int) -> Model:
    model = Model(iter(choices), pages=PAGES)
    model.run(steps)
    return model


CHOICES = st.lists(st.integers(0, 255), min_size=50, max_size=600)


def random_choices(seed: int, count: int = 3000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@many
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 250))
def test_a_correct_engine_never_yields_a_finding(seed: int, steps: int) -> None:
    model = modelled(random_choices(seed), steps)
    _, found = judge(interleaved(model.log, seed))
    assert found == {}


@few
@given(choices=CHOICES, steps=st.integers(1, 120), seed=st.integers(0, 1000))
def test_a_correct_engine_never_yields_a_finding_shrinkable(choices: list[int], steps: int, seed: int) -> None:
    model = modelled(choices, steps)
    _, found = judge(interleaved(model.log, seed))
    assert found == {}


@few
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 250))
def test_records_of_one_stream_may_arrive_shuffled(seed: int, steps: int) -> None:
    model = Model(iter(random_choices(seed)), pages=PAGES)
    model.restart = lambda worker: None  # type: ignore[method-assign]  # epochs do not overlap in time
    model.run(steps)
    _, found = judge(interleaved(model.log, seed, in_stream=True))
    assert found == {}


# Seeded bugs. Each takes a model in any state, does one wrong thing in it, and says what must be found.


class Bug:
    """What a buggy engine does with two fresh requests of two tenants."""

    def __init__(self, model: Model) -> None:
        self.m = model
        self.p: Worker = model.workers[0]
        self.d: Worker = model.workers[-1]
        self.count = 0

    def ids(self, tenant: str) -> dict[str, str]:
        self.count += 1
        return {"request": f"bug{self.count}", "tenant": tenant}

    def room(self, worker: Worker, count: int) -> list[int]:
        """Pages outside what the model uses, so that its own requests do not get in the way."""
        start = worker.pages
        worker.pages += count
        assert worker.pages <= PAGES + Roomy.ROOM
        return list(range(start, start + count))

    def landed(self, who: dict[str, str], src: list[int], dst: list[int], transfer: str, **more: object) -> None:
        tokens = len(src) * PAGE_TOKENS
        for worker in (self.p, self.d):
            self.m.emit(worker, Admit(**who, tokens=tokens))
        self.m.emit(self.d, Alloc(**who, pages=PageSet.of(dst)))
        self.m.emit(self.p, Alloc(**who, pages=PageSet.of(src)))
        self.m.emit(self.p, Write(**who, pages=PageSet.of(src), tokens=tokens))
        self.begin(who, src, dst, transfer)
        self.sent(who, src, transfer)
        self.received(who, dst, transfer)

    def begin(self, who: dict[str, str], src: list[int], dst: list[int], transfer: str, digests: object = None) -> None:
        self.m.emit(
            self.p,
            TransferBegin(
                **who, transfer=transfer, pages=PageSet.of(src), peer_pool=self.d.name, peer_pages=PageSet.of(dst),
                tokens=len(src) * PAGE_TOKENS, digests=digests,
            ),
        )  # fmt: skip

    def sent(self, who: dict[str, str], src: list[int], transfer: str) -> None:
        self.end(self.p, Side.SEND, who, src, transfer, TransferStatus.OK)

    def received(self, who: dict[str, str], dst: list[int], transfer: str, digests: object = None) -> None:
        self.end(self.d, Side.RECV, who, dst, transfer, TransferStatus.OK, digests)

    def end(
        self, worker: Worker, side: Side, who: dict[str, str], pages: list[int], transfer: str,
        status: TransferStatus, digests: object = None,
    ) -> None:  # fmt: skip
        self.m.emit(
            worker,
            TransferEnd(
                **who, transfer=transfer, side=side, pages=PageSet.of(pages), tokens=len(pages) * PAGE_TOKENS,
                status=status, digests=digests,
            ),
        )  # fmt: skip

    def read(self, who: dict[str, str], pages: list[int], tokens: int | None = None) -> None:
        tokens = len(pages) * PAGE_TOKENS if tokens is None else tokens
        self.m.emit(self.d, Read(**who, pages=PageSet.of(pages), tokens=tokens))

    def respond(self, who: dict[str, str]) -> None:
        self.m.emit(self.d, Respond(**who, status=200, tokens=1))

    def over(self, worker: Worker, who: dict[str, str], pages: list[int], outcome: Outcome = Outcome.FINISHED) -> None:
        self.m.emit(worker, RequestEnd(**who, outcome=outcome))
        if pages:
            self.m.emit(worker, Free(**who, pages=PageSet.of(pages)))

    def victim(self, src: list[int], dst: list[int]) -> dict[str, str]:
        """A request of tenant-v that is served as it should be and leaves its bytes behind."""
        who = self.ids("tenant-v")
        self.landed(who, src, dst, f"x-{who['request']}")
        self.read(who, dst)
        self.over(self.p, who, src)
        self.over(self.d, who, dst)
        return who


def swallowed_reject(b: Bug) -> set[tuple[Kind, str]]:
    src, dst = b.room(b.p, 3), b.room(b.d, 3)
    b.victim(src, dst)
    who = b.ids("tenant-w")
    for worker in (b.p, b.d):
        b.m.emit(worker, Admit(**who, tokens=12))
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(dst)))
    b.m.emit(b.p, Alloc(**who, pages=PageSet.of(src[:1])))
    b.m.emit(b.p, Write(**who, pages=PageSet.of(src[:1]), tokens=1))
    b.begin(who, src[:1], dst[:1], "x-stub")
    b.sent(who, src[:1], "x-stub")
    b.received(who, dst[:1], "x-stub")
    b.over(b.p, who, src[:1], Outcome.REJECTED)
    b.read(who, dst)
    b.respond(who)
    kinds = (
        Kind.FOREIGN_READ, Kind.STALE_READ, Kind.TAINTED_RESPONSE, Kind.ZOMBIE_REQUEST, Kind.WRONG_STATUS,
    )  # fmt: skip
    return {(kind, who["request"]) for kind in kinds}


def freed_under_the_writer(b: Bug) -> set[tuple[Kind, str]]:
    return late_writer(b, begun_before=True, hit_from=0)


def freed_under_another_workers_writer(b: Bug) -> set[tuple[Kind, str]]:
    return late_writer(b, begun_before=True, hit_from=1)


def freed_before_the_begin(b: Bug) -> set[tuple[Kind, str]]:
    return late_writer(b, begun_before=False, hit_from=0)


def freed_before_another_workers_begin(b: Bug) -> set[tuple[Kind, str]]:
    return late_writer(b, begun_before=False, hit_from=1)


def late_writer(b: Bug, *, begun_before: bool, hit_from: int) -> set[tuple[Kind, str]]:
    """Decode gives pages back that prefill writes into later; the next request's KV comes from either prefill."""
    writer, other = b.p, b.m.workers[hit_from]
    src, dst = b.room(writer, 2), b.room(b.d, 2)
    more = b.room(other, 2)
    late, hit = b.ids("tenant-v"), b.ids("tenant-w")
    b.m.emit(b.d, Admit(**late, tokens=8))
    b.m.emit(b.d, Alloc(**late, pages=PageSet.of(dst)))
    b.m.emit(b.p, Admit(**late, tokens=8))
    b.m.emit(b.p, Alloc(**late, pages=PageSet.of(src)))
    b.m.emit(b.p, Write(**late, pages=PageSet.of(src), tokens=8))
    if begun_before:
        b.begin(late, src, dst, "x-late")
    b.over(b.d, late, dst, Outcome.ABORTED)
    if not begun_before:
        b.begin(late, src, dst, "x-late")
    b.p = other
    b.landed(hit, more, dst, "x-hit")
    b.p = writer
    b.sent(late, src, "x-late")
    b.read(hit, dst)
    b.respond(hit)
    return {
        (Kind.TAINTED_RESPONSE, hit["request"]),
        (Kind.FREE_IN_FLIGHT, late["request"]),
        (Kind.FOREIGN_WRITE, late["request"]),
        (Kind.FOREIGN_READ, hit["request"]),
    }


def lease_expired(b: Bug) -> set[tuple[Kind, str]]:
    src, dst = b.room(b.p, 2), b.room(b.d, 2)
    who, other = b.ids("tenant-w"), b.ids("tenant-v")
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(dst)))
    b.m.emit(b.p, Alloc(**who, pages=PageSet.of(src)))
    b.m.emit(b.p, Write(**who, pages=PageSet.of(src), tokens=8))
    b.begin(who, src, dst, "x-lease")
    b.over(b.p, who, src)
    b.m.emit(b.p, Alloc(**other, pages=PageSet.of(src)))
    b.m.emit(b.p, Write(**other, pages=PageSet.of(src), tokens=8))
    b.sent(who, src, "x-lease")
    b.received(who, dst, "x-lease")
    b.read(who, dst)
    return {(Kind.FREE_IN_FLIGHT, who["request"]), (Kind.FOREIGN_READ, who["request"])}


def not_yet_visible(b: Bug) -> set[tuple[Kind, str]]:
    src, dst = b.room(b.p, 2), b.room(b.d, 2)
    b.victim(src, dst)
    who = b.ids("tenant-w")
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(dst)))
    b.m.emit(b.p, Alloc(**who, pages=PageSet.of(src)))
    b.m.emit(b.p, Write(**who, pages=PageSet.of(src), tokens=8))
    b.begin(who, src, dst, "x-vis", ("aa", "bb"))
    b.sent(who, src, "x-vis")
    b.received(who, dst, "x-vis", ("aa", "cc"))
    b.read(who, dst)
    return {(Kind.DIGEST_MISMATCH, who["request"]), (Kind.FOREIGN_READ, who["request"])}


def half_sent(b: Bug) -> set[tuple[Kind, str]]:
    src, dst = b.room(b.p, 2), b.room(b.d, 2)
    who = b.ids("tenant-w")
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(dst)))
    b.m.emit(b.p, Alloc(**who, pages=PageSet.of(src)))
    b.m.emit(b.p, Write(**who, pages=PageSet.of(src), tokens=8))
    b.begin(who, src, dst, "x-half")
    b.sent(who, src, "x-half")
    b.received(who, dst[:1], "x-half")
    b.read(who, dst)
    return {(Kind.SHORT_TRANSFER, who["request"]), (Kind.STALE_READ, who["request"])}


def handed_out_twice(b: Bug) -> set[tuple[Kind, str]]:
    (page,) = b.room(b.d, 1)
    first, second, third = b.ids("tenant-v"), b.ids("tenant-w"), b.ids("tenant-x")
    b.m.emit(b.d, Alloc(**first, pages=PageSet.of([page])))
    b.m.emit(b.d, Write(**first, pages=PageSet.of([page]), tokens=4))
    b.over(b.d, first, [page])
    b.m.emit(b.d, Free(**first, pages=PageSet.of([page])))
    b.m.emit(b.d, Alloc(**second, pages=PageSet.of([page])))
    b.m.emit(b.d, Alloc(**third, pages=PageSet.of([page])))
    return {(Kind.DOUBLE_FREE, first["request"]), (Kind.DOUBLE_OWNER, third["request"])}


def shared_across(b: Bug) -> set[tuple[Kind, str]]:
    (page,) = b.room(b.d, 1)
    first, second = b.ids("tenant-v"), b.ids("tenant-w")
    b.m.emit(b.d, Alloc(**first, pages=PageSet.of([page])))
    b.m.emit(b.d, Write(**first, pages=PageSet.of([page]), tokens=4))
    b.m.emit(b.d, RequestEnd(**first, outcome=Outcome.FINISHED))
    b.m.emit(b.d, Cache(**first, pages=PageSet.of([page])))
    b.m.emit(b.d, Share(**second, pages=PageSet.of([page]), share_from=first["request"]))
    return {(Kind.FOREIGN_SHARE, second["request"])}


def wrong_page(b: Bug) -> set[tuple[Kind, str]]:
    mine, theirs = b.room(b.d, 1), b.room(b.d, 1)
    first, second = b.ids("tenant-v"), b.ids("tenant-w")
    b.m.emit(b.d, Alloc(**first, pages=PageSet.of(theirs)))
    b.m.emit(b.d, Write(**first, pages=PageSet.of(theirs), tokens=4))
    b.m.emit(b.d, Alloc(**second, pages=PageSet.of(mine)))
    b.m.emit(b.d, Write(**second, pages=PageSet.of(theirs), tokens=4))
    b.read(first, theirs)
    return {(Kind.FOREIGN_WRITE, second["request"]), (Kind.FOREIGN_READ, first["request"])}


def after_the_end(b: Bug) -> set[tuple[Kind, str]]:
    pages = b.room(b.d, 1)
    who = b.ids("tenant-w")
    b.m.emit(b.d, Admit(**who, tokens=4))
    b.m.emit(b.d, RequestEnd(**who, outcome=Outcome.ABORTED))
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(pages)))
    return {(Kind.ZOMBIE_REQUEST, who["request"])}


def too_large(b: Bug) -> set[tuple[Kind, str]]:
    pages = b.room(b.p, 1)
    who = b.ids("tenant-w")
    b.m.emit(b.p, Admit(**who, tokens=(PAGES + Roomy.ROOM) * PAGE_TOKENS + 1))
    b.m.emit(b.p, Alloc(**who, pages=PageSet.of(pages)))
    b.m.emit(b.p, Write(**who, pages=PageSet.of(pages), tokens=4))
    b.m.emit(b.p, RequestEnd(**who, outcome=Outcome.FINISHED))
    return {(Kind.OVER_CAPACITY, who["request"])}


def never_given_back(b: Bug) -> set[tuple[Kind, str]]:
    pages = b.room(b.d, 1)
    who = b.ids("tenant-w")
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(pages)))
    b.m.emit(b.d, RequestEnd(**who, outcome=Outcome.ABORTED))
    b.m.time_ms += 31_000
    b.m.emit(b.d, Admit(**b.ids("tenant-x"), tokens=1))
    return {(Kind.PAGE_LEAK, who["request"])}


def unscrubbed(b: Bug) -> set[tuple[Kind, str]]:
    src, dst = b.room(b.p, 1), b.room(b.d, 1)
    b.victim(src, dst)
    who = b.ids("tenant-w")
    b.m.emit(b.d, Alloc(**who, pages=PageSet.of(dst)))
    return {(Kind.UNSCRUBBED_REUSE, who["request"])}


def unverified(b: Bug) -> set[tuple[Kind, str]]:
    src, dst = b.room(b.p, 1), b.room(b.d, 1)
    who = b.ids("tenant-w")
    b.landed(who, src, dst, "x-unverified")
    return {(Kind.UNVERIFIED_TRANSFER, who["request"])}


def tag_lost(b: Bug) -> set[tuple[Kind, str]]:
    """The check of tags refuses a page that was handed over as it should be."""
    src, dst = b.room(b.p, 2), b.room(b.d, 2)
    who = b.ids("tenant-w")
    b.landed(who, src, dst, "x-tag")
    b.read(who, dst)
    b.m.emit(b.d, Refuse(**who, pages=PageSet.of(dst[1:])))
    b.over(b.d, who, dst, Outcome.FAILED)
    return {(Kind.HOOK_DIVERGENCE, who["request"])}


def refused_row(b: Bug) -> set[tuple[Kind, str]]:
    """A block table has another tenant's page in it, and the check of tags refuses it."""
    src, dst = b.room(b.p, 2), b.room(b.d, 4)
    b.victim(src, dst[:2])
    who = b.ids("tenant-w")
    b.landed(who, src, dst[2:], "x-row")
    b.m.emit(b.d, Refuse(**who, pages=PageSet.of(dst[1:2])))
    b.over(b.d, who, dst[2:], Outcome.FAILED)
    return {(Kind.FOREIGN_READ, who["request"]), (Kind.STALE_READ, who["request"])}


def lost(b: Bug) -> set[tuple[Kind, str]]:
    who = b.ids("tenant-w")
    b.m.emit(b.d, Admit(**who, tokens=1))
    b.m.log.pop()
    b.m.emit(b.d, RequestEnd(**who, outcome=Outcome.ABORTED))
    return {(Kind.STREAM_GAP, None)}  # type: ignore[arg-type]


BUGS: list[Callable[[Bug], set[tuple[Kind, str]]]] = [
    swallowed_reject, freed_under_the_writer, freed_under_another_workers_writer, freed_before_the_begin,
    freed_before_another_workers_begin, lease_expired, not_yet_visible, half_sent, handed_out_twice,
    shared_across, wrong_page, after_the_end, too_large, never_given_back, unscrubbed, unverified, tag_lost,
    refused_row, lost,
]  # fmt: skip


class Roomy(Model):
    """A model whose pools are announced larger than what its requests use, so that a bug has pages of its own."""

    ROOM = 8

    def start(self, worker: Worker) -> None:
        super().start(worker)
        pool = self.log[-1]
        self.log[-1] = msgspec.structs.replace(pool, pages=worker.pages + self.ROOM)


def buggy(
    seed: int, before: int, after: int, bug: Callable[[Bug], set[tuple[Kind, str]]]
) -> tuple[list[Record], set[tuple[Kind, str]]]:
    model = Roomy(iter(random_choices(seed)), pages=PAGES)
    model.run(before)
    sizes = [w.pages for w in model.workers]
    expected = bug(Bug(model))
    for worker, size in zip(model.workers, sizes, strict=True):
        worker.pages = size
    model.run(after)
    return model.log, expected


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@few
@given(seed=st.integers(0, 2**32), before=st.integers(0, 120), after=st.integers(0, 120))
def test_a_seeded_bug_is_always_found(
    bug: Callable[[Bug], set[tuple[Kind, str]]], seed: int, before: int, after: int
) -> None:
    log, expected = buggy(seed, before, after, bug)
    _, found = judge(interleaved(log, seed), STRICT)
    assert expected <= {(kind, request) for kind, request, _ in found}


@many
@given(
    bug=st.sampled_from(BUGS), seed=st.integers(0, 2**32), before=st.integers(0, 100), after=st.integers(0, 100),
    order=st.integers(0, 2**32),
)  # fmt: skip
def test_the_order_of_arrival_across_streams_never_changes_a_finding(
    bug: Callable[[Bug], set[tuple[Kind, str]]], seed: int, before: int, after: int, order: int
) -> None:
    log, _ = buggy(seed, before, after, bug)
    ledger, in_order = judge(log, STRICT)
    other, found = judge(interleaved(log, order), STRICT)
    assert found == in_order
    assert {r: (q.verdict, sorted(q.lineage), q.disclosed) for r, q in other.requests.items()} == {
        r: (q.verdict, sorted(q.lineage), q.disclosed) for r, q in ledger.requests.items()
    }
