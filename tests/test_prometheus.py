from __future__ import annotations

from pathlib import Path

import pytest
from guard.native._core import BoardWriter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporters.prometheus import Exposition
from guard import __version__
from guard.config import load
from guard.counters import Histogram
from guard.incidents.recorder import Recorder
from guard.runtime import Runtime


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    board = BoardWriter.create(tmp_path / "board")
    return Runtime(load(environ={}), board, Recorder(str(tmp_path / "incidents.db")))


def test_both_formats_parse_and_agree(runtime: Runtime) -> None:
    runtime.counters.findings["foreign-read", "kill"] += 2
    runtime.counters.latency.observe(0.0003)
    runtime.counters.latency.observe(99)
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
    assert plain["kvguard_verdict_latency_seconds_sum"] == pytest.approx(99.0003)


def test_counters_are_shown(runtime: Runtime) -> None:
    runtime.counters.receivers["http"].took(1000, 5, 2, 1)
    runtime.counters.receivers["grpc"].refuse("full")
    runtime.counters.records["kv.read"] += 2
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
    for value in (0.00005, 0.0001, 0.0003, 7.0):
        runtime.counters.latency.observe(value)
    buckets = {
        labels[0][1]: value
        for (name, labels), value in _samples(runtime).items()
        if name == "kvguard_verdict_latency_seconds_bucket"
    }
    assert buckets["0.0001"] == 2
    assert buckets["0.0005"] == 3
    assert buckets["5.0"] == 3
    assert buckets["+Inf"] == 4


def test_no_label_names_a_request_or_tenant(runtime: Runtime) -> None:
    names = {label for _, labels in _samples(runtime) for label, _ in labels}
    assert names <= {"action", "kind", "le", "mode", "protocol", "reason", "record", "result", "state", "version"}


def test_a_value_on_a_bound_is_within_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1]


def _samples(runtime: Runtime) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = Exposition(runtime).render("")[0].decode()
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in parse_text(text) for s in f.samples}
