from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporters.prometheus import Exposition
from guard import __version__
from guard.config import load
from guard.incidents.recorder import Recorder
from guard.ledger import LedgerSettings
from guard.native._core import LATENCY_BOUNDS, BoardWriter, RingWriter, Rows
from guard.records import PageSet, Read
from guard.runtime import Runtime


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    board = BoardWriter.create(tmp_path / "board")
    ring = [f"ring.path={tmp_path}/ring", "ring.rows=64", "ring.lanes=2"]
    config = load(environ={}, settings=[*ring, f"incidents.path={tmp_path}/incidents.db"])
    return Runtime(config, board, Recorder(str(tmp_path / "incidents.db")))


def judge(runtime: Runtime, *ages_s: float) -> None:
    """Has the guard judge reads that happened so long ago, and stops it."""
    rows = Rows()
    now_ns = time.time_ns()
    pages = PageSet.parse("0")
    for seq, age_s in enumerate(ages_s):
        time_ns = now_ns - int(age_s * 1e9)
        rows.append(Read(stream="s", epoch=1, seq=seq, time_ns=time_ns, request="r", tenant="t", pages=pages, tokens=1))
    assert runtime.inbox.put(rows, now_ns)
    runtime.start()
    runtime.stop(60)


def test_both_formats_parse_and_agree(runtime: Runtime) -> None:
    runtime.counters.findings["foreign-read", "kill"] += 2
    judge(runtime, 0, 99)
    text, kind = Exposition(runtime).render("")
    open_text, open_kind = Exposition(runtime).render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("text/plain")
    assert open_kind.startswith("application/openmetrics-text")
    assert open_text.endswith(b"# EOF\n")
    plain = {s.name: s.value for f in parse_text(text.decode()) for s in f.samples if not s.labels}
    opened = {s.name: s.value for f in parse_openmetrics(open_text.decode()) for s in f.samples if not s.labels}
    moving = {name for name in plain if name.startswith("process_")} | {"kvguard_start_time_seconds"}
    assert {n: v for n, v in plain.items() if n not in moving} == {n: v for n, v in opened.items() if n not in moving}
    assert plain["kvguard_verdict_latency_seconds_count"] == 2
    assert 99 < plain["kvguard_verdict_latency_seconds_sum"] < 129


def test_counters_are_shown(runtime: Runtime) -> None:
    runtime.counters.receivers["http"].took(1000, 5, 2, 1)
    runtime.counters.receivers["grpc"].refuse("full")
    judge(runtime, 0, 0)
    samples = _samples(runtime)
    http, grpc = ("protocol", "http"), ("protocol", "grpc")
    assert samples["kvguard_export_calls_total", (http,)] == 1
    assert samples["kvguard_export_bytes_total", (http,)] == 1000
    assert samples["kvguard_spans_total", (http,)] == 5
    assert samples["kvguard_spans_total", (grpc,)] == 0
    assert samples["kvguard_spans_ignored_total", (http,)] == 2
    assert samples["kvguard_spans_invalid_total", (http,)] == 1
    assert samples["kvguard_export_calls_refused_total", (grpc, ("reason", "full"))] == 1
    assert samples["kvguard_export_calls_refused_total", (grpc, ("reason", "malformed"))] == 0
    assert samples["kvguard_spans_forwarded_total", ()] == 0
    assert samples["kvguard_records_total", (("record", "kv.read"),)] == 2
    assert samples["kvguard_build_info", (("mode", "monitor"), ("version", __version__))] == 1
    assert samples["kvguard_queue_capacity_records", ()] == 262_144


def test_buckets_are_cumulative(runtime: Runtime) -> None:
    judge(runtime, 40, 0.9, 2000)
    buckets = {
        labels[0][1]: value
        for (name, labels), value in _samples(runtime).items()
        if name == "kvguard_verdict_latency_seconds_bucket"
    }
    assert len(buckets) == len(LATENCY_BOUNDS) + 1
    assert buckets["0.5"] == 0
    assert buckets["5.0"] <= 1
    assert buckets["+Inf"] == 3
    assert sorted(buckets.values()) == list(buckets.values())


def test_every_limit_and_every_lane_has_its_sample(runtime: Runtime, tmp_path: Path) -> None:
    limits = {name.removeprefix("max_") for name in LedgerSettings.model_fields if name.startswith("max_")}
    shown = {labels[0][1] for name, labels in _samples(runtime) if name == "kvguard_records_dropped_total"}
    assert shown == limits - {"held", "ended", "pool_pages"} | {"page_transfers"}
    writer = RingWriter(f"{tmp_path}/ring", "s", 1)
    writer.skip()
    pages = PageSet.parse("0")
    for seq in range(100):
        writer.emit(Read(stream="s", epoch=1, seq=seq, time_ns=1, request="r", tenant="t", pages=pages, tokens=1), seq)
    samples = _samples(runtime)
    assert samples["kvguard_ring_lanes", ()] == 2
    assert samples["kvguard_ring_lanes_taken", ()] == 1
    written = samples["kvguard_ring_records_total", (("lane", "0"),)]
    assert 0 < written < 100
    assert samples["kvguard_ring_records_dropped_total", (("lane", "0"),)] == 100 - written
    assert 0 < samples["kvguard_ring_rows_waiting", ()] <= 64
    writer.close()


def test_no_label_names_a_request_or_tenant(runtime: Runtime) -> None:
    names = {label for _, labels in _samples(runtime) for label, _ in labels}
    assert names <= {
        "action",
        "kind",
        "lane",
        "le",
        "limit",
        "mode",
        "protocol",
        "reason",
        "record",
        "result",
        "state",
        "version",
    }


def _samples(runtime: Runtime) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = Exposition(runtime).render("")[0].decode()
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in parse_text(text) for s in f.samples}
