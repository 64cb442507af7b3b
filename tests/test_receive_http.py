from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from guard_process import CASES, case, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from receiving import PROTOBUF, Client, RecordingSink, free, gzipped, json_request, over_http, request

from guard.receive.access import Tokens
from guard.receive.address import Address, BindError
from guard.receive.decode import decode_json, decode_protobuf
from guard.receive.http import HttpReceiver
from guard.receive.intake import Intake
from guard.records import Free, Record

JSON = "application/json"


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def http(sink: RecordingSink) -> Iterator[Client]:
    with over_http(sink, max_message_bytes=1 << 20) as client:
        yield client


def test_records_are_queued_before_the_answer(http: Client, sink: RecordingSink) -> None:
    data = request(free(0), free(1, name="chat"), free(2))
    response = http.post(data)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == PROTOBUF
    assert sink.places == [("decode-0", 0), ("decode-0", 2)]
    assert sink.times[0] > 1_700_000_000_000_000_000
    counts = http.counts
    assert (counts.calls, counts.bytes, counts.read, counts.ignored, counts.invalid) == (1, len(data), 3, 1, 0)


def test_json_gives_the_same_records(http: Client, sink: RecordingSink) -> None:
    spans = (free(0), free(1, name="chat"), free(2, pages="7,3-5"))
    response = http.post(json_request(*spans), "application/json; charset=utf-8")
    assert (response.status_code, response.json()) == (200, {})
    assert response.headers["content-type"] == JSON
    http.post(request(*spans))
    assert sink.records[:2] == sink.records[2:]
    assert http.counts.ignored == 2


@pytest.mark.parametrize("path", sorted(CASES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_case_is_the_same_in_both_encodings(path: Path) -> None:
    lines = path.read_bytes().splitlines()
    for line, message in zip(lines, case(path.stem), strict=True):
        assert decode_json(line).rows.tobytes() == decode_protobuf(message).rows.tobytes()


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("make", [request, json_request])
def test_compressed_bodies(http: Client, sink: RecordingSink, encoding: str, compress: Any, make: Any) -> None:
    body = compress(make(free(0)))
    kind = JSON if make is json_request else PROTOBUF
    assert http.post(body, kind, content_encoding=encoding).status_code == 200
    assert sink.places == [("decode-0", 0)]
    assert http.counts.bytes == len(body)


def test_invalid_records_are_a_partial_success_that_names_them(http: Client, sink: RecordingSink) -> None:
    bad = [free(seq, pages="3-1") for seq in range(1, 6)]
    partial = ExportTraceServiceResponse.FromString(http.post(request(free(0), *bad)).content).partial_success
    told = http.post(json_request(free(0), *bad), JSON).json()["partialSuccess"]
    assert partial.rejected_spans == 5
    assert told["rejectedSpans"] == "5", "protobuf's JSON has 64-bit integers as text"
    for message in (partial.error_message, told["errorMessage"]):
        assert "kv.free (stream decode-0, seq 1): kv.pages" in message
        assert message.endswith("and 2 more")
    assert [type(record) for record in sink.records] == ([Free] + [Record] * 5) * 2
    assert sink.records[:6] == sink.records[6:]


def test_a_full_queue_is_retryable_and_keeps_nothing() -> None:
    sink = RecordingSink(1)
    with over_http(sink) as http:
        assert http.post(request(free(0))).status_code == 200
        for body, kind in ((request(free(1)), PROTOBUF), (json_request(free(1)), JSON)):
            response = http.post(body, kind)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            if kind == JSON:
                assert response.json()["code"] == 8
                assert response.json()["details"][0]["retryDelay"] == "0.050s"
            else:
                status, retry = Status.FromString(response.content), RetryInfo()
                assert status.code == 8
                assert status.details[0].Unpack(retry)
                assert retry.retry_delay.nanos == 50_000_000
        sink.drain()
        assert http.post(request(free(1))).status_code == 200
        assert http.counts.refused["full"] == 2
    assert sink.places == [("decode-0", 0), ("decode-0", 1)]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "reason"),
    [
        ("POST", "/v1/metrics", {}, 404, "unsupported"),
        ("POST", "/", {}, 404, "unsupported"),
        ("GET", "/v1/traces", {}, 405, "unsupported"),
        ("PUT", "/v1/traces", {}, 405, "unsupported"),
        ("POST", "/v1/traces", {"content-type": "text/plain"}, 415, "unsupported"),
        ("POST", "/v1/traces", {"content-type": ""}, 415, "unsupported"),
        ("POST", "/v1/traces", {"content-type": "application/json; charset=latin-1"}, 415, "unsupported"),
        ("POST", "/v1/traces", {"content-encoding": "br"}, 415, "unsupported"),
        ("POST", "/v1/traces", {"expect": "the-unexpected"}, 417, "unsupported"),
    ],
)
def test_what_is_no_export_is_told_so(
    http: Client, method: str, path: str, headers: dict[str, str], status: int, reason: str
) -> None:
    response = http.client.request(
        method, http.url + path, content=request(free(0)), headers={"content-type": PROTOBUF} | headers
    )
    assert response.status_code == status
    assert response.headers["connection"] == "close"
    assert http.counts.refused[reason] == 1
    if status == 405:
        assert response.headers["allow"] == "POST"
    if response.headers["content-type"] == JSON:
        assert response.json()["message"]
    else:
        assert Status.FromString(response.content).message
    assert http.post(request(free(0))).status_code == 200, "and the receiver goes on"


