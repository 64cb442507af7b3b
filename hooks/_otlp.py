"""What goes over the wire: records' spans as an OTLP request, and what an OTLP receiver answers.

The stock encoder (``opentelemetry.exporter.otlp.proto.common``) takes about 22 µs a span, most of it in
building messages one by one; filling the request's own messages takes about 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from hooks.emit import SCOPE

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

_RETRYABLE = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""From the OTLP specification, section "Failures" of OTLP/gRPC; RESOURCE_EXHAUSTED only with a RetryInfo."""

_FIELDS = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
"""Python type → field of AnyValue; bool before int, which it is a kind of."""

_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class Pending(NamedTuple):
    """What is kept of a record's span until it is sent: about a third of the memory of the span itself."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0 for a span without a parent."""
    remote_parent: bool
    time_ns: int
    attributes: Mapping[str, Any]
    resource: Resource

    @classmethod
    def of(cls, span: ReadableSpan) -> Pending:
        """Takes what is sent out of an ended span."""
        context, parent = span.context, span.parent
        return cls(
            span.name,
            context.trace_id,
            context.span_id,
            parent.span_id if parent is not None else 0,
            parent is not None and parent.is_remote,
            span.start_time or 0,
            # A plain dict, which the sender walks faster than the SDK's own kind.
            span.attributes.copy() if span.attributes else {},  # type: ignore[attr-defined]
            span.resource,
        )


def encode_request(pending: Iterable[Pending]) -> tuple[bytes, int]:
    """A serialised ``ExportTraceServiceRequest``, and how many of the spans OTLP cannot express (left out).

    Such a span holds, for example, half a UTF-16 surrogate pair in an id or an integer beyond 64 bits.
    """
    request = ExportTraceServiceRequest()
    resource: Resource | None = None
    unfit = 0
    for item in pending:
        if item.resource is not resource:
            resource = item.resource
            spans = (
                request.resource_spans.add(resource={"attributes": _attributes(resource.attributes)})
                .scope_spans.add(scope={"name": SCOPE})
                .spans
            )
        try:
            spans.add(
                trace_id=item.trace_id.to_bytes(16, "big"),
                span_id=item.span_id.to_bytes(8, "big"),
                parent_span_id=item.parent_id.to_bytes(8, "big") if item.parent_id else b"",
                name=item.name,
                kind=SpanMessage.SPAN_KIND_INTERNAL,
                start_time_unix_nano=item.time_ns,
                end_time_unix_nano=item.time_ns,
                attributes=_attributes(item.attributes),
                flags=_REMOTE if item.remote_parent else _LOCAL,
            )
        except (TypeError, ValueError, OverflowError):
            unfit += 1
    return request.SerializeToString(), unfit


def rejected_spans(reply: bytes) -> tuple[int, str]:
    """How many spans the receiver did not take, and why (``partial_success``).

    Raises:
        DecodeError: The reply is not an ``ExportTraceServiceResponse``.
    """
    partial = ExportTraceServiceResponse.FromString(reply).partial_success
    return partial.rejected_spans, partial.error_message


def retry_hint(error: grpc.RpcError) -> float | None:
    """The seconds to wait that the receiver asks for in a RetryInfo; None when no readable one is there."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                for detail in Status.FromString(value).details:
                    info = RetryInfo()
                    if detail.Unpack(info):
                        seconds = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                        return max(0.0, float(seconds))
            except DecodeError:
                return None
    return None


def is_retryable(code: grpc.StatusCode, hint: float | None) -> bool:
    """Whether OTLP allows to send the same request again."""
    return code in _RETRYABLE or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and hint is not None)


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    field = _FIELDS.get(type(value))
    if field is None:
        if isinstance(value, (tuple, list)):
            return {"array_value": {"values": [_value(item) for item in value]}}
        # An IntEnum or a str of another library.
        field = next((name for kind, name in _FIELDS.items() if isinstance(value, kind)), None)
        if field is None:
            raise TypeError(f"an attribute is a {type(value).__name__}, which a record has no use for")
    return {field: value}
