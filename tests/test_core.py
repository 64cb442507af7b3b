"""The native core loop, its inbox and its memory of recent records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guard_process import until

from guard.act.board import BoardReader, Verdict
from guard.findings import Action, Kind
from guard.ledger import LedgerSettings
from guard.native._core import BoardWriter, Core, Happened, Inbox, Recent, RingWriter, Rows
from guard.native.ledger import core_policy, core_settings, finding_of
from guard.policy import Policy
from guard.records import Alloc, Free, Outcome, PageSet, Pool, Read, Record, RequestEnd, Role, Write


def rows_of(*records: Record) -> Rows:
    rows = Rows()
    for record in records:
        rows.append(record)
    return rows


def read(seq: int, request: str = "r1", pages: str = "0-3") -> Read:
    return Read(
        stream="s", epoch=1, seq=seq, time_ns=1 + seq, request=request, tenant="t", pages=PageSet.parse(pages), tokens=1
    )


def pool(seq: int, stream: str = "s") -> Pool:
    return Pool(
        stream=stream, epoch=1, seq=seq, time_ns=1, pages=8, page_tokens=1, page_bytes=1, role=Role.DECODE,
        context_limit=1,
    )  # fmt: skip


# The inbox


def test_the_inbox_is_bounded_by_records() -> None:
    inbox = Inbox(3)
    first = rows_of(read(0), read(1))
    assert inbox.put(first, 1)
    assert len(first) == 0, "they are the inbox's now"
    second = rows_of(read(2), read(3))
    assert not inbox.put(second, 1)
    assert len(second) == 2, "nothing was taken of them"
    assert not inbox.full()
    assert inbox.put(rows_of(read(2)), 1)
    assert inbox.full()
    assert (inbox.depth, inbox.limit_records) == (3, 3)


def test_the_inbox_is_bounded_by_bytes() -> None:
    one = len(rows_of(read(0)).tobytes())
    inbox = Inbox(1000, 2 * one)
    assert inbox.put(rows_of(read(0)), 1)
    assert not inbox.put(rows_of(read(1), read(2)), 1)
    assert inbox.put(rows_of(read(1)), 1)
    assert inbox.full()
    assert (inbox.bytes, inbox.limit_bytes) == (2 * one, 2 * one)


def test_what_is_larger_than_the_inbox_goes_in_alone() -> None:
    inbox = Inbox(1, 1)
    assert inbox.put(rows_of(*map(read, range(5))), 1)
    assert not inbox.put(rows_of(read(5)), 1)


def test_a_closed_inbox_takes_nothing() -> None:
    inbox = Inbox(3)
    inbox.close()
    assert not inbox.put(rows_of(read(0)), 1)
    assert not inbox.put(Rows(), 1)


# Recent records


def test_the_newest_records_of_a_request_are_kept() -> None:
    recent = Recent(1 << 20)
    for seq in range(100):
        recent.add(rows_of(read(seq), read(seq, "r2")), 1000 + seq)
    recent.add(rows_of(pool(0), pool(0, "other")), 5)
    found = recent.evidence(["r1", "unknown"], [])
    assert [(record.seq, received_ns) for record, received_ns in found] == [(n, 1000 + n) for n in range(99, 67, -1)]
    assert {record.request for record, _ in found} == {"r1"}
    assert found[0][0] == read(99)
    assert recent.evidence([], ["s", "unknown"]) == [(pool(0), 5)], "a stream's records that name no request"


def test_the_oldest_make_room() -> None:
    recent = Recent(64 << 10)
    count = 40_000  # enough that ids share chains
    for n in range(count):
        recent.add(rows_of(read(n, f"r{n}")), n)
    kept = [n for n in range(count) if recent.evidence([f"r{n}"], [])]
    assert kept == list(range(kept[0], count))
    assert 100 < len(kept) < (64 << 10) // len(rows_of(read(0)).tobytes())


def test_a_burst_of_one_request_leaves_the_others_theirs() -> None:
    recent = Recent(64 << 10)
    for n in range(100):
        recent.add(rows_of(read(n, f"quiet-{n}")), n)
    for seq in range(20_000):
        recent.add(rows_of(read(seq, "loud")), seq)
    assert all(recent.evidence([f"quiet-{n}"], []) for n in range(100))
    assert [record.seq for record, _ in recent.evidence(["loud"], [])] == list(range(19_999, 19_967, -1))


def test_records_of_every_length_are_kept_whole() -> None:
    recent = Recent(32 << 10)
    for n in range(3000):
        runs = ",".join(str(2 * i) for i in range(n % 97 * 4))
        recent.add(rows_of(read(n, f"r{n % 50}", runs)), n)
        for record, received_ns in recent.evidence([f"r{n % 50}"], []):
            assert record.seq == received_ns
            assert len(record.pages) == received_ns % 97 * 4
    recent.add(rows_of(read(0, "large", ",".join(str(2 * i) for i in range(1000)))), 1)
    assert recent.evidence(["large"], []) == [], "it would leave no room for others"


# The loop


class Loop:
    """A core that runs, and what a reader of its board sees."""

    def __init__(self, path: Path, *, enforce: bool = True, policy: Policy | None = None, **settings: Any) -> None:
        self.inbox = Inbox(1 << 20)
        self.board = BoardWriter.create(path / "board")
        self.ring = str(path / "ring")
        self.core = Core(
            core_policy(policy or Policy()), core_settings(LedgerSettings(**settings)), enforce=enforce,
            inbox=self.inbox, board=self.board, ring=self.ring, ring_lanes=4, ring_rows=4096,
        )  # fmt: skip
        self.reader = BoardReader.open(path / "board")
        self.thread = threading.Thread(target=self.core.run)

    def start(self) -> None:
        self.thread.start()

    def put(self, *records: Record) -> None:
        assert self.inbox.put(rows_of(*records), 7)

    def end(self) -> list[Happened]:
        """Judges what is left; gives what happened and was not taken."""
        self.inbox.close()
        happened: list[Happened] = []
        while (some := self.core.take(30)) is not None:
            happened += some
        self.thread.join(30)
        assert not self.thread.is_alive()
        return happened


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path)
    yield loop
    loop.core.abandon()
    if loop.thread.ident is not None:
        loop.thread.join(30)


def stale(request: str, stream: str) -> list[Record]:
    """A request that reads a page which nobody wrote for it."""
    place: dict[str, Any] = {"stream": stream, "epoch": 1, "request": request, "tenant": "t"}
    page = PageSet.parse("0")
    return [Alloc(**place, seq=0, time_ns=100, pages=page), Read(**place, seq=1, time_ns=101, pages=page, tokens=1)]


def test_a_kill_is_on_the_board_and_told(loop: Loop) -> None:
    loop.start()
    loop.put(*stale("bad", "d"))
    until(lambda: loop.reader.watermark("d", 1) == 1)
    assert loop.reader.verdict("bad") is Verdict.KILL
    (happened,) = loop.core.take(30) or []
    finding = finding_of(happened.finding)
    assert (finding.kind, finding.request, finding.action) == (Kind.STALE_READ, "bad", Action.KILL)
    assert (happened.fresh, happened.over, happened.received_ns) == (True, False, 7)
    (incident,) = happened.incidents
    assert incident.id == loop.reader.incident("bad")
    assert len(incident.id) == 14
    assert incident.id.startswith("inc-")
    assert (incident.request, incident.tenant, incident.killed) == ("bad", "t", True)
    assert (incident.record_ns, incident.received_ns) == (101, 7)
    assert abs(time.time_ns() - incident.verdict_ns) < 60e9
    assert [(r.NAME, received_ns) for r, received_ns in loop.core.evidence(["bad"], [])] == [
        ("kv.read", 7),
        ("kv.alloc", 7),
    ]
    stats = loop.core.stats()
    assert (stats.kills, stats.kills_withheld, stats.records["kv.read"]) == (1, 0, 1)
    assert sum(stats.latency) == 2


def test_in_monitor_mode_nothing_is_on_the_board(tmp_path: Path) -> None:
    loop = Loop(tmp_path, enforce=False)
    loop.start()
    loop.put(*stale("bad", "d"))
    (happened,) = loop.end()
    assert loop.reader.verdict("bad") is Verdict.ALLOW
    assert happened.incidents[0].killed
    assert happened.incidents[0].verdict_ns
    assert (loop.core.stats().kills, loop.core.stats().kills_withheld) == (0, 1)


def test_an_incident_is_the_requests_own_until_that_is_forgotten(tmp_path: Path) -> None:
    loop = Loop(tmp_path, max_ended=1)
    loop.start()

    def over(request: str, seq: int) -> list[Record]:
        place: dict[str, Any] = {"stream": "d", "epoch": 1, "time_ns": 200, "request": request, "tenant": "t"}
        end = RequestEnd(**place, seq=seq + 1, outcome=Outcome.FINISHED)
        return [Free(**place, seq=seq, pages=PageSet.parse("0")), end]

    loop.put(*stale("bad", "d"))
    loop.put(
        Read(stream="e", epoch=1, seq=0, time_ns=102, request="bad", tenant="t", pages=PageSet.parse("5"), tokens=1)
    )
    loop.put(*over("bad", 2))
    loop.put(RequestEnd(stream="e", epoch=1, seq=1, time_ns=1, request="bad", tenant="t", outcome=Outcome.FINISHED))
    for n, request in enumerate(("next", "last")):
        place: dict[str, Any] = {"stream": "d", "epoch": 1, "time_ns": 300, "request": request, "tenant": "t"}
        loop.put(Alloc(**place, seq=4 + 3 * n, pages=PageSet.parse("0")), *over(request, 5 + 3 * n))
    happened = loop.end()
    found = [h for h in happened if not h.over]
    ids = {incident.id for h in found for incident in h.incidents if incident.request == "bad"}
    assert len(found) >= 2
    assert len(ids) == 1
    assert [h.incidents[0].id for h in happened if h.over] == list(ids)
    assert loop.reader.verdict("bad") is Verdict.ALLOW
    assert loop.board.verdicts == 0


def test_a_finding_of_no_request_has_an_incident_a_pool(tmp_path: Path) -> None:
    loop = Loop(tmp_path, reorder_window_ms=0)
    loop.start()
    happened: list[Happened] = []
    for seq in (0, 5, 10):
        loop.put(pool(seq), pool(seq, "other"))
        until(lambda seq=seq: loop.reader.watermark("s", 1) == loop.reader.watermark("other", 1) == seq)
        happened += loop.core.take(0) or []
    happened += loop.end()
    assert {finding_of(h.finding).kind for h in happened} == {Kind.STREAM_GAP}
    incidents = {(finding_of(h.finding).stream, i.request, i.id) for h in happened for i in h.incidents}
    assert {(stream, request) for stream, request, _ in incidents} == {("s", None), ("other", None)}
    assert len(incidents) == 2, "what is found later belongs to the same ones"


def test_who_makes_findings_faster_than_they_are_taken_is_held_back(loop: Loop) -> None:
    loop.start()
    streams = 10_000
    for n in range(streams):
        loop.put(*stale(f"bad{n}", f"d{n % 4000}-{n}") if n < 4000 else [])
    page = PageSet.parse("0")
    for n in range(4000, streams):
        place: dict[str, Any] = {"stream": "d0-0", "epoch": 1, "request": f"bad{n}", "tenant": "t"}
        seq = 2 + 2 * (n - 4000)
        loop.put(
            Alloc(**place, seq=seq, time_ns=100, pages=PageSet.parse(str(n))),
            Read(**place, seq=seq + 1, time_ns=101, pages=page, tokens=1),
        )
    until(lambda: loop.core.stats().waiting >= 8192)
    before = loop.core.stats()
    assert before.waiting < 8192 + 600
    assert loop.inbox.depth > 0
    assert not loop.reader.alive(time.monotonic_ns() + 2_000_000_000)
    happened = loop.end()
    assert {h.incidents[0].request for h in happened if not h.over} >= {f"bad{n}" for n in range(streams)}
    assert loop.core.stats().kills == streams


def test_nobody_is_waited_for_once_the_core_is_abandoned(loop: Loop) -> None:
    loop.start()
    for n in range(4000):
        loop.put(*stale(f"bad{n}", f"d{n}"))
    loop.core.abandon()
    loop.thread.join(30)
    assert not loop.thread.is_alive()
    assert not loop.inbox.put(rows_of(read(0)), 1)


def test_ring_and_inbox_are_judged_together(loop: Loop) -> None:
    loop.start()
    writer = RingWriter(loop.ring, "d", 1)
    for record in stale("bad", "d"):
        writer.send(record)
    loop.put(*stale("worse", "e"))
    until(lambda: loop.reader.watermark("d", 1) == loop.reader.watermark("e", 1) == 1)
    assert loop.reader.verdict("bad") is loop.reader.verdict("worse") is Verdict.KILL
    (lane,) = [lane for lane in loop.core.stats().lanes if lane.written]
    assert (lane.stream, lane.written, lane.dropped) == ("d", 2, 0)
    writer.close()


def test_an_idle_loop_beats_and_rests(loop: Loop) -> None:
    loop.start()
    began, used = loop.core.last_round_ns, time.process_time()
    until(lambda: loop.core.last_round_ns > began + 500_000_000)
    assert loop.reader.alive()
    assert time.process_time() - used < 0.25, "of half a second"


def test_a_quarantined_request_goes_on(tmp_path: Path) -> None:
    policy = Policy(actions={Kind.STALE_READ: Action.QUARANTINE})
    loop = Loop(tmp_path, policy=policy)
    loop.start()
    loop.put(*stale("bad", "d"))
    (happened,) = loop.end()
    assert loop.reader.verdict("bad") is Verdict.QUARANTINE
    assert loop.reader.incident("bad") == happened.incidents[0].id
    assert not happened.incidents[0].killed
    assert happened.incidents[0].verdict_ns == 0


def test_who_is_not_told_of_anything_waits_no_longer_than_asked(loop: Loop) -> None:
    loop.start()
    assert loop.core.take(0.01) == []
    loop.put(Write(stream="s", epoch=1, seq=0, time_ns=1, request="r", tenant="t", pages=PageSet.parse(""), tokens=0))
    assert loop.end() == []
