from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from guard.findings import Action, Finding, Kind
from guard.incidents.book import ACTED, Book
from guard.incidents.recorder import Aborted, Recorder, Saved
from guard.incidents.store import Evidence, Incident, Store, StoreError
from guard.native._core import Recent, Rows
from guard.records import Admit, PageSet, Read, Record


def incident(name: str = "inc-1", **fields: object) -> Incident:
    values: dict[str, object] = {
        "id": name, "opened_ns": 10, "updated_ns": 11, "kind": "foreign-read", "severity": "critical",
        "action": "killed", "mode": "enforce", "request": "r2", "tenant": "tenant-b", "pool": "decode-0",
        "disclosed": False, "record_ns": 5, "received_ns": 6, "verdict_ns": 7,
        "findings": [body("foreign-read")],
    }  # fmt: skip
    return Incident(**{**values, **fields})  # type: ignore[arg-type]


def body(kind: str, other_tenants: tuple[str, ...] = ("tenant-a",)) -> dict[str, object]:
    return {"kind": kind, "request": "r2", "pool": "decode-0", "other_tenants": list(other_tenants)}


def read(seq: int, request: str = "r2", stream: str = "decode-0") -> Read:
    return Read(
        stream=stream, epoch=1, seq=seq, time_ns=100 + seq, request=request, tenant="tenant-b",
        pages=PageSet.parse("0-3"), tokens=4,
    )  # fmt: skip


def finding(kind: Kind = Kind.FOREIGN_READ, action: Action = Action.KILL, **fields: object) -> Finding:
    values: dict[str, object] = {
        "kind": kind, "action": action, "request": "r2", "tenant": "tenant-b", "pool": "decode-0",
        "stream": "decode-0", "epoch": 1, "seq": 3, "time_ns": 103, "other_requests": {"r1"},
        "other_tenants": {"tenant-a"}, "subjects": {"r2"},
    }  # fmt: skip
    return Finding(**{**values, **fields})  # type: ignore[arg-type]


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "dir" / "incidents.db")
    store.save([(incident(), [Evidence(read(1), 50), Evidence(read(2), 51, offending=True)])])
    store.aborted("inc-1", 9, "status 200")
    with_reader = Store.open(tmp_path / "dir" / "incidents.db", read_only=True)
    found = with_reader.get("inc-1")
    assert found is not None
    assert replace(found, records=[]) == incident(abort_ns=9, abort_result="status 200")
    assert [(r["name"], r["offending"], r["received_ns"]) for r in found.records] == [
        ("kv.read", False, 50),
        ("kv.read", True, 51),
    ]
    assert found.records[0]["attributes"]["kv.pages"] == "0-3"
    assert found.as_json()["id"] == "inc-1"
    assert with_reader.get("inc-2") is None
    assert (tmp_path / "dir" / "incidents.db").stat().st_mode & 0o777 == 0o600


def test_an_incident_grows(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "i.db")
    store.save([(incident(), [Evidence(read(1), 50)])])
    store.aborted("inc-1", 9, "status 200")
    grown = incident(disclosed=True, updated_ns=20, findings=[body("foreign-read"), body("tainted-response")])
    store.save([(grown, [Evidence(read(1), 50, offending=True), Evidence(read(4), 60)])])
    found = store.get("inc-1")
    assert found is not None
    assert found.disclosed
    assert [f["kind"] for f in found.findings] == ["foreign-read", "tainted-response"]
    assert [(r["attributes"]["kv.seq"], r["offending"]) for r in found.records] == [(1, True), (4, False)]
    assert found.abort_ns == 9, "what the abort call gave stays"
    assert store.count() == 1


