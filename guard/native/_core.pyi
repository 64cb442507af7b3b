"""The native core: records, OTLP decoder, ring, ledger, board, journal, page hash."""

import os
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import Buffer

from guard.findings import Finding
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
    def restore(self, before: Restored) -> None: ...
    def finish(self) -> None: ...
    def take_events(
        self, update: Callable[[FindingContents, Finding | None], Finding]
    ) -> list[tuple[bool, Finding | None, RequestContents | None]]:
        """What happened since: findings, each once and as it is now (True: new), and requests forgotten.

        `update` fills in a finding that was told of before, or makes a new one (None).
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

# The page hash

HASH_WAYS: tuple[str, ...]
"""What this processor can compute it with, the fastest first; the last is ``portable``."""

class HashKey:
    """A tenant's key of the page hash, see include/kvguard/digest.h. Thread-safe."""

    def __init__(self, key: bytes, way: str | None = None) -> None:
        """Args:
            key: 6176 bytes.
            way: One of `HASH_WAYS`; the fastest where it is None.

        Raises:
            ValueError: The key is of another size, or the processor does not have the way.
        """

    def pages(self, pools: Sequence[Buffer], pages: Sequence[int], layers: int = 1) -> list[bytes]:
        """The hashes of pages, 16 bytes each; the GIL is free meanwhile, and nothing is copied.

        Args:
            pools: Buffers [pages, ...]: what each has of a page, `layers` pieces of equal size in one run, in order.
            pages: Which.
            layers: How many.

        Raises:
            ValueError: A buffer is not like that, does not have the page, or a page does not divide into `layers`.
            TypeError: One is no buffer at all.
        """

    def merge(self, left: bytes, right: bytes, right_blocks: int) -> bytes:
        """The hash of the pieces of `left` and those of `right` behind them, which are so many 4096-byte blocks.

        Raises:
            ValueError: One is no hash.
        """

# The journal

class Restored:
    """What a restarted guard knows of before; `guard.ledger.restored.Restored`, for the ledger."""

    def __init__(
        self,
        streams: Sequence[tuple[str, int, int, int, Sequence[int]]],
        pools: Sequence[tuple[str, str, int, int, int]],
        requests: Sequence[tuple[str, str, str, bool]],
    ) -> None: ...
    @property
    def streams(self) -> list[tuple[str, int, int, int, list[int]]]:
        """Name, epoch, watermark, time, past epochs of each."""

    @property
    def pools(self) -> list[tuple[str, str, int, int, int]]:
        """Id, stream, pages, page tokens, role of each."""

    @property
    def requests(self) -> list[tuple[str, str, str, bool]]:
        """Request, stream, tenant, whether it ended, by request and stream."""

