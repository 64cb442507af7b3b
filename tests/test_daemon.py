from __future__ import annotations

import json
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from guard_process import FakeEngine, Guardd, case, guards, until

from guard.act.board import Verdict
from guard.incidents.store import Store

INCIDENT_CASE = "overlong-rejected-prefill"


@pytest.fixture
def guardd(tmp_path: Path) -> Iterator[Callable[..., Guardd]]:
    yield from guards(tmp_path)


def test_from_spans_to_verdict_abort_incident_and_metrics(guardd: Callable[..., Guardd]) -> None:
    with FakeEngine(503, 200) as engine:
        guard = guardd(engine={"abort_url": engine.url, "admin_key": "swordfish"})
        board = guard.board()
        assert guard.get("/livez").status_code == guard.get("/readyz").status_code == 200
        guard.send(*case(INCIDENT_CASE))
        until(lambda: board.watermark("decode-0", 1) == 16)
        assert board.verdict("r2") is Verdict.KILL
        assert board.verdict("r1") is Verdict.ALLOW
        assert board.alive()
        incident = board.incident("r2")
        found = until(lambda: (i := guard.incidents().get(incident)) and i.abort_ns and i)
    key, body = engine.calls[0]
    assert key == "Bearer swordfish"
    assert json.loads(body) == {"rid": "r2", "incident": incident}
    assert len(engine.calls) == 2, "a 503 is tried again"
    assert (found.request, found.tenant, found.action, found.disclosed) == ("r2", "tenant-b", "killed", True)
    assert found.abort_result == "status 200"
    assert found.kind == "foreign-read"
    assert {f["kind"] for f in found.findings} >= {
        "foreign-read", "stale-read", "zombie-request", "wrong-status", "tainted-response",
    }  # fmt: skip
    assert found.record_ns == 1_790_000_000_028_000_000, "the read"
    assert found.record_ns < found.received_ns <= found.verdict_ns <= found.abort_ns
    offending = [r["name"] for r in found.records if r["offending"]]
    assert "kv.read" in offending
    assert {r["attributes"].get("kv.request.id") for r in found.records} == {None, "r1", "r2"}

    metrics = guard.metrics()
    assert metrics['kvguard_spans_total{protocol="grpc"}'] == 32
    assert metrics['kvguard_records_total{record="kv.read"}'] == 2
    assert metrics['kvguard_findings_total{action="kill",kind="foreign-read"}'] == 1
    assert metrics["kvguard_kills_total"] == 1
    assert metrics["kvguard_kills_withheld_total"] == 0
    assert metrics["kvguard_board_verdicts"] == 1
    assert metrics["kvguard_verdict_latency_seconds_count"] == 32
    assert metrics["kvguard_ring_lanes"] == 16
    assert metrics['kvguard_abort_calls_total{result="ok"}'] == 1
    assert metrics["kvguard_incident_write_failures_total"] == 0

    assert guard.stop() == 0
    assert board.closed
    assert not board.alive()
    assert board.verdict("r2") is Verdict.KILL, "what was killed stays killed"
    log = [json.loads(line) for line in guard.stderr().splitlines()]
    assert {line["kind"] for line in log if line["event"] == "finding"} >= {"foreign-read", "over-capacity"}
    assert "swordfish" not in str(log)


def test_monitor_mode_kills_nothing(guardd: Callable[..., Guardd]) -> None:
    with FakeEngine(200) as engine:
        guard = guardd(mode="monitor", engine={"abort_url": engine.url})
        board = guard.board()
        guard.send(*case(INCIDENT_CASE))
        until(lambda: board.watermark("decode-0", 1) == 16)
        assert board.verdict("r2") is Verdict.ALLOW
        (incident,) = until(lambda: [i for i in guard.incidents().list(tenant="tenant-b") if i.disclosed])
        assert incident.action == "observed: would kill"
        assert incident.verdict_ns is not None
        metrics = guard.metrics()
        assert metrics["kvguard_kills_total"] == 0
        assert metrics["kvguard_kills_withheld_total"] == 1
        assert guard.stop() == 0
    assert engine.calls == []


def test_sigterm_judges_what_was_received(guardd: Callable[..., Guardd]) -> None:
    # The case is of long ago: what its requests own for a moment after their end is not to be called a leak.
    guard = guardd(ledger={"leak_grace_s": 1e9})
    board = guard.board()
    guard.send(*case(INCIDENT_CASE))
    assert guard.stop() == 0
    assert board.watermark("decode-0", 1) == 16
    assert board.verdict("r2") is Verdict.KILL
    assert guard.incidents().count() == 2


