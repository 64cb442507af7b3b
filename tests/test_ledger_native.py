"""The native ledger says what the Python one says, to the field, whatever is fed to both."""

from __future__ import annotations

import os
import random
from typing import ClassVar

import msgspec
import pytest
from engine_model import Model
from engine_runs import CORRECT, recorded
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ledger_rig import Rig, who
from ledger_twins import Op, assert_alike, feeds
from restored_from import restored_from
from test_cases import NAMES, arguments_of, interleaved, records_of
from test_ledger_fuzz import Garbage
from test_ledger_properties import BUGS, buggy, judge, random_choices
from test_ledger_properties import interleaved as interleaved_at_speeds

from guard.config import load
from guard.demo.scenarios import SCENARIOS, Scenario
from guard.findings import Action, Kind
from guard.ledger import Ledger, LedgerSettings
from guard.policy import Policy
from guard.records import (
    PageSet,
    Pool,
    Read,
    Record,
    Refuse,
    Role,
    Share,
    TransferBegin,
)

EXAMPLES = int(os.environ.get("KVGUARD_EXAMPLES", "0"))
"""Examples of each test; 0: what follows, 10,000 and more in all."""


def many(examples: int) -> settings:
    # What fails is made smaller record by record, which says more than a smaller seed.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(
        max_examples=EXAMPLES or examples, deadline=None, suppress_health_check=list(HealthCheck), phases=phases
    )


SEEDS = st.integers(0, 2**40)


def some_policy(rng: random.Random) -> Policy:
    actions = {kind: rng.choice(list(Action)) for kind in Kind if rng.random() < 0.2} if rng.random() < 0.3 else {}
    return Policy(
        digests=rng.choice(["optional", "require"]), scrub=rng.choice(["optional", "require"]),
        prefix_sharing=rng.choice(["isolate", "isolate", "permit"]), on_degraded=rng.choice(["alert", "act"]),
        actions=actions,
    )  # fmt: skip


def some_settings(rng: random.Random, *, tight: bool, live: bool) -> LedgerSettings:
    """The defaults, or (tight) limits so small that they bite, each of them sometimes."""
    values: dict[str, float | None] = {"reorder_window_ms": rng.choice([0, 3, 50, 200]) if live else None}
    choices: dict[str, list[float]] = {
        "leak_grace_s": [0, 0.02, 30], "max_held": [1, 3, 100], "restart_records": [1, 3, 256],
        "max_ended": [1, 2, 100], "max_streams": [1, 2, 4], "max_pool_pages": [2, 9, 600], "max_pools": [1, 2, 3, 5],
        "max_pages": [1, 512, 1024, 2048], "max_requests": [1, 2, 3], "max_request_streams": [1, 2],
        "max_transfers": [1, 2, 3],
    }  # fmt: skip
    for name, values_of in choices.items():
        if rng.random() < (0.4 if tight else 0.15 if name in ("leak_grace_s", "restart_records", "max_ended") else 0):
            values[name] = rng.choice(values_of)
    return LedgerSettings.model_validate(values)


def refused_instead(read: Read) -> Refuse:
    """The worker's check of tags refuses what it was about to read."""
    return Refuse(**{name: getattr(read, name) for name in Refuse.__struct_fields__})


def disturbed(records: list[Record], rng: random.Random) -> list[Record]:
    """The order of arrival, with some records lost, repeated, changed, or only a place."""
    arrived: list[Record] = []
    for record in records:
        luck = rng.random()
        if luck < 0.01:
            continue
        if luck < 0.02:
            record = Record(stream=record.stream, epoch=record.epoch, seq=record.seq, time_ns=record.time_ns)
        elif isinstance(record, Read) and luck < 0.15:
            record = refused_instead(record)
        arrived.append(record)
        if luck > 0.98:
            again = rng.choice(arrived[-20:])
            if rng.random() < 0.2:
                again = msgspec.structs.replace(again, time_ns=again.time_ns + 1)
            arrived.append(again)
    if rng.random() < 0.3:  # neighbours change places
        for i in range(len(arrived) - 1):
            if rng.random() < 0.1:
                arrived[i], arrived[i + 1] = arrived[i + 1], arrived[i]
    return arrived


