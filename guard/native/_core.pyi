"""The native core: records, OTLP decoder, ring, ledger, board, journal."""

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
