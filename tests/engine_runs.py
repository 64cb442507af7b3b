"""Recorded runs of the reference engine, one of each fault and one without (see ``record_engine_runs.py``)."""

from __future__ import annotations

import gzip
from pathlib import Path

from guard.receive.otlp import parse_json_line
from guard.records import Record

RUNS = Path(__file__).parent / "data" / "engine_runs"
CORRECT = "correct"
"""The run without a fault."""


def recorded(name: str) -> list[Record]:
    """A run's records in the order in which they arrived."""
    with gzip.open(RUNS / f"{name}.jsonl.gz") as file:
        items = [item for line in file for item in parse_json_line(line).items]
    records = [item for item in items if isinstance(item, Record)]
    assert len(records) == len(items) > 0
    return records
