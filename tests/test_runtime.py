from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from guard_process import CASES, FakeEngine, case, until

from guard.act.abort import Aborter
from guard.act.board import BoardError, BoardReader, Verdict
from guard.config import load
from guard.incidents.recorder import Recorder
from guard.incidents.store import Store
from guard.native._core import BoardWriter, RingWriter, Rows, decode_otlp
from guard.receive.address import BindError
from guard.records import Alloc, PageSet, Read, Record
from guard.runtime import Runtime

NAMES = sorted(path.stem for path in CASES.glob("*.jsonl"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[Runtime, BoardReader]]]:
    made: list[Runtime] = []

    def make(*settings: str, **options: Any) -> tuple[Runtime, BoardReader]:
        ring = [f"ring.path={tmp_path}/board/ring", "ring.rows=4096"]
        kept = [f"incidents.path={tmp_path}/incidents.db"]
        config = load(environ={}, settings=["mode=enforce", *ring, *kept, *settings])
        board = BoardWriter.create(tmp_path / "board" / "board")
        runtime = Runtime(config, board, Recorder(str(tmp_path / "incidents.db")), **options)
        made.append(runtime)
        return runtime, BoardReader.open(tmp_path / "board" / "board")

    yield make
    for runtime in made:
        if runtime._judging.ident is not None:
            runtime.stop()


def put(runtime: Runtime, *messages: bytes) -> None:
    for message in messages:
        assert runtime.inbox.put(decode_otlp(message).rows, 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_case_gets_its_verdicts_and_findings(
    make: Callable[..., tuple[Runtime, BoardReader]], tmp_path: Path, name: str
) -> None:
    expect = json.loads((CASES / f"{name}.expect.json").read_text())
    if expect["args"]:
        pytest.skip("is judged with another policy")
    runtime, board = make("ledger.reorder_window_ms=50")
    put(runtime, *case(name))
    runtime.start()
    until(lambda: runtime.inbox.depth == 0 and runtime.stats().records_held == 0)
    # The arrival clock is far beyond the case's, so that leaks are looked for at once.
    kinds = {finding["kind"] for finding in expect["must_find"]}
    until(lambda: kinds <= {kind for kind, _ in list(runtime.counters.findings)})
    runtime.stop()
    for request, verdict in expect["verdicts"].items():
        assert board.verdict(request) is (Verdict.KILL if verdict == "kill" else Verdict.ALLOW), request
    incidents = Store.open(tmp_path / "incidents.db").list()
    found = [f for incident in incidents for f in incident.findings]
    for wanted in expect["must_find"]:
        assert any(wanted.items() <= f.items() for f in found), wanted
    if expect["clean"]:
        assert found == []


def test_verdicts_come_before_the_watermark_that_vouches_for_them(
    make: Callable[..., tuple[Runtime, BoardReader]], tmp_path: Path
) -> None:
    """As another process sees it, while many requests are judged."""
    runtime, _ = make()
    victims = 200
    code = (
        "import sys; from guard.act.board import BoardReader, Verdict; board = BoardReader.open(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        f"for n in range({victims}):\n"
        "    while board.watermark(f'd{n}', 1) < 1: pass\n"
        "    assert board.verdict(f'b{n}') is Verdict.KILL, n\n"
    )
    watcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "board" / "board")], stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "ready\n"
    runtime.start()
    for n in range(victims):
        rows = Rows()
        for record in unwritten(n):
            rows.append(record)
        assert runtime.inbox.put(rows, 1)
    assert watcher.wait(60) == 0
    watcher.stdout.close()


def unwritten(number: int) -> list[Record]:
    """A request that reads a page which nobody wrote for it."""
    place: dict[str, Any] = {"stream": f"d{number}", "epoch": 1, "time_ns": time.time_ns()}
    who = {"request": f"b{number}", "tenant": "tenant-b"}
    page = PageSet.parse("0")
    return [Alloc(**place, **who, seq=0, pages=page), Read(**place, **who, seq=1, pages=page, tokens=1)]


