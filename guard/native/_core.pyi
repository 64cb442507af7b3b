"""The native core's Python surface; sources in src/, one ``bind_*.cpp`` a part."""

from typing_extensions import Buffer

# --- otlp ---

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
