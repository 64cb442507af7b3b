from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf import json_format
from guard_process import Guardd, case, guards, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from receiving import PROTOBUF, RecordingSink, free, json_request, over_grpc, over_http, request

from guard.counters import ReceiverCounts
from guard.receive.access import Tokens
from guard.receive.forward import Forwarder, without_records
from guard.receive.grpc import SERVICE
from guard.receive.target import Target

guardd = pytest.fixture(guards)
MIXED = (free(0), {"name": "chat", "gen_ai.request.model": "m"}, free(1, name="kv.transfer"), free(1))


@contextmanager
def forwarding(target: str, **options: object) -> Iterator[Forwarder]:
    forwarder = Forwarder(Target.parse(target), **options)  # type: ignore[arg-type]
    forwarder.start()
    try:
        yield forwarder
    finally:
        forwarder.stop(0)
        assert not forwarder._thread.is_alive()


class Collector:
    """Keeps the messages that it is sent over HTTP; answers with the next of `statuses`, the last again and again."""

    def __init__(self, *statuses: int) -> None:
        self.messages: list[ExportTraceServiceRequest] = []
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.gate.wait(30)
                status = statuses[min(collector.asked, len(statuses) - 1)]
                collector.asked += 1
                if status == 200:
                    collector.messages.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def names(self) -> list[str]:
        return [
            span.name
            for message in self.messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_is_no_record_reaches_a_second_receiver(protocol: str) -> None:
    sink, second, counts = RecordingSink(), RecordingSink(), ReceiverCounts()
    with over_grpc(second, counts=counts, tokens=Tokens(["swordfish"])) as to_grpc, over_http(second) as to_http:
        target = f"grpc://{to_grpc.address}" if protocol == "grpc" else to_http.url
        with forwarding(target, token="swordfish") as forwarder, over_http(sink, forwarder=forwarder) as http:
            assert http.post(request(*MIXED)).status_code == 200
            assert http.post(json_request(*MIXED), "application/json").status_code == 200
            assert http.post(request(free(2))).status_code == 200
            until(lambda: forwarder.sent == 4)
        took = counts if protocol == "grpc" else to_http.counts
    assert (took.read, took.ignored, took.calls) == (4, 4, 2), "a message of records only is not sent"
    assert not second.records
    assert len(sink.records) == 5
    assert forwarder.dropped == 0


def test_what_is_sent_on_is_what_came(tmp_path: Path) -> None:
    spans = json.loads(json_request(*MIXED))
    message = {
        "resourceSpans": [
            {"resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "engine"}}]}, **resource}
            for resource in spans["resourceSpans"]
        ]
        + json.loads(json_request(free(0)))["resourceSpans"]
    }
    kept = ExportTraceServiceRequest.FromString(without_records(json.dumps(message).encode(), is_json=True))
    (resource,) = kept.resource_spans
    assert resource.resource.attributes[0].value.string_value == "engine"
    (scope,) = resource.scope_spans
    assert [span.name for span in scope.spans] == ["chat", "kv.transfer"]
    assert scope.spans[0].trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert scope.spans[0].attributes[0].value.string_value == "m"
    assert without_records(request(*MIXED)) == request(MIXED[1], MIXED[2])


@pytest.mark.parametrize(
    "message", [b"{", b"7", b'{"resourceSpans":{"a":1}}', b'{"resourceSpans":[{"scopeSpans":[7]}]}']
)
def test_what_cannot_be_read_is_an_error_of_one_kind(message: bytes) -> None:
    with pytest.raises(ValueError):
        without_records(message, is_json=True)


def test_the_cases_hold_nothing_to_send_on_but_what_is_ignored() -> None:
    for line in (Path(__file__).parent / "data" / "cases" / "clean-two-tenants.jsonl").read_bytes().splitlines():
        direct = json_format.Parse(line, ExportTraceServiceRequest(), ignore_unknown_fields=True)
        names = [s.name for r in direct.resource_spans for c in r.scope_spans for s in c.spans]
        kept = ExportTraceServiceRequest.FromString(without_records(line, is_json=True))
        left = [s.name for r in kept.resource_spans for c in r.scope_spans for s in c.spans]
        assert left == [name for name in names if name in ("chat", "kv.transfer") or not name.startswith("kv.")]


def test_a_target_that_is_away_is_tried_again_and_one_that_refuses_is_not() -> None:
    with Collector(503, 429, 200, 400, 200) as collector, forwarding(collector.url) as forwarder:
        forwarder.put(request({"name": "a"}), 1)
        until(lambda: forwarder.sent == 1)
        forwarder.put(request({"name": "b"}, {"name": "b"}), 2)
        forwarder.put(request({"name": "c"}), 1)
        until(lambda: forwarder.sent == 2)
    assert collector.names == ["a", "c"]
    assert forwarder.dropped == 2


def test_patience_ends() -> None:
    with forwarding("grpc://127.0.0.1:1", patience_s=0) as forwarder:
        forwarder.put(request({"name": "a"}), 1)
        until(lambda: forwarder.dropped == 1)


def test_a_full_queue_drops_and_never_delays() -> None:
    sink = RecordingSink()
    body = request({"name": "chat", "text": "x" * 10_000}, free(0))
    with Collector(200) as collector:
        collector.gate.clear()
        with forwarding(collector.url, queue_bytes=5 * len(body)) as forwarder:
            with over_http(sink, forwarder=forwarder) as http:
                for _ in range(20):
                    assert http.post(body).status_code == 200
            assert forwarder.dropped == 15
            collector.gate.set()
            until(lambda: forwarder.sent == 5)
    assert len(sink.records) == 20
    assert collector.names == ["chat"] * 5


def test_a_stop_sends_what_it_can() -> None:
    with Collector(200) as collector:
        forwarder = Forwarder(Target.parse(collector.url))
        forwarder.start()
        for _ in range(50):
            forwarder.put(request({"name": "a"}), 1)
        forwarder.stop(30)
        forwarder.put(request({"name": "late"}), 1)
    assert (forwarder.sent, forwarder.dropped) == (50, 1)
    assert collector.names == ["a"] * 50


@pytest.mark.parametrize(
    ("text", "protocol", "where", "tls"),
    [
        ("grpc://localhost:4317", "grpc", "localhost:4317", False),
        ("grpcs://[::1]:4317", "grpc", "[::1]:4317", True),
        ("unix:/run/x.sock", "grpc", "unix:/run/x.sock", False),
        ("http://h", "http", "http://h/v1/traces", False),
        ("https://h:4318/otlp", "http", "https://h:4318/otlp", True),
    ],
)
def test_targets(text: str, protocol: str, where: str, tls: bool) -> None:
    assert Target.parse(text)[:3] == (protocol, where, tls)


def test_a_guard_forwards_and_shows_it(guardd: Callable[..., Guardd]) -> None:
    with Collector(200) as collector:
        guard = guardd(listen={"unknown_spans": "forward", "forward_to": collector.url})
        guard.send(request(*MIXED))
        url = f"http://{guard.otlp_http}/v1/traces"
        httpx.post(url, content=request(MIXED[1]), headers={"content-type": PROTOBUF}, trust_env=False)
        until(lambda: guard.metrics()["kvguard_spans_forwarded_total"] == 3)
        assert sorted(collector.names) == ["chat", "chat", "kv.transfer"]
        assert guard.metrics()["kvguard_spans_not_forwarded_total"] == 0
        assert guard.stop() == 0


def test_a_guard_whose_collector_is_away_serves_as_ever(guardd: Callable[..., Guardd]) -> None:
    guard = guardd(listen={"unknown_spans": "forward", "forward_to": "grpc://127.0.0.1:1"})
    messages = case("clean-two-tenants")
    guard.send(request({"name": "chat"}), *messages)
    board = guard.board()
    until(lambda: board.watermark("decode-0", 1) >= 15)
    with grpc.insecure_channel(guard.socket) as channel:
        channel.unary_unary(f"/{SERVICE}/Export")(request({"name": "chat"}), timeout=30)
    assert guard.stop() == 0
    assert "could not be forwarded" in guard.stderr()
