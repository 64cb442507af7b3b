"""One OTLP message's bytes → record rows, in either encoding of OTLP."""

from __future__ import annotations

from typing import Protocol

import msgspec

from guard.native._core import Rows
from guard.native._core import decode_otlp as decode_protobuf
from guard.receive.otlp import parse_json_line
from guard.records import Record, RecordError

__all__ = ["Decoded", "Rows", "decode_json", "decode_protobuf"]

_NAMED = 3
"""Invalid records whose faults are told; the rest is counted. As in the native decoder."""


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


class _Json(msgspec.Struct):
    rows: Rows
    read: int
    ignored: int
    invalid: int
    errors: list[str]


def decode_json(data: bytes | bytearray | memoryview) -> Decoded:
    """Reads one ``ExportTraceServiceRequest`` in OTLP/JSON.

    Raises:
        ValueError: The text is not such an object.
    """
    batch = parse_json_line(data)
    decoded = _Json(Rows(), batch.read, batch.ignored, 0, [])
    for item in batch.items:
        if isinstance(item, Record):
            try:
                decoded.rows.append(item)
                continue
            except ValueError as wrong:
                fault = RecordError(f"{item.NAME} (stream {item.stream}, seq {item.seq}): {wrong}")
                fault.header = item
        else:
            fault = item
        decoded.invalid += 1
        if len(decoded.errors) < _NAMED:
            decoded.errors.append(str(fault))
        if fault.header is not None:
            place = fault.header
            decoded.rows.place(place.stream, place.epoch, place.seq, place.time_ns)
    return decoded
