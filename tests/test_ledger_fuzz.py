"""Records that make no sense: the ledger judges them all the same, and alike in every order."""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from typing import Any, ClassVar

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_rig import both_ledgers, make_ledger
from test_ledger_properties import interleaved, judge

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
    Pool,
    Read,
    Record,
    Refuse,
    RequestEnd,
    Respond,
    Role,
    Scope,
    Scrub,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)

pytestmark = both_ledgers


class Garbage:
    """Streams of valid records that make no sense: few requests, few pages, every mixture of them.

    With `sane` each stream keeps to its own pool, transfer ids are used once and requests keep their tenants, as
    the convention has it: then there is one right verdict, however the streams interleave.
    """

    ROLES: ClassVar = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "u0": Role.UNIFIED, "r0": Role.ROUTER}

    def __init__(self, rng: random.Random, sane: bool) -> None:
        self.rng, self.sane = rng, sane
        self.places = {stream: [1, 0] for stream in self.ROLES}
        self.begun: Counter[str] = Counter()
        self.ids = ["never"]
        self.had: defaultdict[tuple[str, str | None], set[int]] = defaultdict(set)
        self.time_ns = 0
        self.log: list[Record] = []

    def records(self, count: int) -> list[Record]:
        for stream, role in self.ROLES.items():
            if self.rng.random() < 0.9:
                self.emit(stream, Pool(pages=4, page_tokens=4, page_bytes=1, role=role, context_limit=16))
        for _ in range(count):
            stream = self.rng.choice(list(self.ROLES))
            self.disturb(self.places[stream])
            self.emit(stream, self.record(stream))
        return self.log

    def disturb(self, place: list[int]) -> None:
        if self.rng.random() < 0.02:
            place[:] = [place[0] + 1, 0]
        if self.rng.random() < 0.03:
            place[1] += 1
        if not self.sane and self.rng.random() < 0.05:
            place[self.rng.randrange(2)] = self.rng.randrange(4)

    def emit(self, stream: str, record: Record) -> None:
        self.time_ns += self.rng.choice([1, 1, 1, 40_000]) * 1_000_000
        if isinstance(record, Alloc):
            self.had[stream, record.request].update(record.pages)
        epoch, seq = self.places[stream]
        self.places[stream][1] += 1
        self.log.append(msgspec.structs.replace(record, stream=stream, epoch=epoch, seq=seq, time_ns=self.time_ns))

    def pages(self) -> PageSet:
        return PageSet.of(self.rng.sample(range(5), self.rng.randint(0, 3)))

    def who(self) -> dict[str, str]:
        number = self.rng.randrange(4)
        if self.sane:
            return {"request": f"r{number}", "tenant": f"t{number % 3}"}
        pool = self.rng.choice(["", "", *self.ROLES, "elsewhere"])
        return {"request": f"r{number}", "tenant": f"t{self.rng.randrange(3)}", "pool": pool}

    def digests(self, pages: PageSet) -> tuple[str, ...] | None:
        return self.rng.choice([None, tuple(self.rng.choice(["aa", "bb"]) for _ in pages)])

    def begin(self, stream: str) -> Record:
        self.begun[stream] += 1
        name = f"{stream}.{self.begun[stream]}" if self.sane else self.rng.choice("xy")
        self.ids.append(name + self.rng.choice(["", "", "/0"]))
        who, receiver, src = self.who(), self.rng.choice(list(self.ROLES)), self.pages()
        to = list(range(5))
        if self.sane:  # into pages that the request has or had: a stray writer is ordered by nothing
            to = sorted(self.had[receiver, who["request"]])
            src = PageSet.of(list(src)[: len(to)])
        return TransferBegin(
            **who, transfer=self.ids[-1], pages=src, peer_pool=receiver,
            peer_pages=PageSet.of(self.rng.sample(to, len(src))), tokens=self.rng.randint(0, 12),
            digests=self.digests(src),
        )  # fmt: skip

    def transfer_end(self) -> Record:
        pages, name = self.pages(), self.rng.choice(self.ids)
        return TransferEnd(
            **self.who(), transfer=self.rng.choice([name, name, name.removesuffix("/0")]), pages=pages,
            side=self.rng.choice(list(Side)), tokens=self.rng.randint(0, 12), digests=self.digests(pages),
            status=self.rng.choice([TransferStatus.OK, *TransferStatus]),
        )  # fmt: skip

    def refuse(self, stream: str) -> Record:
        """Mostly of what was written on the stream lately."""
        written = [r for r in self.log[-20:] if isinstance(r, Write | TransferEnd) and r.stream == stream]
        if not written or self.rng.random() < 0.3:
            return Refuse(**self.who(), pages=self.pages())
        last = self.rng.choice(written)
        return Refuse(request=last.request, tenant=last.tenant, pool=last.pool, pages=last.pages)

    def record(self, stream: str) -> Record:
        make: list[Any] = [
            lambda: Admit(**self.who(), tokens=self.rng.randint(0, 30)),
            lambda: Alloc(**self.who(), pages=self.pages()),
            lambda: Alloc(**self.who(), pages=self.pages()),
            lambda: Share(**self.who(), pages=self.pages(), tokens=self.rng.choice([None, 3])),
            lambda: Write(
                **self.who(), pages=self.pages(), tokens=self.rng.randint(0, 16),
                scope=self.rng.choice([Scope.TENANT, Scope.TENANT, *Scope]),
            ),
            lambda: self.begin(stream),
            lambda: self.begin(stream),
            self.transfer_end,
            self.transfer_end,
            lambda: Read(**self.who(), pages=self.pages(), tokens=self.rng.randint(0, 16)),
            lambda: Read(**self.who(), pages=self.pages(), tokens=self.rng.randint(0, 16)),
            lambda: self.refuse(stream),
            lambda: Free(**self.who(), pages=self.pages()),
            lambda: Cache(**self.who(), pages=self.pages()),
            lambda: Scrub(pages=self.pages()),
            lambda: RequestEnd(**self.who(), outcome=self.rng.choice(list(Outcome))),
            lambda: Respond(**self.who(), status=self.rng.choice([200, 503]), tokens=1),
        ]  # fmt: skip
        record: Record = self.rng.choice(make)()
        return record


