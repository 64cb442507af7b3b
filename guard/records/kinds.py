"""The records: one type for each thing that happens to pages."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from guard.records.pages import PageSet

PUBLIC = "public"
"""The label of pages whose contents are meant for every tenant (``kv.scope=public``)."""


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    ROUTER = "router"


class Scope(StrEnum):
    """Whose data a write is."""

    TENANT = "tenant"
    PUBLIC = "public"


class Side(StrEnum):
    """Which end of a transfer a worker is."""

    SEND = "send"
    RECV = "recv"


class TransferStatus(StrEnum):
    """How one side of a transfer ended."""

    OK = "ok"
    FAILED = "failed"
    ABORTED = "aborted"


class Outcome(StrEnum):
    """How a request ended on a stream."""

    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"
    FAILED = "failed"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What every record has. The subclasses are the operations; build those.

    ``stream``, ``epoch``, ``seq`` and ``time_ns`` may be left out by an engine: `hooks.emit` fills them in.
    """

    NAME: ClassVar[str] = ""
    """The span's name."""

    stream: str = ""
    """The emitter's ordered stream, unique in the fleet."""
    epoch: int = 0
    """Changes whenever the emitter restarts."""
    seq: int = -1
    """0, 1, 2, … within (stream, epoch)."""
    time_ns: int = 0
    """When it happened, in nanoseconds since the Unix epoch."""
    request: str | None = None
    tenant: str | None = None
    pool: str = ""
    """The pool meant; empty means the pool with the stream's own name."""

    @property
    def pool_id(self) -> str:
        """The pool meant, the default resolved."""
        return self.pool or self.stream


class Pool(Record, frozen=True, kw_only=True):
    """A pool exists: each worker's first record."""

    NAME = "kv.pool"
    pages: int
    page_tokens: int
    page_bytes: int
    role: Role
    context_limit: int
    """The context that the worker advertises, in tokens."""


class Admit(Record, frozen=True, kw_only=True):
    """A request enters."""

    NAME = "kv.admit"
    tokens: int
    """Prompt tokens."""
    max_tokens: int | None = None


class Alloc(Record, frozen=True, kw_only=True):
    """The pages now belong to the request; a new generation of each begins."""

    NAME = "kv.alloc"
    pages: PageSet


class Share(Record, frozen=True, kw_only=True):
    """A prefix-cache hit: the request may read pages that it did not write."""

    NAME = "kv.share"
    pages: PageSet
    share_from: str | None = None
    tokens: int | None = None
    """Valid tokens in the pages; pages × page tokens when absent."""


class Write(Record, frozen=True, kw_only=True):
    """The request's own KV is now in the pages."""

    NAME = "kv.write"
    pages: PageSet
    tokens: int
    """Valid tokens of the request in this pool so far."""
    scope: Scope = Scope.TENANT


class TransferBegin(Record, frozen=True, kw_only=True):
    """Bytes may start to move (sender)."""

    NAME = "kv.transfer.begin"
    transfer: str
    pages: PageSet
    """Source pages; destination page *i* is ``peer_pages`` *i*."""
    peer_pool: str
    peer_pages: PageSet
    tokens: int
    digests: tuple[str, ...] | None = None


class TransferEnd(Record, frozen=True, kw_only=True):
    """This side will touch the pages no more."""

    NAME = "kv.transfer.end"
    transfer: str
    side: Side
    pages: PageSet
    tokens: int
    status: TransferStatus
    digests: tuple[str, ...] | None = None
    """The receiver's, computed from the bytes that arrived."""


class Read(Record, frozen=True, kw_only=True):
    """Attention reads the pages for the request."""

    NAME = "kv.read"
    pages: PageSet
    tokens: int
    """Tokens attended to."""


class Free(Record, frozen=True, kw_only=True):
    """The pages return to the free list; what they hold stays."""

    NAME = "kv.free"
    pages: PageSet


class Cache(Record, frozen=True, kw_only=True):
    """The request hands the pages to the prefix cache."""

    NAME = "kv.cache"
    pages: PageSet


class Scrub(Record, frozen=True, kw_only=True):
    """The pages were zeroed."""

    NAME = "kv.scrub"
    pages: PageSet


class Refuse(Record, frozen=True, kw_only=True):
    """The worker's own check found that the tags of these pages are not what the request's block table expects.

    Their bytes reached no output. Comes before the request's end on the stream, while it still has its pages.
    """

    NAME = "kv.refuse"
    pages: PageSet


class RequestEnd(Record, frozen=True, kw_only=True):
    """The request is over on this stream."""

    NAME = "kv.request.end"
    outcome: Outcome


class Respond(Record, frozen=True, kw_only=True):
    """Bytes leave for the client."""

    NAME = "kv.respond"
    status: int
    tokens: int = 0
    """Output tokens so far."""
    final: bool = False


KINDS: dict[str, type[Record]] = {
    cls.NAME: cls
    for cls in (
        Pool, Admit, Alloc, Share, Write, TransferBegin, TransferEnd, Read, Free, Cache, Scrub, RequestEnd, Respond,
        Refuse,
    )
}  # fmt: skip
"""Every record type by its span name."""