def test_lists_are_newest_first_and_filtered(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "i.db")
    for n in range(5):
        store.save([(incident(f"inc-{n}", opened_ns=n, tenant=f"t{n}", findings=[body("page-leak", ("t9",))]), [])])
    store.save([(incident("inc-x", opened_ns=9, tenant="t1", findings=[body("double-free", ())]), [])])
    assert [i.id for i in store.list()] == ["inc-x", "inc-4", "inc-3", "inc-2", "inc-1", "inc-0"]
    assert [i.id for i in store.list(2)] == ["inc-x", "inc-4"]
    assert [i.id for i in store.list(kind="double-free")] == ["inc-x"]
    assert [i.id for i in store.list(tenant="t1")] == ["inc-x", "inc-1"]
    assert len(store.list(tenant="t9")) == 5, "the tenant whose data it was"
    assert store.list(kind="' OR 1=1 --") == []
    assert store.list()[0].records == []


def test_the_oldest_incidents_go(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "i.db")
    for n in range(6):
        store.save([(incident(f"inc-{n}", opened_ns=n), [Evidence(read(n), n)])], keep=3)
    assert [i.id for i in store.list()] == ["inc-5", "inc-4", "inc-3"]
    rows = sqlite3.connect(tmp_path / "i.db").execute("SELECT count(*) FROM record").fetchone()[0]
    assert rows == 3, "their records with them"


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such file"):
        Store.open(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()
    Store.open(tmp_path / "newer.db").close()
    sqlite3.connect(tmp_path / "newer.db").execute("PRAGMA user_version = 2")
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"newer kvguard \(schema 2, this one knows 1\)"):
            Store.open(tmp_path / "newer.db", read_only=read_only)
    (tmp_path / "text.db").write_text("not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(StoreError, match="file is not a database"):
        Store.open(tmp_path / "text.db")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE x (y)")
    other.commit()
    with pytest.raises(StoreError, match="another program's database"):
        Store.open(tmp_path / "other.db")
    with pytest.raises(StoreError, match="is not an incident store"):
        Store.open(tmp_path / "other.db", read_only=True)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(tmp_path / "text.db" / "x.db")


def test_read_only_changes_nothing(tmp_path: Path) -> None:
    Store.open(tmp_path / "i.db").close()
    store = Store.open(tmp_path / "i.db", read_only=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store.save([(incident(), [])])


def test_the_recorder_writes_in_order_and_drains(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "i.db"))
    recorder.put(Saved(incident(), [Evidence(read(1), 1)]))
    recorder.put(Aborted("inc-1", 9, "status 200"))
    recorder.put(Saved(incident(updated_ns=99), []))
    saved: list[str] = []
    recorder.on_saved = saved.extend
    recorder.start()
    recorder.stop()
    assert (recorder.written, recorder.failures, recorder.dropped, recorder.depth) == (3, 0, 0, 0)
    assert saved == ["inc-1", "inc-1"]
    found = Store.open(tmp_path / "i.db").get("inc-1")
    assert found is not None
    assert (found.updated_ns, found.abort_result) == (99, "status 200")


def test_a_locked_database_stops_nothing_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "i.db"
    failing = threading.Event()
    recorder = Recorder(str(path), on_failure=lambda _reason: failing.set())
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    recorder.start()
    recorder.put(Saved(incident(), []))
    assert failing.wait(30)
    recorder.put(Saved(incident("inc-2"), []))
    assert recorder.depth == 2
    locker.execute("COMMIT")
    recorder.stop(30)
    assert recorder.failures >= 1
    assert Store.open(path).count() == 2


def test_a_full_disk_is_counted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 2
    failing = threading.Event()
    save = Store.save

    def full(self: Store, *args: object, **kwargs: object) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise sqlite3.OperationalError("database or disk is full")
        save(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "save", full)
    reasons: list[str] = []
    recorder = Recorder(str(tmp_path / "i.db"), on_failure=lambda reason: (reasons.append(reason), failing.set())[0])
    recorder.put(Saved(incident(), []))
    recorder.start()
    assert failing.wait(30)
    recorder.stop(30)
    assert (recorder.failures, recorder.written) == (2, 1)
    assert reasons == ["database or disk is full"], "said once, not at every attempt"


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "i.db"), queue=2)
    for n in range(5):
        recorder.put(Saved(incident(f"inc-{n}"), []))
    assert (recorder.depth, recorder.dropped) == (2, 3)
    recorder.start()
    recorder.stop()
    assert Store.open(tmp_path / "i.db").count() == 2


