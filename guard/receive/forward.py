"""Spans that are no records, sent on to who wants them: another OTLP receiver, in a thread of its own.

A sender is never held up or refused for it. Messages wait in a bounded queue; what finds it full, or cannot be sent,
is dropped and counted. Records are not sent on: they are taken out of each message first.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import deque
from typing import Any, Protocol

import grpc
import httpx
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard.log import log
from guard.receive.target import Target
from guard.records import is_record_name

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_CALL_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
_RETRYABLE_CALLS = frozenset(
    (
        grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
    )
)  # fmt: skip
_RETRYABLE_STATUSES = frozenset((408, 429, 502, 503, 504))


class _GaveUpError(Exception):
    """The target will not take this message; or not now, if it may be sent again."""

    def __init__(self, why: str, *, retry: bool) -> None:
        super().__init__(why)
        self.retry = retry


class _Sender(Protocol):
    def send(self, message: bytes) -> None:
        """Raises _GaveUpError."""

    def close(self) -> None:
        """Ends."""


class Forwarder:
    """The queue and its thread.

    Attributes:
        sent: Spans that the target took.
        dropped: Spans that it did not: the queue was full, the target refused them or was away too long.
    """

    def __init__(
        self, target: Target, *, token: str | None = None, queue_bytes: int = 16 << 20, patience_s: float = 30.0
    ) -> None:
        """Makes it; `start` runs it.

        Args:
            target: Where to.
            token: Shown as ``authorization: Bearer TOKEN``.
            queue_bytes: Messages that may wait, in bytes.
            patience_s: How long one message is tried again.
        """
        self.target = target
        self.sent = 0
        self.dropped = 0
        self._token = token
        self._room = queue_bytes
        self._patience_s = patience_s
        self._queue: deque[tuple[bytes, int, bool]] = deque()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)

    def start(self) -> None:
        """Begins sending."""
        self._thread.start()

    def put(self, message: bytes, spans: int, *, json: bool = False) -> None:
        """Queues a message, if there is room. Never waits for the target.

        Args:
            message: As it was received, records included.
            spans: How many of its spans are no records.
            json: Whether it is OTLP/JSON.
        """
        with self._changed:
            if self._closed.is_set() or len(message) > self._room:
                self.dropped += spans
                return
            self._room -= len(message)
            self._queue.append((message, spans, json))
            self._changed.notify()

    def stop(self, grace_s: float = 1.0) -> None:
        """Sends what can be sent within ``grace_s``; the rest is dropped."""
        deadline = time.monotonic() + grace_s
        with self._changed:
            while self._queue and (left := deadline - time.monotonic()) > 0 and self._thread.is_alive():
                self._changed.wait(left)
            self._closed.set()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(grace_s + _CALL_TIMEOUT_S)

    def _run(self) -> None:
        sender = _GrpcSender(self.target, self._token) if self.target.protocol == "grpc" else _HttpSender(
            self.target, self._token
        )  # fmt: skip
        while True:
            with self._changed:
                while not self._queue and not self._closed.is_set():
                    self._changed.wait()
                if self._closed.is_set():
                    self.dropped += sum(spans for _, spans, _ in self._queue)
                    self._queue.clear()
                    break
                message, spans, is_json = self._queue[0]
            took = self._pass_on(sender, message, is_json)
            with self._changed:
                self._queue.popleft()
                self._room += len(message)
                if took:
                    self.sent += spans
                else:
                    self.dropped += spans
                self._changed.notify_all()
        sender.close()

    def _pass_on(self, sender: _Sender, message: bytes, is_json: bool) -> bool:
        try:
            rest = without_records(message, is_json=is_json)
        except ValueError as error:
            self._tell(f"it cannot be read: {type(error).__name__}")
            return False
        deadline, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                sender.send(rest)
            except _GaveUpError as error:
                self._tell(str(error))
                if not error.retry or time.monotonic() + pause > deadline or self._closed.wait(pause):
                    return False
                pause = min(2 * pause, _LAST_PAUSE_S)
            else:
                self._told = ""
                return True

    def _tell(self, why: str) -> None:
        if why != self._told:
            self._told = why
            log("warning", "spans that are no records could not be forwarded", to=str(self.target.address), error=why)


def without_records(message: bytes, *, is_json: bool = False) -> bytes:
    """The message in protobuf, without the spans that are records and what then is empty.

    Raises:
        ValueError: It is none.
    """
    try:
        request = _from_json(message) if is_json else ExportTraceServiceRequest.FromString(message)
    except (DecodeError, json_format.ParseError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    kept = ExportTraceServiceRequest()
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            others = [span for span in scope_spans.spans if not is_record_name(span.name)]
            if len(others) != len(scope_spans.spans):
                del scope_spans.spans[:]
                scope_spans.spans.extend(others)
        scopes = [scope_spans for scope_spans in resource_spans.scope_spans if scope_spans.spans]
        if scopes:
            target = kept.resource_spans.add(schema_url=resource_spans.schema_url)
            if resource_spans.HasField("resource"):
                target.resource.CopyFrom(resource_spans.resource)
            target.scope_spans.extend(scopes)
    return bytes(kept.SerializeToString())


_IDS = ("traceId", "spanId", "parentSpanId")


def _from_json(message: bytes) -> ExportTraceServiceRequest:
    """OTLP/JSON is protobuf's JSON but for ids, which are hexadecimal instead of base64."""
    body: Any = json.loads(message)
    for resource_spans in body.get("resourceSpans") or ():
        for scope_spans in resource_spans.get("scopeSpans") or ():
            for span in scope_spans.get("spans") or ():
                for holder in (span, *(span.get("links") or ())):
                    for name in _IDS:
                        if isinstance(holder.get(name), str):
                            holder[name] = base64.b64encode(bytes.fromhex(holder[name])).decode()
    request = ExportTraceServiceRequest()
    json_format.ParseDict(body, request, ignore_unknown_fields=True)
    return request


class _GrpcSender:
    def __init__(self, target: Target, token: str | None) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 2000)]
        if target.tls:
            self._channel = grpc.secure_channel(target.where, grpc.ssl_channel_credentials(), options)
        else:
            self._channel = grpc.insecure_channel(target.where, options)
        self._call = self._channel.unary_unary(_EXPORT, None, None)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def send(self, message: bytes) -> None:
        try:
            self._call(message, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            raise _GaveUpError(code.name, retry=code in _RETRYABLE_CALLS) from None

    def close(self) -> None:
        self._channel.close()


class _HttpSender:
    def __init__(self, target: Target, token: str | None) -> None:
        headers = {"content-type": "application/x-protobuf"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._url = target.where
        self._client = httpx.Client(headers=headers, timeout=_CALL_TIMEOUT_S, trust_env=False)

    def send(self, message: bytes) -> None:
        try:
            status = self._client.post(self._url, content=message).status_code
        except httpx.HTTPError as error:
            raise _GaveUpError(type(error).__name__, retry=True) from None
        if status // 100 != 2:
            raise _GaveUpError(f"HTTP {status}", retry=status in _RETRYABLE_STATUSES)

    def close(self) -> None:
        self._client.close()
