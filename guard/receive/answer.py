"""What OTLP answers: success, partial success, and refusals that say whether to send again.

The text of a refusal is the same in gRPC's status, in a ``google.rpc.Status`` in protobuf and in one in JSON.
"""

from __future__ import annotations

import json

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from guard.receive.decode import Decoded

RETRY_AFTER_MS = 50
"""What a sender is asked to wait when the queue is full."""
FULL = "the guard's queue is full; send the same records again"
BAD_TOKEN = "authorization: Bearer TOKEN is missing or wrong"


def success(decoded: Decoded, *, as_json: bool = False) -> bytes:
    """``ExportTraceServiceResponse``: empty, or how many spans were refused and why the first of them were."""
    if not decoded.invalid:
        return b"{}" if as_json else b""
    message = "; ".join(decoded.errors)
    if decoded.invalid > len(decoded.errors):
        message += f"; and {decoded.invalid - len(decoded.errors)} more"
    if as_json:
        partial = {"rejectedSpans": str(decoded.invalid), "errorMessage": message}
        return json.dumps({"partialSuccess": partial}).encode()
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = decoded.invalid
    response.partial_success.error_message = message
    return bytes(response.SerializeToString())


def refusal(code: grpc.StatusCode, message: str, *, as_json: bool = False) -> bytes:
    """``google.rpc.Status``; of a full queue with the time to wait."""
    number: int = code.value[0]
    retry = code is grpc.StatusCode.RESOURCE_EXHAUSTED
    if as_json:
        status: dict[str, object] = {"code": number, "message": message}
        if retry:
            delay = f"{RETRY_AFTER_MS / 1000:.3f}s"
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
        return json.dumps(status).encode()
    details = []
    if retry:
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=Duration(nanos=RETRY_AFTER_MS * 1_000_000)))
        details.append(detail)
    return bytes(Status(code=number, message=message, details=details).SerializeToString())