def test_head_has_no_body(http: Client) -> None:
    assert http.client.head(http.url + "/v1/traces").status_code == 405


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"{", b"[]", b'{"resourceSpans":7}'])
@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
def test_what_is_no_otlp_is_refused_in_its_own_encoding(http: Client, body: bytes, kind: str) -> None:
    response = http.post(body, kind)
    assert response.status_code == 400
    assert response.headers["content-type"] == kind
    if kind == JSON:
        assert response.json()["code"] == 3
    else:
        assert Status.FromString(response.content).code == 3
    assert http.counts.refused["malformed"] == 1


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
def test_a_message_over_the_limit(http: Client, kind: str, chunked: bool) -> None:
    body = bytes(2 << 20)
    response = http.post(iter([body[:1000], body[1000:]]) if chunked else body, kind)
    assert response.status_code == 413
    assert http.counts.refused["too-large"] == 1
    assert http.post(request(free(0))).status_code == 200


def test_a_bomb_is_refused_and_costs_no_more_than_the_limit(http: Client) -> None:
    bomb = gzipped(bytes(256 << 20))
    assert len(bomb) < 1 << 20
    assert http.post(bomb, content_encoding="gzip").status_code == 413
    assert http.post(bomb[:1000], content_encoding="gzip").status_code == 400
    assert http.post(gzipped(b"") + b"more", content_encoding="gzip").status_code == 400
    assert http.post(b"plain", content_encoding="gzip").status_code == 400
    assert (http.counts.refused["too-large"], http.counts.refused["malformed"]) == (1, 3)


