"""Records that a real engine sends mean the same, whatever takes them to the guard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import ALICE, BOB
from guarded import Guarded, guardctl, guarded_engine

from engine.config import PoolConfig

pytestmark = pytest.mark.engine

SMALL: dict[str, Any] = {"prefill": PoolConfig(pages=8), "decode": PoolConfig(pages=128), "context": 1900}
CARRIERS = ("otlp", "ring", "both")


def serve(pair: Guarded) -> list[int]:
    """Two tenants in turn, and one prompt that is more than the prefill pool holds."""
    statuses = [pair.complete("a" * 100, ALICE, max_tokens=200).status_code]
    statuses.append(pair.complete("b" * 250, BOB, max_tokens=20).status_code)
    statuses += [pair.complete(f"{n} harbours are open.", key, max_tokens=30).status_code
                 for n in range(3) for key in (ALICE, BOB)]  # fmt: skip
    return statuses


def findings_of_both(pair: Guarded, path: Path) -> tuple[dict[Any, Any], dict[Any, Any], dict[str, float]]:
    """What the guard found, and what a replay of the spans of the same run finds; and the guard's metrics."""
    pair.until_judged()
    metrics = pair.guard.metrics()
    # Both say all they know when they are told to stop.
    assert pair.engine.stop() == 0
    assert pair.stop_guard() == 0
    live = pair.findings()
    for finding in live.values():
        assert finding.pop("reason")
        assert finding.pop("time_ns")
    pair.sink.write(path)
    run = guardctl("replay", path, "-o", "json")
    assert (run.returncode, run.stderr) == (1 if live else 0, "")
    replayed = json.loads(run.stdout)["findings"]
    return live, {(f["kind"], f["request"], f["pool"]): f for f in replayed}, metrics


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_gives_the_findings_of_the_same_runs_spans(carrier: str, tmp_path: Path) -> None:
    with guarded_engine("--fault", "swallowed-reject", collect=True, carrier=carrier, **SMALL) as pair:
        statuses = serve(pair)
        live, replayed, metrics = findings_of_both(pair, tmp_path / "recorded.jsonl")
    assert statuses == [200, 503] + [200] * 6
    assert "foreign-read" in {kind for kind, _, _ in live}
    assert live == replayed
    came_through(carrier, metrics)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_correct_engine_has_no_finding_over_any_carrier(carrier: str, tmp_path: Path) -> None:
    with guarded_engine(collect=True, carrier=carrier) as pair:
        statuses = serve(pair)
        live, replayed, metrics = findings_of_both(pair, tmp_path / "recorded.jsonl")
    assert statuses == [200] * 8
    assert live == replayed == {}
    came_through(carrier, metrics)


def came_through(carrier: str, metrics: dict[str, float]) -> None:
    """The carrier is the one that was asked for, and lost nothing."""
    spans = metrics['kvguard_spans_total{protocol="grpc"}']
    rows = sum(value for name, value in metrics.items() if name.startswith("kvguard_ring_records_total"))
    assert (spans > 0, rows > 0) == (carrier != "ring", carrier != "otlp")
    assert not any(v for name, v in metrics.items() if name.startswith("kvguard_ring_records_dropped_total"))
    assert metrics["kvguard_stream_gaps_total"] == 0
    if carrier == "both":
        assert metrics["kvguard_records_duplicate_total"] > 0
