"""OTLP traces in each of their encodings → records. Replay and the live receiver both read through here.

`parse_protobuf` takes one ``ExportTraceServiceRequest`` (or ``TracesData``: the same bytes),
`parse_json_line` one in OTLP/JSON, `read_delimited` cuts a file of length-delimited messages into such
messages. What they give is a `Batch`: the records in the order they stand in, and counts. A span that is not
named like a record is ignored; one that is and breaks the convention is a `RecordError` in its place. Only a
message that is broken as a whole raises `OtlpError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from guard.records import Record, RecordError, from_attributes, is_record_name

MAX_MESSAGE_BYTES = 64 << 20
"""A message longer than this is refused before it is parsed."""

_HEADER = frozenset(("kv.stream.id", "kv.stream.epoch", "kv.seq"))


class OtlpError(ValueError):
    """A message that is no OTLP trace message; says what is wrong and where."""


class Batch(msgspec.Struct):
    """The records of one message."""

    items: list[Record | RecordError] = msgspec.field(default_factory=list)
    """What its record-like spans are, in order."""
    read: int = 0
    """Spans."""
    ignored: int = 0
    """Spans that are not named like a record."""
    invalid: int = 0
    """Spans that are, and are not what the convention says."""

    @property
    def kv(self) -> int:
        """Records."""
        return self.read - self.ignored - self.invalid

    def add(self, name: str, time_ns: Any, attributes: Iterable[tuple[str, Any]]) -> None:
        """Takes one span named like a record."""
        try:
            self.items.append(_record(name, time_ns, attributes))
        except RecordError as error:
            self.invalid += 1
            self.items.append(error)


def parse_protobuf(data: bytes) -> Batch:
    """Reads one ``ExportTraceServiceRequest`` in protobuf.

    Raises:
        OtlpError: The bytes are not such a message, or are more than `MAX_MESSAGE_BYTES`.
    """
    _check_size(len(data))
    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError as error:
        raise OtlpError(f"{len(data)} bytes are not an OTLP ExportTraceServiceRequest: {error}") from None
    batch = Batch()
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                batch.read += 1
                if is_record_name(span.name):
                    batch.add(span.name, span.start_time_unix_nano, map(_protobuf_attribute, span.attributes))
                else:
                    batch.ignored += 1
    return batch


def parse_json_line(line: bytes | bytearray | memoryview | str) -> Batch:
    """Reads one ``ExportTraceServiceRequest`` in OTLP/JSON, as the Collector's file exporter writes it.

    Raises:
        OtlpError: The text is not such an object, or is more than `MAX_MESSAGE_BYTES`.
    """
    _check_size(len(line))
    try:
        request = _decode_json(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise OtlpError(f"not an OTLP/JSON trace message: {error}") from None
    batch = Batch()
    for resource_spans in request.resourceSpans or ():
        for scope_spans in resource_spans.scopeSpans or ():
            for span in scope_spans.spans or ():
                batch.read += 1
                if is_record_name(span.name):
                    batch.add(span.name, span.startTimeUnixNano, _json_attributes(span.attributes))
                else:
                    batch.ignored += 1
    return batch


def read_delimited(stream: BinaryIO) -> Iterator[bytes]:
    """Cuts a file of messages, each behind its length as a varint, into messages for `parse_protobuf`.

    Raises:
        OtlpError: The file ends within a message, or a length is over `MAX_MESSAGE_BYTES`; says at which
            byte.
    """
    offset = 0
    while True:
        start, length, shift = offset, 0, 0
        while True:
            byte = stream.read(1)
            if not byte:
                if offset == start:
                    return
                raise OtlpError(f"byte {start}: the file ends within a message's length")
            offset += 1
            length |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                break
            if shift > 28:
                raise OtlpError(f"byte {start}: not a message's length; is the file length-delimited protobuf?")
        if length > MAX_MESSAGE_BYTES:
            raise OtlpError(f"byte {start}: a message of {length} bytes is more than {MAX_MESSAGE_BYTES}")
        message = stream.read(length)
        if len(message) < length:
            raise OtlpError(f"byte {start}: a message of {length} bytes is cut off after {len(message)}")
        offset += length
        yield message


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise OtlpError(f"a message of {size} bytes is more than {MAX_MESSAGE_BYTES}")


def _record(name: str, time_ns: Any, pairs: Iterable[tuple[str, Any]]) -> Record:
    attributes: dict[str, Any] = {}
    twice: list[str] = []
    try:
        for key, value in pairs:
            if key in attributes:
                twice.append(key)
            attributes[key] = value
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None
    if isinstance(time_ns, str) and time_ns.isascii() and time_ns.isdecimal() and len(time_ns) <= 20:
        time_ns = int(time_ns)
    fault = None
    if type(time_ns) is not int or not 0 < time_ns < 1 << 63:
        fault = f"the span's start is {time_ns!r:.60}, not a time in nanoseconds"
        time_ns = 0
    elif twice:
        fault = f"the attribute {twice[0][:60]!r} is given twice"
    # Of two places in the stream neither is sure.
    is_placed = _HEADER.isdisjoint(twice)
    try:
        record = from_attributes(name, time_ns, attributes)
    except RecordError as error:
        if not is_placed:
            error.header = None
        raise
    if fault is None:
        return record
    bad = RecordError(f"{name} (stream {record.stream}, seq {record.seq}): {fault}")
    if is_placed:
        bad.header = Record(stream=record.stream, epoch=record.epoch, seq=record.seq, time_ns=time_ns)
    raise bad


def _protobuf_attribute(pair: KeyValue) -> tuple[str, Any]:
    value = pair.value
    kind = value.WhichOneof("value")
    if kind is None:
        return pair.key, None
    if kind == "string_value_strindex":
        return pair.key, value  # an index into a table that only profiles have: no number to go by
    # Arrays, maps and bytes come as what they are: no field of a record takes one, so its reader says so.
    return pair.key, getattr(value, kind)


class _ScopeSpans(msgspec.Struct):
    spans: list[_Span] | None = None


class _ResourceSpans(msgspec.Struct):
    scopeSpans: list[_ScopeSpans] | None = None


class _Request(msgspec.Struct):
    resourceSpans: list[_ResourceSpans] | None = None


class _Span(msgspec.Struct):
    """Its name decides whether the rest matters, so the rest is not looked at before."""

    name: str = ""
    startTimeUnixNano: Any = None
    attributes: Any = None


_decode_json = msgspec.json.Decoder(_Request).decode


def _json_attributes(attributes: Any) -> Iterator[tuple[str, Any]]:
    if attributes is None:
        return
    if not isinstance(attributes, list):
        raise RecordError(f"attributes is {attributes!r:.60}, not a list")
    for pair in attributes:
        if not isinstance(pair, dict) or not isinstance(pair.get("key"), str):
            raise RecordError(f"the attribute {pair!r:.60} has no key")
        yield pair["key"], _json_value(pair.get("value"))


def _json_value(value: Any) -> Any:
    """The value of an OTLP/JSON ``AnyValue``; what is none stays as it is, to be refused by the field."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "stringValue" and isinstance(inner, str):
        return inner
    if kind == "intValue":
        if type(inner) is int:
            return inner
        if isinstance(inner, str) and len(inner) <= 20 and inner.isascii() and inner.removeprefix("-").isdecimal():
            return int(inner)
    if kind == "boolValue" and isinstance(inner, bool):
        return inner
    return value
