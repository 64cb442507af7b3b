"""One OTLP message's bytes → record rows, in either encoding of OTLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from guard.receive.otlp import Batch, OtlpError, parse_json_line, parse_protobuf
from guard.records import Record, RecordError

_NAMED = 3
"""Invalid records whose faults are told; the rest is counted. As in the native decoder."""


class Rows:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def append(self, record: Record) -> None:
        self.records.append(record)

    def place(self, stream: str, epoch: int, seq: int, time_ns: int) -> None:
        self.records.append(Record(stream=stream, epoch=epoch, seq=seq, time_ns=time_ns))


class Decoded(Protocol):
    """What one message held."""

    @property
    def rows(self) -> Rows:
        """Its records in order; one that breaks the convention is a bare place where it said which."""

    @property
    def read(self) -> int:
        """Spans."""

    @property
    def ignored(self) -> int:
        """Spans that are not named like a record."""

    @property
    def invalid(self) -> int:
        """Spans that are, and are not what the convention says."""

    @property
    def errors(self) -> list[str]:
        """What is wrong with the first few invalid ones."""


class _FromJson(msgspec.Struct):
    rows: Rows
    read: int
    ignored: int
    invalid: int
    errors: list[str]


def decode_protobuf(data: bytes | bytearray | memoryview) -> Decoded:
    """Reads one ``ExportTraceServiceRequest`` in protobuf.

    Raises:
        ValueError: The bytes are not such a message.
    """
    return _packed(parse_protobuf(bytes(data)))


def decode_json(data: bytes | bytearray | memoryview) -> Decoded:
    """Reads one ``ExportTraceServiceRequest`` in OTLP/JSON.

    Raises:
        ValueError: The text is not such an object.
    """
    return _packed(parse_json_line(data))


def _packed(batch: Batch) -> Decoded:
    decoded = _FromJson(Rows(), batch.read, batch.ignored, 0, [])
    for item in batch.items:
        if isinstance(item, Record):
            try:
                decoded.rows.append(item)
                continue
            except ValueError as error:
                item = RecordError(f"{item.NAME} (stream {item.stream}, seq {item.seq}): {error}")
        decoded.invalid += 1
        if len(decoded.errors) < _NAMED:
            decoded.errors.append(str(item))
        if item.header is not None:
            header = item.header
            decoded.rows.place(header.stream, header.epoch, header.seq, header.time_ns)
    return decoded


__all__ = ["Decoded", "OtlpError", "Rows", "decode_json", "decode_protobuf"]
