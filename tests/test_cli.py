"""`guardctl` as its users run it: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from guarded import guardctl

import guard
from guard.cli import COMMANDS, main
from guard.findings import Kind
from guard.incidents.store import Evidence, Incident, Store
from guard.records import Admit, PageSet, Read

S = 1_000_000_000
NOW = 1_790_000_000 * S
READ_NS = NOW + 5_000_000


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


def refused(*arguments: object, **options: Any) -> str:
    """The one line that says why it could not be done."""
    result = run(*arguments, **options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def finding(kind: Kind, **fields: Any) -> dict[str, Any]:
    return {
        "kind": kind.value, "severity": "critical", "action": "kill", "request": "r2", "tenant": "bob-corp",
        "other_tenants": ["alice-corp"], "other_requests": ["r1"], "pool": "decode-0", "pages": "0-3,9",
        "transfer": None, "stream": "decode-0", "seq": 7, "confidence": "full", "time_ns": READ_NS,
        "reason": "read pages that hold other tenants' data", **fields,
    }  # fmt: skip


KILLED = Incident(
    id="inc-aaaaaaaaaa", opened_ns=NOW, updated_ns=NOW, kind=Kind.FOREIGN_READ, severity="critical", action="killed",
    mode="enforce", request="r2", tenant="bob-corp", pool="decode-0", disclosed=False, record_ns=READ_NS,
    received_ns=READ_NS + 1_000_000, verdict_ns=READ_NS + 1_500_000, findings=[finding(Kind.FOREIGN_READ)],
)  # fmt: skip
GAP = Incident(
    id="inc-bbbbbbbbbb", opened_ns=NOW + S, updated_ns=NOW + S, kind=Kind.STREAM_GAP, severity="warning",
    action="alerted", mode="enforce", request=None, tenant=None, pool="prefill-0", disclosed=False, record_ns=NOW + S,
    received_ns=None, verdict_ns=None,
    findings=[
        finding(
            Kind.STREAM_GAP, severity="warning", action="alert", request=None, tenant=None, other_tenants=[],
            other_requests=[], pool="prefill-0", pages="", stream="prefill-0", seq=3, reason="a hole in kv.seq",
        )
    ],
)  # fmt: skip


def evidence(request: str = "r2", tenant: str = "bob-corp") -> list[Evidence]:
    place: dict[str, Any] = {"stream": "decode-0", "epoch": 1, "request": request, "tenant": tenant}
    admit = Admit(**place, seq=6, time_ns=NOW, tokens=70)
    read = Read(**place, seq=7, time_ns=READ_NS, pages=PageSet.parse("0-3,9"), tokens=70)
    return [Evidence(admit, NOW + 1_000_000), Evidence(read, READ_NS + 1_000_000, offending=True)]


def store_with(path: Path, *incidents: Incident) -> Path:
    store = Store.open(path)
    store.save([(incident, evidence() if incident.request == "r2" else []) for incident in incidents])
    store.close()
    return path


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = store_with(tmp_path / "incidents.db", KILLED, GAP)
    store = Store.open(path)
    store.aborted(KILLED.id, READ_NS + 4_000_000, "status 200")
    store.close()
    return path


# The command itself


def test_version() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert result.stdout.split()[:4] == ["kvguard", guard.__version__, "records", "1"]
    assert (
        json.loads(run("version", "-o", "json").stdout).items() >= {"kvguard": guard.__version__, "records": 1}.items()
    )


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS), ["incidents", "list"], ["incidents", "show"]], ids=" ".join
)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(words: list[str], option: str) -> None:
    result = run(*words, option)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    assert result.stderr == ""
    # Short enough for a terminal of usual width, and a line for every option.
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert "Traceback" not in result.output


def test_help_names_every_command() -> None:
    listed = run("--help").stdout.partition("Commands:\n")[2]
    assert [line.split()[0] for line in listed.splitlines()[: len(COMMANDS)]] == sorted(COMMANDS)


def test_bad_usage_is_2() -> None:
    for words in ([], ["nonsense"], ["version", "--nonsense"], ["incidents", "show"], ["version", "-o", "xml"]):
        result = run(*words)
        assert result.exit_code == 2, words
        assert "Usage: " in result.output
        assert "Traceback" not in result.output


def test_a_command_loads_only_what_it_needs() -> None:
    script = "import sys; from guard.cli import main; main(['version'], standalone_mode=False); print(*sys.modules)"
    words = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "engine", "hooks", "grpc", "httpx", "sqlite3", "pydantic"} & set(words)


# Incidents


def test_list_is_newest_first(db: Path) -> None:
    result = run("incidents", "--db", db, "list")
    assert (result.exit_code, result.stderr) == (0, "")
    head, _rule, first, second = [line.split() for line in result.stdout.splitlines()]
    assert head[0] == "INCIDENT"
    assert {"inc-bbbbbbbbbb", "stream-gap", "alerted"} <= set(first)
    assert {"inc-aaaaaaaaaa", "foreign-read", "killed", "bob-corp", "r2", "critical"} <= set(second)
    assert "2026-09-21 14:13:21.000" in result.stdout


def test_list_as_json_is_an_object_a_line(db: Path) -> None:
    result = run("incidents", "list", "--db", db, "-o", "json")
    gap, killed = [json.loads(line) for line in result.stdout.splitlines()]
    assert (gap["id"], killed["id"]) == (GAP.id, KILLED.id)
    assert killed["findings"] == KILLED.findings
    assert "records" not in killed
    assert (killed["disclosed"], killed["abort_result"]) == (False, "status 200")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--kind", "stream-gap"], [GAP]),
        (["--kind", "double-free"], []),
        (["--tenant", "bob-corp"], [KILLED]),
        (["--tenant", "alice-corp"], [KILLED]),
        (["--tenant", "nobody"], []),
        (["--limit", "1"], [GAP]),
    ],
)
def test_list_of_some(db: Path, options: list[str], expected: list[Incident]) -> None:
    result = run("incidents", "--db", db, "list", "-o", "json", *options)
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [incident.id for incident in expected]
    table = run("incidents", "--db", db, "list", *options).stdout
    assert all(incident.id in table for incident in expected) if expected else table == "no incidents\n"


def test_show_tells_all_of_it(db: Path) -> None:
    result = run("incidents", "--db", db, "show", KILLED.id)
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    for words in (
        KILLED.id, "killed (mode enforce)", "bob-corp", "foreign-read", "0-3,9", "alice-corp", "r1", "decode-0#7",
        "read pages that hold other tenants' data", "kv.admit", "tokens=70",
    ):  # fmt: skip
        assert words in text
    facts = dict(line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("record to"))
    assert {name: value.strip() for name, value in facts.items()} == {
        "record to guard": "1.0 ms", "record to verdict": "1.5 ms", "record to abort": "4.0 ms status 200",
    }  # fmt: skip
    [read] = [line for line in text.splitlines() if "kv.read" in line]
    assert "kv.read <" in read, "the offending record is marked"
    [admit] = [line for line in text.splitlines() if "kv.admit" in line]
    assert "<" not in admit


def test_show_what_has_no_request(db: Path) -> None:
    text = run("incidents", "--db", db, "show", GAP.id).stdout
    assert "a hole in kv.seq" in text
    assert "record to verdict" in text


def test_show_as_json_has_the_records(db: Path) -> None:
    result = run("incidents", "--db", db, "show", KILLED.id, "-o", "json")
    incident = json.loads(result.stdout)
    assert incident["findings"] == KILLED.findings
    assert [(r["name"], r["offending"]) for r in incident["records"]] == [("kv.admit", False), ("kv.read", True)]
    assert incident["records"][1]["attributes"]["kv.pages"] == "0-3,9"
    assert incident["verdict_ns"] == KILLED.verdict_ns


def test_the_store_can_come_from_the_configuration(db: Path, tmp_path: Path) -> None:
    config = tmp_path / "guard.yaml"
    config.write_text(f"incidents:\n  path: {db}\n")
    assert KILLED.id in run("incidents", "--config", config, "list").stdout
    assert KILLED.id in run("incidents", "list", "--config", config).stdout
    assert KILLED.id in run("incidents", "list", env={"KVGUARD_CONFIG": str(config)}).stdout
    assert KILLED.id in run("incidents", "list", env={"KVGUARD_INCIDENTS__PATH": str(db)}).stdout
    assert KILLED.id in run("incidents", "--config", tmp_path / "none.yaml", "list", "--db", db).stdout


def test_looking_changes_nothing(db: Path) -> None:
    before = {path.name: path.read_bytes() for path in db.parent.iterdir() if not path.name.endswith("-shm")}
    run("incidents", "--db", db, "show", KILLED.id)
    after = {path.name: path.read_bytes() for path in db.parent.iterdir() if not path.name.endswith("-shm")}
    assert {name: data for name, data in after.items() if data} == before


# What cannot be done


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    for words in (["list"], ["show", "inc-1"]):
        line = refused("incidents", "--db", tmp_path / "none.db", *words)
        assert str(tmp_path / "none.db") in line
        assert "there is no such file" in line
    assert list(tmp_path.iterdir()) == [], "looking makes no file"


def test_a_store_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "incidents.db"
    path.write_bytes(b"")
    assert "is not an incident store" in refused("incidents", "--db", path, "list")
    path.write_bytes(b"something else entirely" * 100)
    assert str(path) in refused("incidents", "--db", path, "list")
    assert str(tmp_path) in refused("incidents", "--db", tmp_path, "list")


def test_an_incident_that_is_not_there(db: Path) -> None:
    for name in ("inc-none", "", "'; DROP TABLE incident; --", "x" * 1000):
        line = refused("incidents", "--db", db, "show", "--", name)
        assert str(db) in line
        assert "incidents list" in line


def test_a_configuration_that_cannot_be_used(tmp_path: Path) -> None:
    config = tmp_path / "guard.yaml"
    assert str(config) in refused("incidents", "--config", config, "list")
    config.write_text("incidents:\n  paht: x\n")
    line = refused("incidents", "--config", config, "list")
    assert f"{config}:2" in line
    assert "incidents.paht" in line


def test_an_unknown_kind_is_bad_usage(db: Path) -> None:
    result = run("incidents", "--db", db, "list", "--kind", "foreign-raed")
    assert result.exit_code == 2
    assert "foreign-read" in result.stderr


# How it prints


def test_no_escapes_where_there_is_no_terminal(db: Path) -> None:
    for words in (["list"], ["show", KILLED.id]):
        result = guardctl("incidents", "--db", db, *words)
        assert (result.returncode, result.stderr) == (0, "")
        assert "\x1b" not in result.stdout


def test_an_id_stays_whole_however_long(tmp_path: Path) -> None:
    request = "chatcmpl-" + "0123456789abcdef" * 3
    db = store_with(tmp_path / "i.db", replace(KILLED, request=request, tenant="a-tenant-with-a-rather-long-name" * 2))
    for words in (["list"], ["show", KILLED.id]):
        assert request in guardctl("incidents", "--db", db, *words).stdout


@pytest.mark.parametrize(
    "name", ["[/]", "[bold]x[/bold]", "[/nothing]", "a\x1b[2Jb", "tab\tnew\nline", "ünï¢ødé", "\\"]
)
def test_hostile_ids_are_shown_and_do_nothing(tmp_path: Path, name: str) -> None:
    body = finding(Kind.FOREIGN_READ, other_tenants=[name], pool=name, stream=name, reason=name, request=name)
    incident = replace(KILLED, request=name, tenant=name, pool=name, findings=[body])
    store = Store.open(tmp_path / "i.db")
    store.save([(incident, evidence(name, name))])
    store.close()
    for words in (["list"], ["show", KILLED.id]):
        result = run("incidents", "--db", tmp_path / "i.db", *words)
        assert result.exit_code == 0, result.exception
        assert "\x1b" not in result.stdout
        if name.isprintable():
            assert name in result.stdout
    shown = json.loads(run("incidents", "--db", tmp_path / "i.db", "show", KILLED.id, "-o", "json").stdout)
    assert shown["request"] == name