def test_a_killed_request_leaves_the_board_when_the_ledger_forgets_it(
    make: Callable[..., tuple[Runtime, BoardReader]],
) -> None:
    runtime, board = make("ledger.max_ended=1")
    put(runtime, *case("overlong-rejected-prefill"))
    runtime.start()
    until(lambda: board.watermark("decode-0", 1) == 16)
    assert board.verdict("r2") is Verdict.KILL
    put(runtime, *(m.replace(b"r2", b"r9").replace(b"r1", b"r8") for m in _on_other_streams(case("clean-two-tenants"))))
    until(lambda: board.watermark("decode-9", 1) >= 15)
    assert board.verdict("r2") is Verdict.ALLOW
    assert runtime.board.verdicts == 0


def _on_other_streams(messages: list[bytes]) -> list[bytes]:
    return [m.replace(b"decode-0", b"decode-9").replace(b"prefill-0", b"prefill-9") for m in messages]


def test_a_full_queue_drains_once_the_ledger_runs(make: Callable[..., tuple[Runtime, BoardReader]]) -> None:
    # The arrival clock is far beyond the case's: nothing is to be called a leak meanwhile.
    runtime, board = make("listen.queue_records=10", "ledger.leak_grace_s=1e9")
    batches = [decode_otlp(m).rows for m in case("clean-two-tenants")]
    taken = [rows for rows in batches if runtime.inbox.put(rows, 1)]
    assert len(taken) == 10
    assert runtime.inbox.full()
    runtime.start()
    for rows in batches[10:]:
        until(lambda rows=rows: runtime.inbox.put(rows, 1))
    until(lambda: sum(runtime.stats().records.values()) == len(batches))
    until(lambda: board.watermark("decode-0", 1) >= 15)
    assert not runtime.counters.findings