class State:
    """What the native core says of an incident."""

    def __init__(self, name: str, request: str | None = "r2", tenant: str | None = "tenant-b", **times: int) -> None:
        self.id, self.request, self.tenant = name, request, tenant
        self.record_ns, self.received_ns = times.get("record_ns", 0), times.get("received_ns", 0)
        self.verdict_ns = times.get("verdict_ns", 0)


def kept(*records: tuple[Record, int]) -> Recent:
    recent = Recent(1 << 20)
    for record, received_ns in records:
        rows = Rows()
        rows.append(record)
        recent.add(rows, received_ns)
    return recent


def test_the_book_groups_findings_by_incident() -> None:
    admit = Admit(stream="decode-0", epoch=1, seq=0, time_ns=1, request="r1", tenant="tenant-a", tokens=1)
    book = Book("enforce", kept((read(3), 55), (admit, 50)))
    state = State("inc-1")
    first = book.note(finding(), state, 60)
    second = book.note(finding(Kind.TAINTED_RESPONSE, seq=4), state, 61)
    assert first is second
    ((saved, evidence),) = book.take_changed()
    assert saved.id == "inc-1"
    assert (saved.kind, saved.action, saved.disclosed) == ("foreign-read", "killed", True)
    assert [f["kind"] for f in saved.findings] == ["foreign-read", "tainted-response"]
    assert {(e.record.request, e.offending) for e in evidence} == {("r1", False), ("r2", True)}
    assert (saved.record_ns, saved.received_ns) == (103, 55), "the offending record's own time of arrival"
    assert book.take_changed() == []
    book.forget("inc-1")
    assert book.note(finding(), State("inc-1"), 60) is not first


def test_a_kill_is_told_once_with_its_times() -> None:
    book = Book("enforce", kept())
    book.note(finding(), State("inc-1"), 60)
    assert book.take_killed() == []
    state = State("inc-1", record_ns=103, received_ns=70, verdict_ns=80)
    for _ in range(2):
        incident = book.note(finding(), state, 90)
    assert (incident.record_ns, incident.received_ns, incident.verdict_ns) == (103, 70, 80)
    assert book.take_killed() == [incident]
    assert book.take_killed() == []


def test_monitor_mode_says_what_it_would_have_done() -> None:
    book = Book("monitor", kept())
    assert book.note(finding(), State("inc-1"), 1).action == "observed: would kill"
    quarantine = finding(Kind.FREE_IN_FLIGHT, Action.QUARANTINE)
    assert book.note(quarantine, State("inc-2"), 1).action == "observed: would quarantine"
    assert book.note(finding(Kind.PAGE_LEAK, Action.ALERT), State("inc-3"), 1).action == "alerted"


def test_the_strongest_action_stands_and_only_the_killed_are_killed() -> None:
    book = Book("enforce", kept())
    state = State("inc-1")
    assert book.note(finding(Kind.DOUBLE_FREE, Action.ALERT), state, 1).action == "alerted"
    assert book.note(finding(), state, 1).action == "killed"
    assert book.note(finding(Kind.PAGE_LEAK, Action.OBSERVE), state, 1).action == "killed"
    writer = finding(Kind.FOREIGN_WRITE, request="r1", subjects={"r2"})
    late = State("inc-2", "r1", "t")
    assert book.note(writer, late, 1).action == "alerted", "the late writer itself is not killed"


def test_what_was_done_is_said_for_every_action() -> None:
    assert set(ACTED) == {(mode, action) for mode in ("enforce", "monitor") for action in Action}


def test_the_book_is_bounded() -> None:
    book = Book("enforce", kept(), limit=10)
    for n in range(50):
        book.note(finding(request=f"r{n}", subjects={f"r{n}"}), State(f"inc-{n}", f"r{n}"), 1)
    assert len(book._open) == 10
    assert len(book.take_changed()) == 50, "each was still handed over"
