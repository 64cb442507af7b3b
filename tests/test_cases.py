"""Every recorded case finds what it must find, and nothing else, in any order in which its streams can arrive."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ledger_rig import both_ledgers, make_ledger

from guard.config import load
from guard.findings import Finding
from guard.receive.otlp import parse_json_line
from guard.records import PageSet, Record

pytestmark = both_ledgers

CASES = Path(__file__).parent / "data" / "cases"
NAMES = sorted(path.stem for path in CASES.glob("*.jsonl"))


def records_of(name: str) -> list[Record]:
    items = [i for line in (CASES / f"{name}.jsonl").read_bytes().splitlines() for i in parse_json_line(line).items]
    records = [item for item in items if isinstance(item, Record)]
    assert len(records) == len(items)
    return records


def judged(records: list[Record], arguments: list[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Findings and verdicts under a case's arguments."""
    config = load(environ={}, settings=[word for word in arguments if word != "--set"])
    found: list[Finding] = []
    ledger = make_ledger(
        config.policy,
        config.ledger.model_copy(update={"reorder_window_ms": None}),
        lambda finding, new: found.append(finding) if new else None,
    )
    for record in records:
        ledger.feed(record)
    ledger.finish()
    findings = sorted((f.as_json() for f in found), key=str)
    return findings, {request.id: request.verdict for request in ledger.requests.values()}


def matches(wanted: dict[str, Any], finding: dict[str, Any]) -> bool:
    """A wanted field is met by pages or lists that hold it, and by anything else that equals it."""
    for field, value in wanted.items():
        got = finding.get(field)
        if field == "pages":
            met = set(PageSet.parse(value)) <= set(PageSet.parse(got or ""))
        elif isinstance(value, list):
            met = set(value) <= set(got or ())
        else:
            met = got == value
        if not met:
            return False
    return True


def check(name: str, findings: list[dict[str, Any]], verdicts: dict[str, str]) -> None:
    expect = json.loads((CASES / f"{name}.expect.json").read_text())
    if expect["clean"]:
        assert findings == []
    for wanted in expect["must_find"]:
        assert any(matches(wanted, finding) for finding in findings), wanted
    assert not {finding["kind"] for finding in findings} & set(expect["must_not_find"])
    assert {request: verdicts.get(request) for request in expect["verdicts"]} == expect["verdicts"]


def arguments_of(name: str) -> list[str]:
    arguments: list[str] = json.loads((CASES / f"{name}.expect.json").read_text())["args"]
    return arguments


def interleaved(records: list[Record], seed: int) -> list[Record]:
    """Each stream in its own order, the streams in any."""
    rng = random.Random(seed)
    streams: dict[str, list[Record]] = {}
    for record in records:
        streams.setdefault(record.stream, []).append(record)
    turns = [queue for queue in streams.values() for _ in queue]
    rng.shuffle(turns)
    return [queue.pop(0) for queue in turns]


def test_there_are_cases() -> None:
    assert len(NAMES) >= 10
    assert {path.name.removesuffix(".expect.json") for path in CASES.glob("*.expect.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_finds_what_it_must(name: str) -> None:
    check(name, *judged(records_of(name), arguments_of(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_judged_alike_in_every_order(name: str) -> None:
    records, arguments = records_of(name), arguments_of(name)
    as_recorded = judged(records, arguments)
    for seed in range(50):
        again = judged(interleaved(records, seed), arguments)
        check(name, *again)
        assert again == as_recorded


@pytest.mark.parametrize("name", [n for n in NAMES if n != "never-given-back"])
def test_records_of_one_epoch_may_arrive_in_any_order_at_all(name: str) -> None:
    records, arguments = records_of(name), arguments_of(name)
    for seed in range(10):
        shuffled = records[:]
        random.Random(seed).shuffle(shuffled)
        check(name, *judged(shuffled, arguments))
