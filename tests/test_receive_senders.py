"""Senders that others wrote: the OpenTelemetry SDK's exporters, and rotel, into both receivers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from guard_process import Guardd, case, guards, until
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags
from receiving import PROTOBUF, RecordingSink, free, over_grpc, over_http, request
from rotel_process import rotel

from guard.act.board import Verdict
from guard.receive.grpc import SERVICE
from guard.records import Free, PageSet

guardd = pytest.fixture(guards)
INCIDENT_CASE = "overlong-rejected-prefill"


def export(exporter: SpanExporter, *fields: dict[str, Any]) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("engine")
    for attributes in fields:
        span = tracer.start_span(
            attributes["name"], attributes={k: v for k, v in attributes.items() if k != "name"}, start_time=7
        )
        span.add_event("something else", {"x": 1})
        span.add_link(SpanContext(1, 2, False, TraceFlags(1)))
        span.end()
    provider.shutdown()


def exporter_to(protocol: str, address: object, compressed: bool, **options: Any) -> SpanExporter:
    if protocol == "grpc":
        compression = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression
        return GrpcExporter(endpoint=f"http://{address}", insecure=True, compression=compression, **options)
    compression = Compression.Gzip if compressed else Compression.NoCompression
    return HttpExporter(endpoint=f"http://{address}/v1/traces", compression=compression, **options)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_sdks_exporters(protocol: str, compressed: bool) -> None:
    sink = RecordingSink()
    with over_grpc(sink) as receiver, over_http(sink) as http:
        address = receiver.address if protocol == "grpc" else http.receiver.address
        export(exporter_to(protocol, address, compressed), free(0), free(0, name="chat"), free(1, pages="5,7-9"))
    expected = [
        Free(
            stream="decode-0", epoch=1, seq=seq, time_ns=7, request="r1", tenant="tenant-a", pages=PageSet.parse(pages)
        )
        for seq, pages in ((0, "0-3"), (1, "5,7-9"))
    ]
    assert sink.records == expected


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_full_queue_makes_the_sdk_send_again_and_nothing_is_lost(protocol: str) -> None:
    sink = RecordingSink(2)
    with over_grpc(sink) as receiver, over_http(sink) as http:
        address = receiver.address if protocol == "grpc" else http.receiver.address
        exporter = exporter_to(protocol, address, False)
        results: list[SpanExportResult] = []
        inner = exporter.export
        refusals = []

        def counted(spans: Any) -> SpanExportResult:
            results.append(inner(spans))
            return results[-1]

        full = sink.full

        def made_room_once_asked() -> bool:
            if full():
                refusals.append(1)
                sink.drain()
                return True
            return False

        sink.full = made_room_once_asked  # type: ignore[method-assign]
        exporter.export = counted  # type: ignore[method-assign]
        export(exporter, *(free(seq) for seq in range(5)))
    assert results == [SpanExportResult.SUCCESS] * 5
    assert refusals == [1, 1]
    assert sink.places == [("decode-0", seq) for seq in range(5)]


@pytest.mark.parametrize("sent", ["grpc", "http"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_rotel_passes_records_on(protocol: str, sent: str, tmp_path: Path) -> None:
    sink = RecordingSink()
    with over_grpc(sink) as receiver, over_http(sink) as http:
        endpoint = f"http://{receiver.address}" if protocol == "grpc" else f"http://{http.receiver.address}"
        options = (
            "--exporter", "otlp", "--otlp-exporter-endpoint", endpoint, "--otlp-exporter-protocol", protocol,
            "--batch-timeout", "50ms",
        )  # fmt: skip
        with rotel(tmp_path, *options) as between:
            messages = [request(*(free(10 * n + k) for k in range(10))) for n in range(20)]
            if sent == "grpc":
                with grpc.insecure_channel(between.grpc) as channel:
                    for message in messages:
                        channel.unary_unary(f"/{SERVICE}/Export")(message, timeout=30)
            else:
                for message in messages:
                    url = f"http://{between.http}/v1/traces"
                    answer = httpx.post(url, content=message, headers={"content-type": PROTOBUF}, trust_env=False)
                    assert answer.status_code // 100 == 2
            until(lambda: len(sink.records) >= 200)
    assert sorted(sink.places) == [("decode-0", seq) for seq in range(200)]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_incident_by_way_of_rotel_ends_in_the_verdict(
    protocol: str, guardd: Callable[..., Guardd], tmp_path: Path
) -> None:
    guard = guardd(listen={"otlp_grpc": "127.0.0.1:0"}, ledger={"reorder_window_ms": 5000})
    endpoint = f"http://{guard.socket if protocol == 'grpc' else guard.otlp_http}"
    options = ("--exporter", "otlp", "--otlp-exporter-endpoint", endpoint, "--otlp-exporter-protocol", protocol)
    with (
        rotel(tmp_path, *options, "--batch-timeout", "50ms") as between,
        grpc.insecure_channel(between.grpc) as channel,
    ):
        for message in case(INCIDENT_CASE):
            channel.unary_unary(f"/{SERVICE}/Export")(message, timeout=30)
        board = guard.board()
        until(lambda: board.verdict("r2") is Verdict.KILL)
        until(lambda: board.watermark("decode-0", 1) == 16)
    metrics = guard.metrics()
    assert metrics[f'kvguard_spans_total{{protocol="{protocol}"}}'] == 32
    assert metrics[f'kvguard_spans_invalid_total{{protocol="{protocol}"}}'] == 0
