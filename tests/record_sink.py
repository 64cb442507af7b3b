"""An OTLP/gRPC receiver that keeps every record it is sent, and what the ledger makes of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from guard.findings import Finding
from guard.ledger import Ledger
from guard.receive.otlp import parse_protobuf
from guard.records import Record

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class RecordSink:
    """Listens on a free loopback port from the start; a context manager that stops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _export(self, request: bytes, _context: Any) -> bytes:
        batch = parse_protobuf(request)
        assert not batch.invalid, batch.items
        with self._lock:
            self._records += [item for item in batch.items if isinstance(item, Record)]
        return b""

    def records(self, request: str | None = None, stream: str | None = None) -> list[Record]:
        """What came so far, in order of arrival."""
        with self._lock:
            records = list(self._records)
        return [
            record
            for record in records
            if (request is None or record.request == request) and (stream is None or record.stream == stream)
        ]

    def findings(self) -> list[Finding]:
        """What the ledger concludes from everything."""
        found: list[Finding] = []
        ledger = Ledger(on_finding=lambda finding, is_new: found.append(finding) if is_new else None)
        for record in self.records():
            ledger.feed(record, record.time_ns)
        ledger.finish()
        return found
