"""The native core: records, OTLP decoder, ring, ledger, board, journal."""

import os
from collections.abc import Iterator

from typing_extensions import Buffer

from guard.records import Record

# Records

def encode(record: Record) -> bytes:
    """A record's bytes, as include/kvguard/record.h has them.

    Raises:
        ValueError: It cannot be a row; the message names the field.
    """

def decode(data: Buffer) -> Record:
    """The record that these bytes are.

    Raises:
        ValueError: They are not exactly one record.
    """

class Rows:
    """Records in binary, in the order they came."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Record]: ...
    def append(self, record: Record) -> None:
        """Puts a record behind the others.

        Raises:
            ValueError: It cannot be a row; the message names the field.
        """

    def place(self, stream: str, epoch: int, seq: int, time_ns: int) -> None:
        """Puts a place in a stream behind the others: a record that could not be read."""

    def tobytes(self) -> bytes:
        """The records behind each other, each padded to 8 bytes."""

    @staticmethod
    def frombytes(data: Buffer) -> Rows:
        """Rows out of what `tobytes` gave.

        Raises:
            ValueError: A record in it is broken.
        """

# OTLP

class Decoded:
    """The records of one message, and counts of its spans."""

    @property
    def rows(self) -> Rows:
        """The records in order; an invalid one only takes its place, where it has one."""
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
        """What is wrong with the first few of those."""

def decode_otlp(data: Buffer) -> Decoded:
    """Reads one ``ExportTraceServiceRequest`` in protobuf; the GIL is free meanwhile.

    Raises:
        ValueError: The message is broken as a whole, or longer than 64 MiB; nothing of it counts.
    """

# The verdict board

class BoardWriter:
    """The guard's side of the verdict board (`guard.act.board`). Belongs to the ledger's thread."""

    @staticmethod
    def create(path: str | os.PathLike[str], *, requests: int = 65536, streams: int = 1024) -> BoardWriter: ...
    @property
    def path(self) -> str: ...
    @property
    def verdicts(self) -> int: ...
    @property
    def saturated(self) -> int: ...
    @property
    def streams_without_row(self) -> int: ...
    def heartbeat(self, now_ns: int | None = None) -> None: ...
    def set_verdict(self, request: str, verdict: int, incident: str = "") -> None: ...
    def clear(self, request: str) -> None: ...
    def expire(self, before_ns: int) -> int: ...
    def advance(self, stream: str, epoch: int, seq: int) -> None: ...
    def forget_stream(self, stream: str) -> None: ...
    def close(self) -> None: ...
