"""The OTLP/gRPC receiver: takes ``TraceService/Export``, queues its records for the ledger, answers.

A call is answered once its records are queued, not once they are judged: who has to know the verdict waits
for the watermark on the board. When the queue is full the call is refused with RESOURCE_EXHAUSTED and
RetryInfo, which is what OTLP calls retryable; nothing of a refused call is kept.
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from guard.receive.address import Address, BindError, prepare_socket_path
from guard.receive.inbox import Inbox
from guard.receive.otlp import Batch, OtlpError, parse_protobuf
from guard.records import RecordError

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
RETRY_AFTER_MS = 50
_NAMED_INVALID = 3
"""Invalid spans that a partial success names; the rest is counted."""


class GrpcReceiver:
    """A gRPC server on one address. Handlers run in a small pool of threads and only decode and queue."""

    def __init__(
        self,
        address: Address,
        inbox: Inbox,
        *,
        token: str | None = None,
        max_message_bytes: int = 16 << 20,
        on_batch: Callable[[Batch], None] = lambda _batch: None,
        on_refused: Callable[[str], None] = lambda _reason: None,
        threads: int = 4,
    ) -> None:
        """Makes the server; `start` binds it.

        Args:
            address: Where to listen. A Unix socket is made with mode 0600, so that only this user's processes
                (and root) can connect.
            inbox: Where the records go.
            token: What clients must send as ``authorization: Bearer TOKEN``; None asks for nothing.
            max_message_bytes: Larger messages are refused by gRPC itself.
            on_batch: Called with each batch that was queued, from any handler thread.
            on_refused: Called with a word for each call that was refused, ``full``, ``malformed`` or
                ``unauthenticated``, from any handler thread.
            threads: Handler threads.
        """
        self.address = address
        self._inbox = inbox
        self._expected = f"Bearer {token}".encode() if token else None
        self._on_batch = on_batch
        self._on_refused = on_refused
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="otlp")
        self._server = grpc.server(
            self._pool,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                # Two guards on one port would each get half of the records.
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE, {"Export": grpc.unary_unary_rpc_method_handler(self._export)}
                ),
            )
        )

    def start(self) -> Address:
        """Binds and serves.

        Returns:
            The address, with the port that was given where 0 was asked for.

        Raises:
            BindError: The address is taken or cannot be had.
        """
        if self.address.path:
            prepare_socket_path(self.address.path)
            before = os.umask(0o177)
            try:
                self._bind()
            finally:
                os.umask(before)
        else:
            self.address = self.address._replace(port=self._bind())
        self._server.start()
        return self.address

    def _bind(self) -> int:
        try:
            port = int(self._server.add_insecure_port(str(self.address)))
        except RuntimeError as error:
            raise BindError(f"{self.address}: cannot be bound; is another process listening there?") from error
        if not port:
            raise BindError(f"{self.address}: cannot be bound")
        return port

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, lets those under way end within ``grace_s``, and goes."""
        stopped: threading.Event = self._server.stop(grace_s)
        stopped.wait(grace_s + 1)
        self._pool.shutdown(wait=False)

    def _export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        received_ns = time.time_ns()
        if self._expected is not None and not self._authenticated(context):
            self._on_refused("unauthenticated")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer TOKEN is missing or wrong")
        if self._inbox.full():
            self._refuse_full(context)
        try:
            batch = parse_protobuf(data)
        except OtlpError as error:
            self._on_refused("malformed")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not self._inbox.put(batch, received_ns):
            self._refuse_full(context)
        self._on_batch(batch)
        return _partial_success(batch) if batch.invalid else b""

    def _authenticated(self, context: grpc.ServicerContext) -> bool:
        assert self._expected is not None
        for key, value in context.invocation_metadata():
            if key == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
                return hmac.compare_digest(given, self._expected)
        return False

    def _refuse_full(self, context: grpc.ServicerContext) -> None:
        self._on_refused("full")
        context.set_trailing_metadata((("grpc-status-details-bin", _RETRY),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)


def _partial_success(batch: Batch) -> bytes:
    invalid = [str(item) for item in batch.items if isinstance(item, RecordError)]
    message = "; ".join(invalid[:_NAMED_INVALID])
    if len(invalid) > _NAMED_INVALID:
        message += f"; and {len(invalid) - _NAMED_INVALID} more"
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = batch.invalid
    response.partial_success.error_message = message
    return bytes(response.SerializeToString())


def _retry_details() -> bytes:
    details = AnyMessage()
    details.Pack(RetryInfo(retry_delay=Duration(nanos=RETRY_AFTER_MS * 1_000_000)))
    code: int = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    return bytes(Status(code=code, message=_FULL, details=[details]).SerializeToString())


_FULL = "the guard's queue is full; send the same records again"
_RETRY = _retry_details()