def as_ops(records: list[Record], rng: random.Random, *, live: bool) -> list[Op]:
    if not live:
        return feeds(records)
    ops: list[Op] = []
    now_ns = 0
    for record in records:
        now_ns += rng.choice([0, 0, 1, 20, 300]) * 1_000_000
        ops.append(Op(record, now_ns))
        if rng.random() < 0.2:
            ops.append(Op(None, now_ns))
    for _ in range(rng.randrange(3)):
        now_ns += 10**11
        ops.append(Op(None, now_ns))
    return ops


def check(records: list[Record], rng: random.Random, *, tight: bool) -> None:
    live = rng.random() < 0.5
    assert_alike(
        some_policy(rng), some_settings(rng, tight=tight, live=live), as_ops(records, rng, live=live),
        rng.choice([1, 1, 2, 7, 1000]),
    )  # fmt: skip


@many(2000)
@given(seed=SEEDS, steps=st.integers(1, 200))
def test_a_correct_engine(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    model = Model(iter(random_choices(seed)), prefills=rng.choice([1, 2]), decodes=rng.choice([1, 2]), pages=12)
    model.run(steps)
    records = interleaved_at_speeds(model.log, seed, in_stream=rng.random() < 0.2)
    check(disturbed(records, rng) if rng.random() < 0.6 else records, rng, tight=rng.random() < 0.3)


@many(2000)
@given(seed=SEEDS, bug=st.sampled_from(BUGS), before=st.integers(0, 80), after=st.integers(0, 60))
def test_an_engine_with_a_bug(seed: int, bug: object, before: int, after: int) -> None:
    rng = random.Random(seed)
    log, _ = buggy(seed, before, after, bug)  # type: ignore[arg-type]
    records = interleaved_at_speeds(log, seed)
    check(disturbed(records, rng) if rng.random() < 0.4 else records, rng, tight=rng.random() < 0.2)


@many(2500)
@given(seed=SEEDS, count=st.integers(1, 120), sane=st.booleans())
def test_garbage(seed: int, count: int, sane: bool) -> None:
    rng = random.Random(seed)
    records = Garbage(rng, sane=sane).records(count)
    if rng.random() < 0.5:
        records = interleaved_at_speeds(records, seed, in_stream=rng.random() < 0.3)
    if rng.random() < 0.3:
        records = disturbed(records, rng)
    check(records, rng, tight=rng.random() < 0.4)


class Crowd(Garbage):
    """Garbage of more streams, pools, requests and tenants than the limits allow, and pages of many blocks."""

    ROLES: ClassVar = {f"{role.value[0]}{n}": role for role in Role for n in range(3)}
    PAGES: ClassVar = [0, 1, 2, 3, 511, 512, 600, 1023, 1024, 1500, 5000, 1 << 22, (1 << 40) - 9]

    def pages(self) -> PageSet:
        runs = []
        for _ in range(self.rng.randint(0, 3)):
            start = self.rng.choice(self.PAGES)
            runs.append((start, start + self.rng.choice([1, 1, 2, 4])))
        pages = PageSet(runs)
        return pages.sorted() if self.rng.random() < 0.7 else pages

    def who(self) -> dict[str, str]:
        number = self.rng.randrange(self.rng.choice([3, 12]))
        pool = self.rng.choice(["", "", "", *self.ROLES, *(f"pool{n}" for n in range(4))])
        return {"request": f"r{number}é", "tenant": self.rng.choice([f"t{number % 5}", "t0", "public"]), "pool": pool}

    def begin(self, stream: str) -> Record:
        src = self.pages()
        dst = PageSet.of(self.rng.choice([n, n, n ^ 512]) for n in src)
        self.ids.append(f"x{self.rng.randrange(6)}" + self.rng.choice(["", "", "/0", "/1", "/x", "/٣"]))
        return TransferBegin(
            **self.who(), transfer=self.ids[-1], pages=src, peer_pool=self.rng.choice([*self.ROLES, "pool1", "pool5"]),
            peer_pages=dst, tokens=self.rng.randint(0, 12), digests=self.digests(src),
        )  # fmt: skip

    def record(self, stream: str) -> Record:
        if self.rng.random() < 0.06:
            return Pool(
                pool=self.rng.choice(["", "", "pool0", "pool1"]), role=self.ROLES[stream], page_bytes=1,
                pages=self.rng.choice([0, 1, 4, 600, 5000, 1 << 40]), page_tokens=self.rng.choice([0, 1, 4, 1 << 62]),
                context_limit=self.rng.choice([0, 16, 1 << 62]),
            )  # fmt: skip
        record = super().record(stream)
        if isinstance(record, (Read, Share)) and self.rng.random() < 0.05:
            return msgspec.structs.replace(record, tokens=(1 << 63) - 1)
        return record


class Dense(Garbage):
    """Garbage of so few streams, pages and requests that most of it concerns the same ones, and little is lost."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, sane=False)
        self.ROLES = dict(list(super().ROLES.items())[rng.randrange(3) :][: rng.randint(1, 3)])  # type: ignore[misc]
        self.places = {stream: [1, 0] for stream in self.ROLES}
        self.page_count, self.request_count = rng.randint(1, 5), rng.choice([2, 3, 8])
        self.loss, self.transfers = rng.choice([0, 0, 0.03]), rng.choice([2, 10, 1000])
        self.moving, self.ordered = rng.random(), rng.random()

    def disturb(self, place: list[int]) -> None:
        if self.rng.random() < self.loss:
            super().disturb(place)

    def pages(self) -> PageSet:
        count = self.rng.randint(1, self.page_count)
        return PageSet.of(self.rng.sample(range(self.page_count), count))

    def who(self) -> dict[str, str]:
        number = self.rng.randrange(self.request_count)
        return {"request": f"r{number}", "tenant": f"t{number % 4}"}

    def begin(self, stream: str) -> Record:
        record = super().begin(stream)
        assert isinstance(record, TransferBegin)
        self.ids[-1] = f"y{self.rng.randrange(self.transfers)}" + self.rng.choice(["", "", "/0", "/1"])
        return msgspec.structs.replace(record, transfer=self.ids[-1])

    def record(self, stream: str) -> Record:
        luck = self.rng.random()
        if luck < self.moving * 0.5:
            return self.begin(stream) if luck < self.moving * 0.3 else self.transfer_end()
        return super().record(stream)


@many(2000)
@given(seed=SEEDS, count=st.integers(1, 250))
def test_all_about_the_same_pages(seed: int, count: int) -> None:
    rng = random.Random(seed)
    records = Dense(rng).records(count)
    if rng.random() < 0.4:
        records = interleaved_at_speeds(records, seed)
    check(records, rng, tight=rng.random() < 0.2)


@many(2000)
@given(seed=SEEDS, count=st.integers(1, 120))
def test_a_crowd_beyond_the_limits(seed: int, count: int) -> None:
    rng = random.Random(seed)
    records = Crowd(rng, sane=False).records(count)
    check(disturbed(records, rng) if rng.random() < 0.2 else records, rng, tight=rng.random() < 0.8)


@many(120)
@given(seed=SEEDS, count=st.integers(500, 2000), kind=st.sampled_from(["garbage", "dense", "crowd"]))
def test_long_runs(seed: int, count: int, kind: str) -> None:
    rng = random.Random(seed)
    records = some_garbage(kind, rng).records(count)
    check(records, rng, tight=rng.random() < 0.2)


def some_garbage(kind: str, rng: random.Random) -> Garbage:
    return Dense(rng) if kind == "dense" else Crowd(rng, False) if kind == "crowd" else Garbage(rng, sane=True)


@many(1500)
@given(seed=SEEDS, count=st.integers(1, 150), kind=st.sampled_from(["model", "garbage", "dense", "crowd"]))
def test_after_a_restart_of_the_guard(seed: int, count: int, kind: str) -> None:
    """What was journalled may be behind, and records come again or were missed meanwhile."""
    rng = random.Random(seed)
    if kind == "model":
        records = buggy(seed, count // 2, count // 2, rng.choice(BUGS))[0]
    else:
        records = some_garbage(kind, rng).records(count)
    live = rng.random() < 0.6
    policy, limits = some_policy(rng), some_settings(rng, tight=rng.random() < 0.1, live=live)
    cut = rng.randrange(len(records) + 1)
    ledger = Ledger(policy, limits)
    for number, record in enumerate(records[: max(0, cut - rng.choice([0, 0, 3, 20]))]):
        ledger.feed(record, number)
    before = restored_from(ledger)
    records = records[max(0, cut + rng.choice([0, 0, -5, 2])) :]
    if rng.random() < 0.5:
        records = interleaved_at_speeds(records, seed)
    assert_alike(policy, limits, as_ops(records, rng, live=live), rng.choice([1, 4]), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_case(name: str) -> None:
    config = load(environ={}, settings=[word for word in arguments_of(name) if word != "--set"])
    replay = config.ledger.model_copy(update={"reorder_window_ms": None})
    records = records_of(name)
    assert_alike(config.policy, replay, feeds(records))
    for seed in range(20):
        rng = random.Random(seed)
        assert_alike(config.policy, replay, feeds(interleaved(records, seed)), batch=3)
        assert_alike(config.policy, config.ledger, as_ops(interleaved(records, seed), rng, live=True))
        check(disturbed(records, rng), rng, tight=seed % 2 == 0)


@pytest.mark.parametrize("name", [*(scenario.fault for scenario in SCENARIOS), CORRECT])
def test_a_recorded_run_of_an_engine(name: str) -> None:
    records = recorded(name)
    replay = LedgerSettings(reorder_window_ms=None, leak_grace_s=1)
    assert_alike(None, replay, feeds(records))
    for seed in range(8):
        rng = random.Random(seed)
        arrived = interleaved_at_speeds(records, seed, in_stream=seed % 4 == 3)
        assert_alike(None, replay, feeds(arrived), batch=1000)
        assert_alike(Policy(digests="require", scrub="require"), LedgerSettings(), as_ops(arrived, rng, live=True))
        check(disturbed(arrived, rng), rng, tight=seed % 2 == 0)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.fault)
def test_the_recorded_run_shows_the_fault(scenario: Scenario) -> None:
    _, found = judge(recorded(scenario.fault), grace_s=1)
    assert scenario.kinds & {kind for kind, _, _ in found}


def test_the_recorded_run_without_a_fault_shows_none() -> None:
    assert judge(recorded(CORRECT), grace_s=1)[1] == {}


def test_many_reads_of_one_request() -> None:
    rig = Rig(pools="d u")
    rig.alloc("d", "a1", "0-15")
    for number in range(2500):
        record = Read(**who("a1"), pages=PageSet.of([number * 7 % 20]), tokens=1, pool="" if number % 300 else "u")
        rig.emit("d", record)
        rig.respond("d", "a1")
        rig.free("d", "a1", str(number % 16))
        rig.alloc("d", "a1", str(number % 16))
    rig.begin("a1", "0", "7")
    rig.over("p", "a1", "failed")
    assert_alike(None, LedgerSettings(reorder_window_ms=None), feeds(rig.log), batch=100)