@pytest.mark.parametrize("size", [1, 1000, 65_400, 66_000, 300_000, 1_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_of_every_size_come_whole(http: Client, sink: RecordingSink, size: int, chunked: bool) -> None:
    # The padding is a span that is no record.
    body = request(free(0), {"name": "chat", "text": "x" * size}, free(1))
    pieces = [body[i : i + 40_000] for i in range(0, len(body), 40_000)]
    for seq in range(3):
        assert http.post(iter(pieces) if chunked else body).status_code == 200, seq
    assert sink.places == [("decode-0", 0), ("decode-0", 1)] * 3
    assert http.counts.ignored == 3


def test_large_json_is_worked_on_aside(http: Client, sink: RecordingSink) -> None:
    body = json_request(*(free(seq) for seq in range(500)))
    assert len(body) > 100_000
    assert http.post(body, JSON).status_code == 200
    assert len(sink.records) == 500


def head(length: int, *more: str, kind: str = PROTOBUF) -> bytes:
    lines = ["POST /v1/traces HTTP/1.1", "host: guard", f"content-type: {kind}", f"content-length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def connect(http: Client) -> socket.socket:
    address = http.receiver.address
    return socket.create_connection((address.host, address.port), timeout=30)


def test_pipelined_requests_are_answered_in_order(http: Client, sink: RecordingSink) -> None:
    messages = [request(free(seq), {"name": "chat", "text": "x" * (seq * 5000 % 70_000)}) for seq in range(60)]
    messages[7] = b"\xff"  # refused, and the connection goes on
    large = json_request(*(free(100 + seq) for seq in range(100)))  # worked on aside, those behind it wait
    requests = b"".join(head(len(message)) + message for message in messages)
    requests += head(len(large), kind=JSON) + large + head(0) + head(0, "connection: close")
    with connect(http) as raw:
        sending = threading.Thread(target=raw.sendall, args=(requests,))
        sending.start()
        with raw.makefile("rb") as stream:
            answers = stream.read()
        sending.join(30)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]
    assert statuses == [200] * 7 + [400] + [200] * 55
    assert [seq for _, seq in sink.places] == [*range(7), *range(8, 60), *range(100, 200)]


def test_a_sender_that_asks_before_it_sends(http: Client, sink: RecordingSink) -> None:
    body = request(free(0))
    with connect(http) as raw, raw.makefile("rb") as stream:
        raw.sendall(head(len(body), "expect: 100-continue"))
        assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert stream.readline() == b"\r\n"
        raw.sendall(body)
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
    with connect(http) as raw, raw.makefile("rb") as stream:
        raw.sendall(head(2 << 30, "expect: 100-continue"))
        assert stream.readline().startswith(b"HTTP/1.1 413 "), "before it has sent it"
    assert sink.places == [("decode-0", 0)]


def test_http_1_0_gets_one_answer(http: Client) -> None:
    with connect(http) as raw, raw.makefile("rb") as stream:
        raw.sendall(head(0).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert stream.read().startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_idle_connection_is_closed_and_a_late_request_told_so() -> None:
    with over_http(RecordingSink(), idle_timeout_s=0.2, request_timeout_s=0.4) as http:
        with connect(http) as raw:
            assert raw.recv(1) == b"", "nothing is said to it"
        body = request(free(0))
        for part in (head(len(body))[:20], head(len(body)) + body[:-1], head(1 << 20) + bytes(1000)):
            with connect(http) as raw, raw.makefile("rb") as stream:
                raw.sendall(part)
                assert stream.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        assert http.counts.refused["timeout"] == 3


def test_a_busy_connection_has_time_for_every_request() -> None:
    with over_http(RecordingSink(), request_timeout_s=0.5) as http, connect(http) as raw, raw.makefile("rb") as stream:
        raw.sendall(head(0)[:30])
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:  # some of the next request is always there
            raw.sendall(head(0)[30:] + head(0)[:30])
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            while stream.readline() != b"\r\n":
                pass


def test_dripping_does_not_buy_time() -> None:
    with over_http(RecordingSink(), request_timeout_s=0.4) as http, connect(http) as raw:
        raw.settimeout(0.01)
        answer = b""
        for byte in head(100_000) + bytes(100_000):
            raw.sendall(bytes([byte]))
            try:
                answer = raw.recv(100)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_connections_too_many_are_told_to_come_back() -> None:
    with over_http(RecordingSink(), max_connections=2) as http:
        assert http.post(b"").status_code == 200
        with connect(http) as second:
            second.sendall(head(0))
            assert second.recv(1000).startswith(b"HTTP/1.1 200 ")
            with connect(http) as third, third.makefile("rb") as stream:
                assert stream.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
            assert http.counts.refused["connections"] == 1
        until(lambda: http.receiver._open == 1)
        with connect(http) as third:
            third.sendall(head(0))
            assert third.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_unfinished_bodies_together_are_bounded() -> None:
    limit = 1 << 20
    with over_http(RecordingSink(), max_message_bytes=limit) as http:
        held = [connect(http) for _ in range(5)]
        statuses = []
        for raw in held:
            raw.sendall(head(limit) + bytes(limit - 1))
            raw.settimeout(0.3)
            try:
                statuses.append(raw.recv(12))
            except TimeoutError:
                statuses.append(b"waits")
        assert statuses == [b"waits"] * 4 + [b"HTTP/1.1 503"]
        assert http.counts.refused["memory"] == 1
        for raw in held:
            raw.close()
        until(lambda: http.receiver._open == 0)
        assert http.post(bytes(limit - 1)).status_code == 400, "its room was given back"


def test_a_sender_that_reads_no_answers_is_stopped() -> None:
    with over_http(RecordingSink(), request_timeout_s=0.5) as http, connect(http) as raw:
        bad = head(1) + b"\xff"
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            raw.sendall(bad * 1_000_000)
        assert http.counts.refused["timeout"] == 1


def test_a_stop_answers_what_has_begun(sink: RecordingSink) -> None:
    with over_http(sink) as http:
        body = json_request(*(free(seq) for seq in range(3000)))
        with connect(http) as raw, connect(http) as idle, raw.makefile("rb") as stream:
            raw.sendall(head(len(body), kind=JSON) + body)
            until(lambda: http.receiver._open == 2 and http.receiver._workers._work_queue.qsize() + len(sink.records))
            http.receiver.stop(10)
            assert stream.read().startswith(b"HTTP/1.1 200 OK\r\n")
            assert idle.recv(1) == b""
    assert len(sink.records) == 3000


def test_tokens(sink: RecordingSink) -> None:
    with over_http(sink, tokens=Tokens(["swordfish", "seahorse"])) as http:
        for given in ({}, {"authorization": "Bearer sword"}, {"authorization": "swordfish"}):
            response = http.post(request(free(0)), **given)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert Status.FromString(response.content).code == 16
        assert not sink.records
        for given in ("Bearer swordfish", "bearer  seahorse"):
            assert http.post(request(free(0)), authorization=given).status_code == 200
        assert http.counts.refused["unauthenticated"] == 3


def test_an_occupied_port_is_an_error(http: Client) -> None:
    other = HttpReceiver(http.receiver.address, Intake(RecordingSink(), http.counts))
    with pytest.raises(BindError, match=r"127\.0\.0\.1:\d+: cannot be bound: .*another process"):
        other.start()
    other.stop()


def test_a_name_that_is_no_address_is_an_error(http: Client) -> None:
    with pytest.raises(BindError, match=r"nowhere\.invalid:1"):
        HttpReceiver(Address("nowhere.invalid", 1, ""), Intake(RecordingSink(), http.counts)).start()


def test_ipv6(sink: RecordingSink) -> None:
    with over_http(sink, "[::1]:0") as http:
        assert http.post(request(free(0))).status_code == 200


def test_answers_are_json_a_parser_takes(http: Client) -> None:
    assert json.loads(http.post(b'"', JSON).content)["code"] == 3
