"""The native core: records, OTLP decoder, ring, ledger, board, journal."""

from collections.abc import Callable, Iterator

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

# The ledger

class LedgerPolicy:
    """guard.policy.Policy, for the ledger."""

    def __init__(
        self,
        *,
        permit_sharing: bool,
        require_digests: bool,
        require_scrub: bool,
        act_on_degraded: bool,
        actions: list[int],
    ) -> None: ...

class LedgerSettings:
    """guard.ledger.LedgerSettings, for the ledger."""

    window_ns: int
    leak_grace_ns: int
    leak_grace_text: str
    max_held: int
    restart_records: int
    max_ended: int
    max_streams: int
    max_pool_pages: int
    max_pools: int
    max_pages: int
    max_requests: int
    max_request_streams: int
    max_transfers: int
    def __init__(self) -> None: ...

FindingContents = tuple[
    int, str | None, str | None, str | None, int, bool, str, int, int, int, str | None, str,
    set[str], set[str], set[str], list[tuple[int, int]],
]  # fmt: skip
"""Kind, request, pool, tenant, the action's rank, degraded, stream, epoch, seq, time, transfer, reason, other tenants,
other requests, subjects, runs of pages."""

RequestContents = tuple[str, str | None, set[str], bool, bool]
"""Id, tenant, lineage, killed, disclosed."""

class Ledger:
    """The ledger; `guard.native.ledger.Ledger` makes it look like `guard.ledger.Ledger`."""

    def __init__(self, policy: LedgerPolicy, settings: LedgerSettings, *, summaries: bool) -> None: ...
    def feed(self, record: Record, now_ns: int) -> None: ...
    def feed_rows(self, rows: Rows, now_ns: int) -> None: ...
    def advance(self, now_ns: int) -> None: ...
    def finish(self) -> None: ...
    def take_events(self) -> list[tuple[bool, FindingContents | None, RequestContents | None]]:
        """What happened since: findings, each once and as it is now (True: new), and requests forgotten.

        Without `summaries`, of requests forgotten only those that a finding names or hits, and of these the id alone.
        """

    def streams(self) -> list[tuple[str, int, int, int, int]]:
        """Name, epoch, watermark, duplicates, late of each."""

    def watermark(self, stream: str) -> tuple[int, int]: ...
    def sizes(self) -> dict[str, int]: ...
    def gaps(self) -> int: ...
    def dropped_by(self) -> dict[str, int]: ...
    def bytes(self) -> int:
        """Memory kept for tables, roughly."""

    def request_ids(self) -> list[str]: ...
    def request(self, id: str) -> RequestContents | None: ...

# The ring

RING_PATH: str
RING_LANES: int
RING_ROWS: int

class RingWriter:
    """A lane of a ring, for one stream of this process. Off once closed, and in a child made by fork."""

    def __init__(
        self,
        path: str,
        stream: str,
        epoch: int,
        lanes: int = ...,
        rows: int = ...,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """Takes a free lane of the ring at `path`, which is made with so many lanes and rows if there is none.

        Args:
            tell: Called with the first error of `send`.

        Raises:
            RuntimeError: No lane can be had; the message names the path and the remedy.
            ValueError: The stream id or the epoch cannot be in a row.
        """

    def send(self, record: Record, context: object = None) -> int:
        """Writes a record as the next of the stream; one that cannot be a row is counted and leaves its place empty.

        Returns:
            Its seq, or -1 when the writer is off.
        """

    def skip(self) -> int:
        """Leaves the next place of the stream empty and returns it; -1 when the writer is off."""

    def emit(self, record: Record, seq: int, time_ns: int = 0) -> bool:
        """Writes a record at a place of the stream; its time is its own, or now, where `time_ns` is 0.

        Returns:
            False when there was no room, or the writer is off.

        Raises:
            ValueError: It cannot be a row; the message names the field.
        """

    def close(self) -> None: ...
    @property
    def on(self) -> bool: ...
    @property
    def stream(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def dropped(self) -> int:
        """Records that found the lane full."""

    @property
    def failed(self) -> int:
        """Records of `send` that could not be a row."""

class RingLane:
    """What a reader knows of a lane."""

    @property
    def index(self) -> int: ...
    @property
    def pid(self) -> int:
        """Of the writer, in its own namespace; 0: the lane is free; -1: taken and not said by whom."""

    @property
    def written(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def broken(self) -> int:
        """Bytes that were no record and were skipped."""

    @property
    def waiting(self) -> int:
        """Rows not taken yet."""

    @property
    def stream(self) -> str: ...

class RingReader:
    """Takes what stands in a ring. One a ring, one thread."""

    def __init__(self, path: str, lanes: int = ..., rows: int = ...) -> None:
        """Opens the ring at `path`, or makes it with so many lanes and rows.

        Raises:
            RuntimeError: It cannot be had, or another reader has it.
        """

    def take(self, limit: int = 65536) -> Rows:
        """At most so many records, some of each lane in turn; they leave the ring."""

    def wait(self, timeout_s: float) -> None:
        """Sleeps until something is there, `wake` is called or the time is over."""

    def wake(self) -> None: ...
    def lanes(self) -> list[RingLane]: ...
    def close(self) -> None: ...