class Journal:
    """What the next guard must know, on disk. For one thread at a time; a `Core` that has it calls it itself."""

    @staticmethod
    def open(path: str, limit_bytes: int) -> tuple[Journal, Restored, list[bytes]]:
        """Opens or makes it; what an earlier guard knew, and the incidents that it had not settled, oldest first.

        Raises:
            RuntimeError: The file cannot be had; the message names it.
        """

    def pool(self, id: str, stream: str, pages: int, page_tokens: int, role: int) -> None: ...
    def epoch(self, stream: str, epoch: int) -> None: ...
    def request(self, request: str, stream: str, tenant: str) -> None: ...
    def ended(self, request: str, stream: str) -> None: ...
    def retired(self, request: str) -> None: ...
    def watermark(self, stream: str, epoch: int, processed: int, time_ns: int) -> None: ...
    def incident(self, id: str, text: bytes) -> None: ...
    def settled(self, id: str) -> None: ...
    def flush(self) -> bool:
        """Writes out what was gathered; False when the disk does not take it."""

    @property
    def bytes(self) -> int:
        """Of the file."""

    @property
    def failures(self) -> int: ...
    @property
    def rewrites(self) -> int: ...
    @property
    def cut_off(self) -> int:
        """Bytes at the file's end that were no whole frame when it was opened."""

    @property
    def dropped(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def unsettled(self) -> int: ...

# The core loop

class Inbox:
    """The bounded queue between the receivers' threads and the ledger's. Any thread may use it."""

    def __init__(self, limit_records: int, limit_bytes: int = 268435456) -> None:
        """A message larger than the limits is taken when nothing else waits."""

    def put(self, rows: Rows, received_ns: int) -> bool:
        """Queues the records of one message, all or none.

        Returns:
            False, and `rows` as it was, if there is no room or the inbox is closed; else `rows` is left empty.
        """

    def full(self) -> bool:
        """Whether not even one more record would be taken."""

    def close(self) -> None:
        """Takes nothing more; what is queued will still be judged."""

    @property
    def depth(self) -> int:
        """Records that wait."""

    @property
    def bytes(self) -> int:
        """Their bytes."""

    @property
    def limit_records(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...

class Recent:
    """The last records, in so many bytes; the 32 newest of a request outlive a burst of others."""

    def __init__(self, limit_bytes: int) -> None: ...
    def add(self, rows: Rows, received_ns: int) -> None: ...
    def evidence(self, requests: Sequence[str], streams: Sequence[str]) -> list[tuple[Record, int]]:
        """What is kept of these requests, and of these streams' records that have no request."""

LATENCY_BOUNDS: tuple[float, ...]

class CoreStats:
    """What the core has counted, and what it holds."""

    @property
    def pages(self) -> int: ...
    @property
    def requests_live(self) -> int: ...
    @property
    def requests_ended(self) -> int: ...
    @property
    def transfers(self) -> int: ...
    @property
    def records_held(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def duplicates(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def gaps(self) -> int: ...
    @property
    def dropped(self) -> dict[str, int]:
        """Records beyond each limit of the ledger's."""

    @property
    def records(self) -> dict[str, int]:
        """Records judged or waiting, by span name."""

    @property
    def broken(self) -> int:
        """Messages in the inbox that turned out to be no records somewhere."""

    @property
    def kills(self) -> int: ...
    @property
    def kills_withheld(self) -> int:
        """Requests that would have been killed in enforce mode."""

    @property
    def latency(self) -> list[int]:
        """Records by the seconds from their time to their verdict: within each of `LATENCY_BOUNDS` and above the one
        before; the last are above them all.
        """

    @property
    def latency_sum(self) -> float: ...
    @property
    def ledger_bytes(self) -> int: ...
    @property
    def waiting(self) -> int:
        """What happened and was not taken yet."""

    @property
    def journal_bytes(self) -> int: ...
    @property
    def journal_failures(self) -> int: ...
    @property
    def lanes(self) -> list[RingLane]: ...

class IncidentState:
    """An incident, as the core knows it."""

    @property
    def id(self) -> str: ...
    @property
    def request(self) -> str | None: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def killed(self) -> bool:
        """Whether its request was killed, or would have been in enforce mode."""

    @property
    def record_ns(self) -> int: ...
    @property
    def received_ns(self) -> int: ...
    @property
    def verdict_ns(self) -> int: ...

class Happened:
    """A finding, new or grown; or the end of an incident, whose request is forgotten."""

    @property
    def over(self) -> bool: ...
    @property
    def incidents(self) -> list[IncidentState]: ...
    @property
    def finding(self) -> FindingContents: ...
    @property
    def fresh(self) -> bool: ...
    @property
    def received_ns(self) -> int: ...

class Core:
    """Judges what comes in, and publishes what came of it."""

    def __init__(
        self,
        policy: LedgerPolicy,
        settings: LedgerSettings,
        *,
        enforce: bool,
        inbox: Inbox,
        board: BoardWriter,
        ring: str | None = None,
        ring_lanes: int = ...,
        ring_rows: int = ...,
        journal: Journal | None = None,
        recent_bytes: int = 8388608,
    ) -> None:
        """Raises:
        RuntimeError: The ring cannot be had.
        """

    def restore(self, before: Restored) -> None:
        """What the guard before this one knew; before `run`."""

    def run(self) -> None:
        """Judges until the inbox is closed and everything is judged; the GIL is free meanwhile.

        Raises:
            BoardError: The board was closed.
            RuntimeError: What else goes wrong.
        """

    def take(self, timeout_s: float) -> list[Happened] | None:
        """Some of what happened; waits for it so long. None once `run` is over and everything was taken."""

    def abandon(self) -> None:
        """Nobody will take what happens any more: closes the inbox, and `run` waits for nobody."""

    def evidence(self, requests: Sequence[str], streams: Sequence[str]) -> list[tuple[Record, int]]:
        """As `Recent.evidence`, of what was judged or waits."""

    def settled(self, incidents: Sequence[str]) -> None:
        """The store has these incidents: the journal need not keep them."""

    def stats(self) -> CoreStats: ...
    @property
    def last_round_ns(self) -> int:
        """When the last round was done; `time.monotonic_ns`."""
