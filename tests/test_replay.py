"""`guardctl replay` as its users run it: a process, its files, its exit status."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from engine_model import Model, Req
from google.protobuf import json_format
from ledger_rig import Rig
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_ledger_native import disturbed
from test_ledger_properties import BUGS, buggy, interleaved

from guard.cli import main
from guard.cli.replay import Replay
from guard.ledger import Ledger, LedgerSettings
from guard.policy import Policy
from guard.receive.otlp import Batch
from guard.records import Record, to_attributes

CASES = Path(__file__).parent / "data" / "cases"
CLEAN = CASES / "clean-two-tenants.jsonl"
REJECTED = CASES / "overlong-rejected-prefill.jsonl"
SHARED = CASES / "prefix-shared-across-tenants.jsonl"


def guardctl(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from guard.cli import main; main()", "replay", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, cwd=cwd, check=False)


def judged(*arguments: object, stdin: bytes = b"", status: int | None = None) -> dict[str, Any]:
    run = guardctl(*arguments, "-o", "json", stdin=stdin)
    out: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == (status if status is not None else 1 if out["findings"] else 0), run.stderr
    return out


def refused(*arguments: object, stdin: bytes = b"") -> str:
    """The one line that says why the input could not be read."""
    run = guardctl(*arguments, stdin=stdin)
    assert run.returncode == 2
    assert run.stdout == b""
    (line,) = run.stderr.decode().splitlines()
    return line


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


# What it prints


def test_nothing_found_is_0() -> None:
    out = judged(CLEAN, status=0)
    assert out["findings"] == []
    assert out["requests"]["r1"] == {
        "tenant": "tenant-a", "verdict": "allow", "lineage": ["tenant-a"], "disclosed": False,
    }  # fmt: skip
    count = len(lines_of(CLEAN))
    assert out["records"] == {"read": count, "kv": count, "ignored": 0, "invalid": 0}


def test_findings_are_1_and_have_exactly_the_fields_of_the_specification() -> None:
    out = judged(REJECTED, status=1)
    assert set(out) == {"findings", "requests", "records"}
    for finding in out["findings"]:
        assert list(finding) == [
            "kind", "severity", "action", "request", "tenant", "other_tenants", "other_requests", "pool", "pages",
            "transfer", "stream", "seq", "confidence",
        ]  # fmt: skip
        for field in ("other_tenants", "other_requests"):
            assert finding[field] == sorted(finding[field])
        assert isinstance(finding["seq"], int)
    (foreign,) = (f for f in out["findings"] if f["kind"] == "foreign-read")
    assert foreign == {
        "kind": "foreign-read", "severity": "critical", "action": "kill", "request": "r2", "tenant": "tenant-b",
        "other_tenants": ["tenant-a"], "other_requests": ["r1"], "pool": "decode-0", "pages": foreign["pages"],
        "transfer": None, "stream": "decode-0", "seq": foreign["seq"], "confidence": "full",
    }  # fmt: skip
    assert out["requests"]["r2"] == {
        "tenant": "tenant-b", "verdict": "kill", "lineage": ["tenant-a", "tenant-b"], "disclosed": True,
    }  # fmt: skip


def test_findings_stand_in_the_order_of_time() -> None:
    seqs = [f["seq"] for f in judged(REJECTED)["findings"] if f["stream"] == "decode-0"]
    assert seqs == sorted(seqs)


def test_a_table_for_people() -> None:
    run = guardctl(REJECTED)
    text = run.stdout.decode()
    assert run.returncode == 1
    assert run.stderr == b""
    for word in ("SEVERITY", "KIND", "foreign-read", "tenant-b", "decode-0#", "kill"):
        assert word in text
    assert "requests, 1 to be killed, 1 disclosed" in text
    assert "\x1b" not in text, "no colours where no terminal is"
    run = guardctl(CLEAN)
    assert run.returncode == 0
    assert run.stdout.decode().startswith("0 findings; 2 requests, 0 to be killed, 0 disclosed;")


# Where it reads from


def test_standard_input() -> None:
    assert judged("-", stdin=REJECTED.read_bytes()) == judged(REJECTED)


def delimited(path: Path) -> bytes:
    out = bytearray()
    for line in lines_of(path):
        message = json_format.Parse(line, ExportTraceServiceRequest(), ignore_unknown_fields=True).SerializeToString()
        length = len(message)
        while length > 0x7F:
            out.append(length & 0x7F | 0x80)
            length >>= 7
        out.append(length)
        out += message
    return bytes(out)


@pytest.mark.parametrize("path", [REJECTED, CLEAN], ids=lambda path: path.stem)
def test_length_delimited_protobuf(tmp_path: Path, path: Path) -> None:
    (tmp_path / "trace.pb").write_bytes(delimited(path))
    assert judged(tmp_path / "trace.pb") == judged(path)


def test_several_files_are_one_input_in_any_order(tmp_path: Path) -> None:
    streams: dict[str, list[bytes]] = {}
    for line in lines_of(REJECTED):
        spans = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
        (stream,) = (a["value"]["stringValue"] for a in spans[0]["attributes"] if a["key"] == "kv.stream.id")
        streams.setdefault(stream, []).append(line)
    files = []
    for stream, lines in streams.items():
        files.append(tmp_path / f"{stream}.jsonl")
        files[-1].write_bytes(b"".join(lines))
    assert len(files) > 1
    whole = judged(REJECTED)
    for order in itertools.permutations(files):
        assert judged(*order) == whole
    # And a stream may be spread over files, its end first.
    half = len(lines_of(REJECTED)) // 2
    (tmp_path / "first").write_bytes(b"".join(lines_of(REJECTED)[:half]))
    (tmp_path / "second").write_bytes(b"".join(lines_of(REJECTED)[half:]))
    assert judged(tmp_path / "second", tmp_path / "first") == whole


def test_the_same_file_twice_says_nothing_new() -> None:
    once, twice = judged(REJECTED), judged(REJECTED, REJECTED)
    assert twice["findings"] == once["findings"]
    assert twice["requests"] == once["requests"]


def test_blank_lines_and_spans_that_are_no_records() -> None:
    other = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"kv.transfer"},{"name":"GET /"}]}]}]}\n'
    text = b"\n" + b"\n \n".join([*lines_of(REJECTED), other]) + b"\n\n"
    out, plain = judged("-", stdin=text), judged(REJECTED)
    assert out["findings"] == plain["findings"]
    assert out["records"] == {**plain["records"], "read": plain["records"]["read"] + 2, "ignored": 2}


# What cannot be read


def with_broken_line() -> bytes:
    lines = lines_of(REJECTED)
    return b"".join([*lines[:3], b'{"resourceSpans": [\n', *lines[3:]])


def test_a_broken_line_is_counted_and_named_and_does_not_stop_the_rest() -> None:
    run = guardctl("-", "-o", "json", stdin=with_broken_line())
    out, plain = json.loads(run.stdout), judged(REJECTED)
    assert run.returncode == 1
    (line,) = run.stderr.decode().splitlines()
    assert line.startswith("guardctl: -, line 4: not an OTLP/JSON trace message")
    assert out["findings"] == plain["findings"]
    assert out["records"] == {**plain["records"], "read": plain["records"]["read"] + 1, "invalid": 1}


def test_strict_stops_at_it() -> None:
    assert refused("-", "--strict", "-o", "json", stdin=with_broken_line()).startswith("guardctl: -, line 4: not an")
    assert judged(CLEAN, "--strict", status=0)["findings"] == []


def with_invalid_record() -> bytes:
    """The first write's page set is broken: its place in the stream is taken all the same."""
    lines = lines_of(CLEAN)
    at = next(n for n, line in enumerate(lines) if b'"kv.write"' in line)
    message = json.loads(lines[at])
    for attribute in message["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]:
        if attribute["key"] == "kv.tokens":
            attribute["value"] = {"stringValue": "many"}
    lines[at] = json.dumps(message).encode() + b"\n"
    return b"".join(lines)


def test_an_invalid_record_is_named_and_leaves_no_gap() -> None:
    run = guardctl("-", "-o", "json", stdin=with_invalid_record())
    (line,) = run.stderr.decode().splitlines()
    assert line.startswith("guardctl: -, line ")
    assert "kv.write (stream prefill-0, seq " in line
    assert "kv.tokens is 'many', not an integer" in line
    out = json.loads(run.stdout)
    assert out["records"]["invalid"] == 1
    assert out["records"]["kv"] == out["records"]["read"] - 1
    assert "stream-gap" not in {f["kind"] for f in out["findings"]}


def test_strict_stops_at_an_invalid_record() -> None:
    assert "kv.tokens is 'many'" in refused("-", "--strict", stdin=with_invalid_record())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.jsonl") == f"guardctl: {tmp_path}/none.jsonl: No such file or directory"
    assert refused(CLEAN, tmp_path / "none.jsonl", "-o", "json").endswith("No such file or directory")
    assert refused(tmp_path) == f"guardctl: {tmp_path}: Is a directory"


def test_protobuf_that_breaks_off(tmp_path: Path) -> None:
    data = delimited(CLEAN)
    (tmp_path / "cut.pb").write_bytes(data[:-1])
    line = refused(tmp_path / "cut.pb")
    assert line.startswith(f"guardctl: {tmp_path}/cut.pb")
    assert "is cut off after" in line
    (tmp_path / "text.pb").write_bytes(CLEAN.read_bytes())
    assert "text.pb" in refused(tmp_path / "text.pb")


def test_an_input_of_nothing_finds_nothing() -> None:
    out = judged("-", stdin=b"", status=0)
    assert out == {"findings": [], "requests": {}, "records": {"read": 0, "kv": 0, "ignored": 0, "invalid": 0}}


def test_bytes_that_are_no_text() -> None:
    run = guardctl("-", "-o", "json", stdin=b"\xff\xfe\n" + CLEAN.read_bytes())
    assert run.returncode == 0
    assert json.loads(run.stdout)["records"]["invalid"] == 1


# Policy


def test_policy_from_the_command_line() -> None:
    assert "foreign-share" in {f["kind"] for f in judged(SHARED)["findings"]}
    assert judged(SHARED, "--set", "policy.prefix_sharing=permit", status=0)["findings"] == []


def test_policy_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "guard.yaml").write_text("policy:\n  actions: {foreign-read: observe}\n")
    out = judged(REJECTED, "--config", tmp_path / "guard.yaml")
    (foreign,) = (f for f in out["findings"] if f["kind"] == "foreign-read")
    assert (foreign["action"], foreign["severity"]) == ("observe", "critical")