EXAMPLES = int(os.environ.get("KVGUARD_EXAMPLES", "1000"))
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(seed=st.integers(0, 2**32), count=st.integers(1, 80))
def test_no_stream_of_valid_records_breaks_the_ledger(seed: int, count: int) -> None:
    rng = random.Random(seed)
    records = Garbage(rng, sane=False).records(count)
    if rng.random() < 0.5:
        rng.shuffle(records)
    live = rng.random() < 0.6
    found: list[Finding] = []
    ledger = make_ledger(
        Policy(
            digests="require", scrub="require", prefix_sharing=rng.choice(["isolate", "permit"]),
            on_degraded=rng.choice(["alert", "act"]),
        ),
        LedgerSettings(
            reorder_window_ms=rng.choice([0, 5, 200]) if live else None, max_held=rng.choice([1, 3, 100]),
            max_ended=rng.choice([1, 2, 100]), restart_records=rng.choice([1, 3, 256]),
            max_pool_pages=rng.choice([2, 100]), max_streams=rng.choice([2, 100]), leak_grace_s=rng.choice([0, 30]),
        ),
        lambda finding, new: found.append(finding) if new else None,
    )  # fmt: skip
    now_ns = 0
    for record in records:
        now_ns += rng.choice([0, 1, 300]) * 1_000_000
        ledger.feed(record, now_ns)
        if live and rng.random() < 0.3:
            ledger.advance(now_ns)
    for _ in range(3):
        now_ns += 10**12
        ledger.advance(now_ns if live else 0)
    ledger.finish()
    assert ledger.sizes["records_held"] == 0
    for finding in found:
        finding.as_json()
    for request in ledger.requests.values():
        assert request.verdict in ("allow", "kill")
        assert request.tenant in request.lineage


@fuzz
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
def test_garbage_is_judged_alike_in_every_order(seed: int, count: int) -> None:
    records = Garbage(random.Random(seed), sane=True).records(count)
    policy = Policy(digests="require", scrub="require")
    _, in_order = judge(records, policy)
    _, found = judge(interleaved(records, seed), policy)
    # A page that its request took again after its end, or whose begin comes after a gap was given up: whom a late
    # writer hits, and how sure that is, is then known only from its begin on.
    stray = {Kind.FOREIGN_WRITE, Kind.FREE_IN_FLIGHT}
    assert {k for k in found if k[0] not in stray} == {k for k in in_order if k[0] not in stray}