def test_a_ledger_that_fails_vouches_for_nothing_more(
    make: Callable[..., tuple[Runtime, BoardReader]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = threading.Event()
    runtime, board = make(on_failure=failed.set)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    runtime.board.close()  # which it never does while the ledger runs: that cannot publish any more
    put(runtime, case("clean-two-tenants")[0])
    runtime.start()
    assert failed.wait(30)
    assert isinstance(runtime.failure, BoardError)
    assert board.closed
    assert not board.alive()
    until(lambda: not runtime.alive)
    assert "the ledger failed" in capsys.readouterr().err


def test_findings_that_cannot_be_written_up_end_the_guard(
    make: Callable[..., tuple[Runtime, BoardReader]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = threading.Event()
    runtime, board = make(on_failure=failed.set)

    def note(*_: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(runtime._book, "note", note)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    put(runtime, *case("overlong-rejected-prefill"))
    runtime.start()
    assert failed.wait(30)
    assert isinstance(runtime.failure, KeyError)
    until(lambda: board.closed)
    assert not runtime.alive
    assert board.verdict("r2") is Verdict.KILL, "the verdict itself was not held up"
    assert "cannot be written up" in capsys.readouterr().err


def test_records_through_the_ring_are_judged_like_any(
    make: Callable[..., tuple[Runtime, BoardReader]], tmp_path: Path
) -> None:
    runtime, board = make()
    runtime.start()
    writer = RingWriter(f"{tmp_path}/board/ring", "d7", 1)
    for record in unwritten(7):
        assert writer.send(record) == record.seq
    until(lambda: board.watermark("d7", 1) == 1)
    assert board.verdict("b7") is Verdict.KILL
    incident = until(lambda: Store.open(tmp_path / "incidents.db").get(board.incident("b7")))
    assert [r["name"] for r in incident.records] == ["kv.alloc", "kv.read"]
    assert incident.record_ns <= incident.received_ns <= incident.verdict_ns
    for record in unwritten(7)[1:]:
        writer.send(record)
    runtime.stop()
    assert board.watermark("d7", 1) == 2, "what stood in the ring was judged"
    writer.close()


def test_a_ring_that_another_guard_has_is_named(
    make: Callable[..., tuple[Runtime, BoardReader]], tmp_path: Path
) -> None:
    make()
    with pytest.raises(BindError, match=f"{tmp_path}/board/ring"):
        make()


def test_a_locked_incident_store_does_not_hold_up_verdicts(
    make: Callable[..., tuple[Runtime, BoardReader]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime, board = make()
    locker = sqlite3.connect(tmp_path / "incidents.db", isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    put(runtime, *case("overlong-rejected-prefill"))
    runtime.start()
    until(lambda: board.verdict("r2") is Verdict.KILL)
    until(lambda: runtime.recorder.failures)
    assert '"kind": "foreign-read"' in capsys.readouterr().err
    locker.execute("ROLLBACK")
    until(lambda: runtime.recorder.depth == 0)
    assert Store.open(tmp_path / "incidents.db").get(board.incident("r2")) is not None


def test_an_empty_batch_is_nothing(make: Callable[..., tuple[Runtime, BoardReader]]) -> None:
    runtime, board = make()
    runtime.inbox.put(Rows(), 1)
    runtime.start()
    until(lambda: runtime.inbox.depth == 0)
    assert board.alive(max_age_s=30)
    assert runtime.alive


@pytest.mark.parametrize(
    ("statuses", "result", "calls"),
    [
        ((200,), "status 200", 1),
        ((404,), "status 404", 1),
        ((500, 429, 408, 200), "status 200", 4),
        ((401,), "failed: status 401", 1),
        ((400,), "failed: status 400", 1),
    ],
)
def test_abort_calls(statuses: tuple[int, ...], result: str, calls: int) -> None:
    done: list[tuple[str, int, str]] = []
    with FakeEngine(*statuses) as engine:
        aborter = Aborter(engine.url, "key", retry_s=30, on_done=lambda *what: done.append(what))
        aborter.start()
        aborter.abort("r1", "inc-1")
        until(lambda: done)
        aborter.stop()
    assert [(incident, said) for incident, _, said in done] == [("inc-1", result)]
    assert len(engine.calls) == calls
    assert engine.calls[0][0] == "Bearer key"
    assert (aborter.ok, aborter.failed) == ((0, 1) if result.startswith("failed") else (1, 0))
    assert aborter.pending == 0


def test_an_engine_that_comes_back_is_asked_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    done: list[Any] = []
    aborter = Aborter(f"http://127.0.0.1:{port}/abort", None, retry_s=30, on_done=lambda *what: done.append(what))
    aborter.start()
    aborter.abort("r1", "inc-1")
    with FakeEngine(200, port=port) as engine:
        until(lambda: done)
    assert engine.calls[0][0] is None
    assert aborter.ok == 1
    aborter.stop()


def test_an_engine_that_is_gone_is_given_up() -> None:
    done: list[Any] = []
    for url in ("http://127.0.0.1:1/abort", "http://127.0.0.1:99999/abort", "nowhere"):
        aborter = Aborter(url, None, retry_s=0, on_done=lambda *what: done.append(what[2]))
        aborter.start()
        aborter.abort("r1", "inc-1")
        until(lambda a=aborter: a.failed)
        aborter.stop()
    assert done[0] == "failed: ConnectError"
    assert all(result.startswith("failed: ") for result in done)
    assert len(done) == 3


def test_calls_under_way_do_not_hold_up_the_end() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        aborter = Aborter(f"http://127.0.0.1:{silent.getsockname()[1]}/abort", None)
        aborter.start()
        for n in range(3):
            aborter.abort(f"r{n}", "inc-1")
        connections = [silent.accept()[0] for _ in range(3)]
        assert aborter.pending == 3
        aborter.stop(timeout_s=0.05)
        for connection in connections:
            connection.close()
    assert not aborter._thread.is_alive()