def test_a_policy_that_is_none() -> None:
    assert "prefix_sharing" in refused(CLEAN, "--set", "policy.prefix_sharing=maybe")
    assert refused(CLEAN, "--config", "/nowhere/guard.yaml").startswith("guardctl: /nowhere/guard.yaml")


def test_bad_usage_is_2() -> None:
    for arguments in ((), (CLEAN, "-o", "xml"), (CLEAN, "--no-such-option")):
        assert guardctl(*arguments).returncode == 2


def test_a_trace_through_the_process_equals_the_ledger(tmp_path: Path) -> None:
    model = Model(choices(7), pages=12)
    model.run(600)
    path = tmp_path / "model.jsonl"
    path.write_text("".join(as_line(record) for record in model.log))
    out = judged(path, status=0)
    assert out["records"]["kv"] == len(model.log)
    assert set(out["requests"]) == {record.request for record in model.log} - {None}


# Both ledgers


@pytest.mark.parametrize("output", ["json", "table"])
@pytest.mark.parametrize("path", sorted(CASES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_both_ledgers_print_the_same(tmp_path: Path, path: Path, output: str) -> None:
    arguments = json.loads(path.with_suffix(".expect.json").read_text())["args"]
    printed = [
        CliRunner().invoke(main, ["replay", str(file), "-o", output, "--ledger", ledger, *arguments])
        for ledger in ("native", "python")
        for file in (path, as_protobuf(tmp_path, path))
    ]
    assert len({(p.exit_code, p.stdout.replace(".pb", ".jsonl"), p.stderr) for p in printed}) == 1
    assert printed[0].stdout


def as_protobuf(directory: Path, path: Path) -> Path:
    file = directory / f"{path.stem}.pb"
    file.write_bytes(delimited(path))
    return file


def test_both_ledgers_print_the_same_of_a_long_trace(tmp_path: Path) -> None:
    records: list[Record] = []
    for seed in range(4):
        rng = random.Random(seed)
        log, _ = buggy(seed, 400, 200, rng.choice(BUGS))
        # Each its own requests, one after the other on the same streams' next epochs.
        records += [
            msgspec.structs.replace(
                record, epoch=record.epoch + 100 * seed, time_ns=record.time_ns + seed * 10**12,
                request=record.request and f"{record.request}.{seed}",
            )
            for record in disturbed(interleaved(log, seed), rng)
            if record.NAME
        ]  # fmt: skip
    path = tmp_path / "long.jsonl"
    path.write_text("".join(map(as_line, records)))
    arguments = ["-o", "json", "--set", "ledger.max_ended=20", "--set", "ledger.restart_records=16"]
    printed = [judged(path, "--ledger", ledger, *arguments) for ledger in ("native", "python")]
    assert printed[0] == printed[1]
    assert list(printed[0]["requests"]) == list(printed[1]["requests"])
    assert len(printed[0]["findings"]) > 10
    assert printed[0]["records"]["kv"] > 1000


def test_invalid_records_in_protobuf_are_named_by_both(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(with_invalid_record())
    path = as_protobuf(tmp_path, tmp_path / "trace.jsonl")
    runs = [guardctl(path, "-o", "json", "--ledger", ledger) for ledger in ("native", "python")]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == runs[1].stderr
    assert b"trace.pb, message " in runs[0].stderr
    assert refused(path, "--strict") == refused(path, "--strict", "--ledger", "python")


# How far it is


def on_a_terminal(*arguments: object, stdin: bytes | None = None) -> tuple[bytes, bytes]:
    """Standard output, and what stood on the terminal that is standard error."""
    shown, terminal = pty.openpty()
    command = [sys.executable, "-c", "from guard.cli import main; main()", "replay", *map(str, arguments)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    text = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal is gone with its last writer
            while data := os.read(shown, 65536):
                text.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    out, _ = run.communicate(stdin, timeout=120)
    reader.join(60)
    os.close(shown)
    return out, bytes(text)


def test_a_progress_bar_on_a_terminal() -> None:
    out, shown = on_a_terminal(REJECTED, "-o", "json")
    assert json.loads(out) == judged(REJECTED)
    assert b"%" in shown
    assert b"records" in shown


def test_of_standard_input_the_records_are_counted() -> None:
    out, shown = on_a_terminal("-", "-o", "json", stdin=with_broken_line())
    assert b"%" not in shown
    assert b"records" in shown
    assert b"line 4: not an OTLP/JSON trace message" in shown
    assert json.loads(out)["records"]["invalid"] == 1


def as_line(record: Record) -> str:
    names = {str: "stringValue", int: "intValue", bool: "boolValue"}
    attributes = [{"key": k, "value": {names[type(v)]: v}} for k, v in to_attributes(record).items()]
    span = {"name": record.NAME, "startTimeUnixNano": str(record.time_ns), "attributes": attributes}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}) + "\n"


# Memory


def choices(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(256)


def stuck(model: Model) -> list[Req]:
    return [r for r in {life[0].id: life[0] for w in model.workers for life in w.lives}.values() if not r.cancelled]


@pytest.mark.parametrize("native", [True, False])
def test_memory_goes_with_pools_and_live_requests_not_with_the_trace(native: bool) -> None:
    history, pages = 64, 12
    model = Model(choices(1), pages=pages)
    settings = LedgerSettings(reorder_window_ms=None, max_ended=history, restart_records=32)
    replay = Replay(Policy(), settings, native=native)
    fed = most_live = 0
    while fed < 30_000:
        model.run(100)
        if len(stuck(model)) > 40:  # the model's clients give up when nothing moves
            for r in stuck(model):
                r.cancelled = True
        live = {life[0].id for worker in model.workers for life in worker.lives}
        replay.feed(Batch(items=list(model.log[fed:]), read=len(model.log) - fed), "model", strict=True)
        fed = len(model.log)
        replay._feed.flush()
        sizes = replay.ledger.sizes
        most_live = max(most_live, len(live))
        assert sizes["pages"] <= len(model.workers) * pages
        assert sizes["requests_ended"] <= history
        # Requests that a restarted worker had are over once its new epoch begins, a few records later.
        assert sizes["requests_live"] <= len(live) + 64
        assert sizes["records_held"] <= 64
        assert sizes["transfers"] <= sizes["requests_live"] + history
        if not isinstance(replay.ledger, Ledger):
            assert replay.ledger._core.bytes() < 4 << 20
            continue
        world = replay.ledger._world
        assert len(world.done) <= history + 1
        assert len(world.suspects) <= 4 * (sizes["pages"] + sizes["requests_live"])
        assert sum(len(page.late) for pool in world.pools.values() for page in pool.pages.values()) <= 4 * 3 * pages
        assert len(world.findings) == 0
    assert most_live < 200
    replay.finish()
    assert replay.findings == []
    assert replay.ledger.sizes["records_held"] == 0
    assert {request for request, _ in replay.requests()} == {record.request for record in model.log} - {None}


@pytest.mark.parametrize("native", [True, False])
def test_an_id_that_comes_again_after_it_was_forgotten_keeps_its_verdict(native: bool) -> None:
    rig = Rig(pools="d")
    rig.left_behind("d", "b1", "0")
    rig.alloc("d", "a1", "0")
    rig.read("d", "a1", "0")
    rig.respond("d", "a1")
    rig.over("d", "a1")
    rig.free("d", "a1", "0")
    for number in range(3):
        rig.left_behind("d", f"c{number}", "1")
    rig.restart("d")
    rig.admit("d", "a1")
    replay = Replay(Policy(), LedgerSettings(reorder_window_ms=None, max_ended=1), native=native)
    replay.feed(Batch(items=list(rig.log)), "rig", strict=True)
    replay.finish()
    assert dict(replay.requests())["a1"] == {
        "tenant": "tenant-a", "verdict": "kill", "lineage": ["tenant-a", "tenant-b"], "disclosed": True,
    }  # fmt: skip
    assert dict(replay.requests())["c1"]["verdict"] == "allow"
