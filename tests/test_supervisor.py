"""The engine's first process, with the real router and workers that only pretend."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import RunningEngine, running_engine

from engine.__main__ import main
from engine.child import STEADY_S, Child
from engine.config import ConfigError, EngineConfig, GuardConfig, PoolConfig
from engine.faults import Fault
from engine.resolve import check, read, warnings, with_secrets

FAKE = (str(Path(__file__).with_name("fake_engine.py")),)
PATIENCE_S = 30.0


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def heard(engine: RunningEngine, worker: str) -> list[str]:
    path = engine.run_dir / f"{worker}.heard"
    return path.read_text().splitlines() if path.exists() else []


# Running


def test_starts_answers_and_stops() -> None:
    with running_engine(command=FAKE, tenants={"k": "t"}) as engine:
        assert engine.run_dir.stat().st_mode & 0o777 == 0o700
        config = engine.run_dir / "engine.yaml"
        assert config.stat().st_mode & 0o777 == 0o600
        assert len(bytes.fromhex(engine.config.digest_key)) == 32
        assert engine.complete("x", "k").json()["choices"][0]["text"] == "ok"
        with engine.http("k") as client:
            assert client.get("/health").status_code == 200
        pids = engine.pids()
        assert pids.keys() == {"router-0", "prefill-0", "decode-0"}
        before = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - before < 5
        assert not any(alive(pid) for pid in pids.values())
        assert not any("WARNING" in line for line in engine.stderr)


def test_stops_at_ctrl_c_and_fails_what_runs() -> None:
    with running_engine(command=FAKE) as engine, engine.http() as client:
        with client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "x"}) as response:
            assert response.read()
        answers: list[int] = []
        body = {"model": "tiny", "prompt": "wait"}
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body).status_code))
        asking.start()
        eventually(lambda: "requests_in_flight 1.0" in engine.http().get("/metrics").text)
        assert engine.stop(signal.SIGINT) == 0
        asking.join()
        assert answers == [503]


def test_a_dead_worker_is_replaced_and_the_others_told() -> None:
    with running_engine(command=FAKE) as engine, engine.http() as client:
        first = engine.pids()["decode-0"]
        epoch = worker_info(client, "decode-0")["epoch"]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: heard(engine, "prefill-0") == [f"down decode-0 {epoch}"])
        eventually(
            lambda: client.get("/health").status_code == 200 and engine.pids().get("decode-0") not in (None, first)
        )
        eventually(lambda: worker_info(client, "decode-0").get("epoch", epoch) > epoch)
        assert engine.complete("x").status_code == 200
        assert 'worker_deaths_total{worker="decode-0"} 1.0' in client.get("/metrics").text
        assert any("decode-0 died (signal 9); restart 1" in line for line in engine.stderr)


def worker_info(client: Any, name: str) -> dict[str, Any]:
    workers = client.get("/get_server_info").json()["workers"]
    return next(worker for worker in workers if worker["name"] == name)


def test_a_dead_router_is_replaced_and_learns_the_workers() -> None:
    with running_engine(command=FAKE) as engine:
        first = engine.pids()
        os.kill(first["router-0"], signal.SIGKILL)
        eventually(lambda: engine.pids().get("router-0") not in (None, first["router-0"]))
        with engine.http() as client:
            # The socket is the supervisor's: the connection waits for the new router.
            eventually(lambda: client.get("/health").status_code == 200)
        assert engine.complete("x").status_code == 200
        pids = engine.pids()
        assert (pids["prefill-0"], pids["decode-0"]) == (first["prefill-0"], first["decode-0"])
        for worker in ("prefill-0", "decode-0"):
            assert [line.split()[:2] for line in heard(engine, worker)] == [["down", "router-0"]]


def test_no_orphans_when_the_supervisor_is_killed() -> None:
    with running_engine(command=FAKE) as engine:
        pids = engine.pids()
        engine.process.kill()
        eventually(lambda: not any(alive(pid) for pid in pids.values()))


def test_a_worker_that_does_not_stop_is_killed() -> None:
    with running_engine(command=FAKE, environment={"FAKE_WORKER": "deaf:decode-0"}, stop_s=0.5) as engine:
        pids = engine.pids()
        assert engine.stop() == 0
        assert not any(alive(pid) for pid in pids.values())
        assert any("decode-0 did not stop in time" in line for line in engine.stderr)


def test_several_workers_share_the_load() -> None:
    two = PoolConfig(workers=2)
    with running_engine(command=FAKE, decode=two, prefill=two) as engine, engine.http() as client:
        workers = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        assert engine.pids().keys() == {"router-0", *workers}
        with ThreadPoolExecutor(2) as pool:
            body = {"model": "tiny", "prompt": "wait"}
            asking = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(2)]
            eventually(lambda: all(worker_info(client, worker)["requests"] == 1 for worker in workers))
            os.kill(engine.pids()["decode-0"], signal.SIGKILL)
            failed, _ = wait(asking, PATIENCE_S, FIRST_COMPLETED)
            assert [future.result().json()["error"]["code"] for future in failed] == ["worker_failed"]
            # The other pair goes on, and takes new requests meanwhile.
            assert sum(future.running() for future in asking) == 1
            assert engine.complete("x").status_code == 200
            assert engine.stop() == 0
            assert sorted(future.result().json()["error"]["code"] for future in asking) == [
                "shutting_down",
                "worker_failed",
            ]


def test_the_pause_grows_while_it_dies_young(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("engine.child.time.monotonic", lambda: now)
    child = Child("x", ["-c", "pass"])
    assert [child.plan_restart() for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert child.next_start == 5.0
    now = STEADY_S  # It lived for long this time.
    assert child.plan_restart() == 0.1
    assert child.restarts == 9


# Not running


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [("exit:decode-0:2", 2, "cannot run with this configuration"), ("exit:decode-0:1", 1, "giving up")],
)
def test_workers_that_cannot_start(fault: str, status: int, says: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, *FAKE, *sets(f"run_dir={tmp_path}/r", "port=0", "model=tiny")],
        env={**os.environ, "FAKE_WORKER": fault},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == status
    assert says in run.stderr
    assert run.stdout == ""


def test_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--set", f"run_dir={tmp_path}/r", "--set", f"port={port}"]) == 3
    message = capsys.readouterr().err
    assert f"port: {port}" in message
    assert "0 for any free one" in message


def test_run_dir_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with running_engine(command=FAKE) as engine:
        assert main(["--set", f"run_dir={engine.run_dir}", "--set", "port=0"]) == 3
        assert "another engine runs in" in capsys.readouterr().err
        assert engine.complete("x").status_code == 200


def test_run_dir_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--set", f"run_dir={tmp_path}/file", "--set", "port=0"]) == 2
    (tmp_path / "link").symlink_to(tmp_path)
    assert main(["--set", f"run_dir={tmp_path}/link", "--set", "port=0"]) == 2
    assert "run_dir: " in capsys.readouterr().err


def test_context_beyond_the_model(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, *FAKE, *sets(f"run_dir={tmp_path}/r", "port=0", "model=tiny", "context=100000")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert "context: 100000 tokens, and model tiny takes 2048" in run.stderr


# The command line and the configuration


def test_check_and_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: tiny\nfaults: [double-free]\nprefill: {pages: 3}\n")
    arguments = ["--config", str(path), "--check"]
    assert main(arguments) == 0
    out = capsys.readouterr()
    assert out.out == "configuration: valid\n"
    assert "FAULT double-free IS ON" in out.err
    config = read(
        path, ["prefill.pages=9", "prefill.workers=2", "tenants.sk-a.b=x", "context=7"], ["early-free", "double-free"]
    )
    assert (config.prefill.pages, config.prefill.workers, config.context) == (9, 2, 7)
    assert config.tenants == {"sk-a.b": "x"}
    assert config.faults == (Fault.DOUBLE_FREE, Fault.EARLY_FREE)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("port=70000", "port: 70000"),
        ("port=x", "port: Expected"),
        ("nonsense=1", "nonsense"),
        ("guard.nonsense=1", "nonsense"),
        ("prefill.pages=0", "prefill.pages: 0"),
        ("decode.workers=65", "decode.workers: 65"),
        ("context=1", "context: 1"),
        ("digest_key=abc", "digest_key"),
        ("lease_s=0", "lease_s: 0"),
        ("lease_s=.nan", "lease_s"),
        ("stop_s=0", "stop_s: 0"),
        ("guard.wait_ms=-1", "guard.wait_ms"),
        ("guard.endpoint=nowhere", "guard.endpoint"),
        ("guard.gate=sync", "guard.board"),
        ("guard={gate: sync, board: /b}", "guard.endpoint or guard.ring"),
        ("guard.ring=nowhere", "guard.ring"),
        ("tenants={'a b': x}", "tenants: key 0"),
        ("tenants={a: ''}", "tenants: the tenant of key 0"),
        ("model=gpt", "model"),
        ("port", "--set 'port'"),
        ("port={", "--set port"),
        ("port.x=1", "--set port.x"),
        ("run_dir=/tmp/" + "x" * 100, "run_dir"),
        ("faults=[swallowed-reject]", "context: the fault swallowed-reject"),
        ("faults=[none]", "faults"),
    ],
)
def test_bad_configuration(change: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("port: 5\n")
    assert main(["--config", str(path), "--check", "--set", change]) == 2
    message = capsys.readouterr().err
    assert names in message
    assert message.startswith("engine: ")


@pytest.mark.parametrize("content", [b"- a", b"a: [", b"\xff\xfe\x00", b"port: {}"])
def test_bad_file(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    assert main(["--config", str(path), "--check"]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none"), "--check"]) == 2


def test_unknown_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--fault", "no-such"]) == 2
    assert "early-free" in capsys.readouterr().err


def test_admin_key_is_no_tenants_key() -> None:
    with pytest.raises(ConfigError, match="admin_key"):
        check(EngineConfig(tenants={"k": "t"}, admin_key="k"))
    fresh = with_secrets(EngineConfig(tenants={"k": "t"}))
    assert len(fresh.admin_key) > 30
    assert fresh.admin_key != with_secrets(EngineConfig()).admin_key
    check(fresh)


def test_gate_needs_a_guard() -> None:
    with pytest.raises(ConfigError, match=r"guard\.endpoint"):
        check(EngineConfig(guard=GuardConfig(gate="sync", board="/x")))
    check(EngineConfig(guard=GuardConfig(gate="sync", board="/x", endpoint="unix:/y")))
    check(EngineConfig(guard=GuardConfig(endpoint="[::1]:4317")))


def test_warnings_are_loud() -> None:
    lines = warnings(EngineConfig(faults=tuple(Fault), context=9999))
    assert sum("IS ON" in line for line in lines) == len(Fault)
    assert any("SGLang" in line for line in lines)
    assert any("9999" in line for line in lines)
    assert any("401" in line for line in lines)