def test_a_killed_guard_is_replaced_without_letting_anybody_go(guardd: Callable[..., Guardd]) -> None:
    first = guardd(journal={"enabled": False})
    board = first.board()
    first.send(*case(INCIDENT_CASE))
    until(lambda: board.watermark("decode-0", 1) == 16)
    incident = board.incident("r2")
    until(lambda: first.incidents().get(incident))
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not board.alive())

    second = guardd(journal={"enabled": False})
    assert second.get("/readyz").status_code == 200
    until(board.alive)  # the reader finds the new board by itself
    assert board.verdict("r2") is Verdict.KILL
    assert board.incident("r2") == incident
    assert board.watermark("decode-0", 1) == -1, "the new guard has judged nothing yet"
    assert second.incidents().get(incident) is not None
    second.send(*case("clean-two-tenants")[:1])
    until(lambda: board.watermark("prefill-0", 1) == 0)
    assert second.stop() == 0


def test_a_guard_that_takes_over_knows_how_far_streams_were_judged(guardd: Callable[..., Guardd]) -> None:
    first = guardd()
    board = first.board()
    first.send(*case(INCIDENT_CASE))
    until(lambda: board.watermark("decode-0", 1) == 16)
    assert first.stop() == 0
    second = guardd()
    until(board.alive)
    until(lambda: board.watermark("decode-0", 1) == 16)
    gaps = until(lambda: second.incidents().list(kind="stream-gap"))
    assert {f["confidence"] for incident in gaps for f in incident.findings} == {"degraded"}
    second.send(*case(INCIDENT_CASE))  # a sender that was not told that they had arrived
    metrics = until(lambda: (m := second.metrics())["kvguard_records_duplicate_total"] > 20 and m)
    assert metrics["kvguard_journal_bytes"] > 0
    assert metrics["kvguard_journal_write_failures_total"] == 0
    assert second.stop() == 0
    assert [f["kind"] for incident in second.incidents().list() for f in incident.findings].count("foreign-read") == 1


def test_streams_that_began_before_the_guard_are_not_vouched_for(guardd: Callable[..., Guardd]) -> None:
    guard = guardd(ledger={"reorder_window_ms": 20})
    board = guard.board()
    guard.send(*case("clean-two-tenants")[10:])
    gaps = until(lambda: guard.incidents().list(kind="stream-gap"))
    assert gaps[0].action == "alerted"
    until(lambda: guard.metrics()["kvguard_ledger_records_held"] == 0)
    assert board.verdict("r1") is Verdict.ALLOW
    assert board.verdict("r2") is Verdict.ALLOW
    assert guard.stop() == 0


def test_a_second_guard_on_the_same_board_refuses(guardd: Callable[..., Guardd], tmp_path: Path) -> None:
    first = guardd()
    other = guardd(ready=False, listen={"otlp_grpc": "127.0.0.1:0"})
    assert "another guardd has it" in other.stderr()
    assert other.process.returncode == 3
    assert first.get("/readyz").status_code == 200
    assert first.board().alive()


@pytest.mark.parametrize("listener", ["otlp_grpc", "otlp_http", "http"])
def test_an_occupied_port_ends_with_3(guardd: Callable[..., Guardd], listener: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        guard = guardd(ready=False, listen={listener: address})
        assert address in guard.stderr()
    assert guard.process.returncode == 3


def test_a_bad_configuration_ends_with_2(guardd: Callable[..., Guardd], tmp_path: Path) -> None:
    guard = guardd(ready=False, mode="enforced")
    message = guard.stderr()
    assert guard.process.returncode == 2
    assert f"{tmp_path}/guard.yaml:" in message
    assert "mode: Input should be 'monitor' or 'enforce'" in message
    assert "Traceback" not in message


def test_a_newer_incident_store_ends_with_2(guardd: Callable[..., Guardd], tmp_path: Path) -> None:
    Store.open(tmp_path / "incidents.db").close()
    sqlite3.connect(tmp_path / "incidents.db").execute("PRAGMA user_version = 9")
    guard = guardd(ready=False)
    assert "written by a newer kvguard" in guard.stderr()
    assert guard.process.returncode == 2


def test_hostile_senders_change_nothing(guardd: Callable[..., Guardd]) -> None:
    guard = guardd(listen={"token": "swordfish", "metrics_token": "s3"})
    good = (("authorization", "Bearer swordfish"),)
    messages = case(INCIDENT_CASE)
    with pytest.raises(grpc.RpcError) as error:
        guard.send(messages[0])
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as error:
        guard.send(b"\xff" * 1000, metadata=good)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (response,) = guard.send(messages[0].replace(b"kv.page.tokens", b"kv.page.tokenz"), metadata=good)
    assert response.partial_success.rejected_spans == 1
    assert "kv.page.tokens is missing" in response.partial_success.error_message
    board = guard.board()
    until(lambda: board.watermark("prefill-0", 1) == 0)  # its place is taken: no gap
    with socket.create_connection(("127.0.0.1", int(guard.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"\x00\xff not http\r\n\r\n")
        raw.recv(1000)
    assert guard.get("/nothing").status_code == 404
    assert guard.get("/metrics").status_code == 401
    assert guard.get("/metrics", authorization="Bearer s3").status_code == 200
    assert guard.get("/livez").status_code == 200, "probes need no token"
    assert guard.stop() == 0
    assert "Traceback" not in guard.stderr()
