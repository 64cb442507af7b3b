"""What receivers are tested with: a sink that keeps what it is given, messages, and receivers that end."""

from __future__ import annotations

import gzip
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard.counters import ReceiverCounts
from guard.native._core import Rows
from guard.receive.access import Certificates
from guard.receive.address import Address
from guard.receive.forward import Forwarder
from guard.receive.grpc import GrpcReceiver
from guard.receive.http import HttpReceiver
from guard.receive.intake import Intake
from guard.records import Record

PROTOBUF = "application/x-protobuf"


class RecordingSink:
    """Keeps records, at most so many until they are taken."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.waiting = 0
        self.records: list[Record] = []
        self.times: list[int] = []
        self.asked = 0
        """How often it had no room."""
        self._lock = threading.Lock()

    def put(self, rows: Rows, received_ns: int) -> bool:
        with self._lock:
            if self.waiting + len(rows) > self.capacity:
                self.asked += 1
                return False
            self.waiting += len(rows)
            self.records.extend(rows)
            self.times.append(received_ns)
            return True

    def drain(self) -> None:
        """Makes room; what came is remembered."""
        with self._lock:
            self.waiting = 0

    @property
    def places(self) -> list[tuple[str, int]]:
        return [(record.stream, record.seq) for record in self.records]


def free(seq: int, pages: str = "0-3", name: str = "kv.free", stream: str = "decode-0") -> dict[str, Any]:
    return {
        "name": name, "kv.stream.id": stream, "kv.stream.epoch": 1, "kv.seq": seq, "kv.request.id": "r1",
        "kv.tenant.id": "tenant-a", "kv.pages": pages,
    }  # fmt: skip


def request(*spans: dict[str, Any]) -> bytes:
    """The spans in protobuf."""
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for fields in spans:
        span = scope.spans.add(name=fields["name"], start_time_unix_nano=1_790_000_000_000_000_000)
        for key, value in fields.items():
            if key != "name":
                attribute = span.attributes.add(key=key)
                if isinstance(value, int):
                    attribute.value.int_value = value
                else:
                    attribute.value.string_value = value
    return bytes(message.SerializeToString())


def json_request(*spans: dict[str, Any]) -> bytes:
    """The same in OTLP/JSON."""
    bodies = [
        {
            "traceId": "5b8efff798038103d269b633813fc60c",
            "spanId": "eee19b7ec3c1b174",
            "name": fields["name"],
            "startTimeUnixNano": "1790000000000000000",
            "attributes": [
                {"key": k, "value": {"intValue": str(v)} if isinstance(v, int) else {"stringValue": v}}
                for k, v in fields.items()
                if k != "name"
            ],
        }
        for fields in spans
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": bodies}]}]}).encode()


class Client:
    """Talks to an HTTP receiver."""

    def __init__(self, receiver: HttpReceiver, counts: ReceiverCounts) -> None:
        self.receiver = receiver
        self.counts = counts
        address = receiver.address
        transport = httpx.HTTPTransport(uds=address.path) if address.path else None
        self.url = "http://guard" if address.path else f"http://{address}"
        self.client = httpx.Client(transport=transport, timeout=30, trust_env=False)

    def post(self, body: Any, kind: str = PROTOBUF, path: str = "/v1/traces", **headers: str) -> httpx.Response:
        given = {"content-type": kind} | {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(self.url + path, content=body, headers=given)


@contextmanager
def over_http(
    sink: Any, address: str = "127.0.0.1:0", *, forwarder: Forwarder | None = None, **options: Any
) -> Iterator[Client]:
    counts = ReceiverCounts()
    receiver = HttpReceiver(Address.parse(address), Intake(sink, counts, forwarder), **options)
    receiver.start()
    client = Client(receiver, counts)
    try:
        yield client
    finally:
        client.client.close()
        receiver.stop(0.5)
        assert not receiver._thread.is_alive()


@contextmanager
def over_grpc(
    sink: Any, address: str = "127.0.0.1:0", *, counts: ReceiverCounts | None = None, **options: Any
) -> Iterator[GrpcReceiver]:
    receiver = GrpcReceiver(Address.parse(address), Intake(sink, counts or ReceiverCounts()), **options)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop(0)


class Authority:
    """A certificate authority in a directory, made with openssl."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.certificate, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.certificate),
        )  # fmt: skip

    def issue(self, name: str, *, into: str | None = None) -> tuple[str, str]:
        """A certificate for 127.0.0.1 and localhost, and its key: their paths."""
        certificate, key = (str(self.directory / f"{into or name}.{end}") for end in ("pem", "key"))
        request = str(self.directory / f"{name}.csr")
        self._openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
            "-keyout", key, "-out", request,
        )  # fmt: skip
        names = self.directory / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        self._openssl(
            "x509", "-req", "-in", request, "-CA", str(self.certificate), "-CAkey", str(self._key), "-days", "2",
            "-extfile", str(names), "-out", certificate,
        )  # fmt: skip
        return certificate, key

    def server(self, name: str = "server", *, mutual: bool = False) -> Certificates:
        return Certificates(*self.issue(name), str(self.certificate) if mutual else None)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 6)
