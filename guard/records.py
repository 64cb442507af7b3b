"""The record convention (version 1): the one language that engines, hooks and the guard speak.

A record is something that happened to KV-cache pages, at one point in time, in the order of one emitter's
stream. It travels as an OpenTelemetry span whose name starts with ``kv.``; `from_attributes` and
`to_attributes` are the two directions of that mapping. Records describe operations, never contents: they
hold ids, counts and keyed digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self, TypeVar

import msgspec

PUBLIC = "public"
"""The label of pages whose contents are meant for every tenant (``kv.scope=public``)."""

MAX_PAGE_INDEX = 1 << 40
"""Page indices from here on are refused: no pool is that large, and a run of them must not cost memory."""

MAX_ID_LENGTH = 256
"""Longest stream, request, tenant, pool or transfer id, in characters."""


class RecordError(ValueError):
    """A span that is named like a record and is not one; the message names the field and what it holds.

    Attributes:
        header: The record's place in its stream when that much could be read, so that an invalid record
            is not mistaken for a lost one.
    """

    header: Record | None = None


class PageSet:
    """Page indices in a stated order, kept as runs, so that a request of 100,000 pages stays small.

    The order matters (page *i* of a transfer's source goes to page *i* of its destination) and an index
    may occur only once in well-formed records; `PageSet` itself does not insist on it.
    """

    __slots__ = ("_length", "runs")

    runs: tuple[tuple[int, int], ...]
    """Half-open runs ``(start, stop)`` in order."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.runs = tuple(runs)
        self._length = sum(stop - start for start, stop in self.runs)

    @classmethod
    def of(cls, indices: Iterable[int]) -> Self:
        """Keeps the indices in the order given, joining neighbours into runs."""
        runs: list[tuple[int, int]] = []
        start = stop = -1
        for index in indices:
            if index == stop:
                stop += 1
                continue
            if start >= 0:
                runs.append((start, stop))
            start, stop = index, index + 1
        if start >= 0:
            runs.append((start, stop))
        return cls(runs)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``12-15,40,7``; an empty string is no pages.

        Raises:
            ValueError: A part is not an index or a rising run, or an index is 2**40 or more.
        """
        runs: list[tuple[int, int]] = []
        for part in text.split(",") if text else ():
            first, dash, last = part.partition("-")
            # isdecimal alone admits other scripts' digits, which int() would take.
            if not (first.isascii() and first.isdecimal()) or (dash and not (last.isascii() and last.isdecimal())):
                raise ValueError(f"{part[:40]!r} is neither an index nor a run a-b")
            start, stop = int(first[:20]), int((last if dash else first)[:20]) + 1
            if stop <= start:
                raise ValueError(f"the run {part[:40]!r} does not rise")
            if stop > MAX_PAGE_INDEX:
                raise ValueError(f"{part[:40]!r} is beyond the largest page index, 2**40 - 1")
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return cls(runs)

    def sorted(self) -> PageSet:
        """The same indices in rising order, each once, in the fewest runs."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.runs):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return PageSet(merged)

    def __str__(self) -> str:
        return ",".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in self.runs)

    def __repr__(self) -> str:
        return f"PageSet.parse({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs:
            yield from range(start, stop)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and any(start <= index < stop for start, stop in self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageSet) and PageSet.of(self).runs == PageSet.of(other).runs

    def __hash__(self) -> int:
        return hash(PageSet.of(self).runs)


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
    )
}  # fmt: skip
"""Every record type by its span name."""

_ATTRIBUTES: dict[str, str] = {
    "context_limit": "kv.context.limit",
    "digests": "kv.digests",
    "epoch": "kv.stream.epoch",
    "final": "kv.final",
    "max_tokens": "kv.max_tokens",
    "outcome": "kv.outcome",
    "page_bytes": "kv.page.bytes",
    "page_tokens": "kv.page.tokens",
    "pages": "kv.pages",
    "peer_pages": "kv.peer.pages",
    "peer_pool": "kv.peer.pool.id",
    "pool": "kv.pool.id",
    "request": "kv.request.id",
    "role": "kv.role",
    "scope": "kv.scope",
    "seq": "kv.seq",
    "share_from": "kv.share.from",
    "side": "kv.side",
    "status": "kv.status",
    "stream": "kv.stream.id",
    "tenant": "kv.tenant.id",
    "tokens": "kv.tokens",
    "transfer": "kv.transfer.id",
}
"""Field → attribute; `Pool.pages` and `Respond.status` differ, see `_attribute`."""

AttributeValue = str | int | bool
_T = TypeVar("_T")
_HEADER = frozenset(Record.__struct_fields__)


def _attribute(cls: type[Record], field: str) -> str:
    if cls is Pool and field == "pages":
        return "kv.pool.pages"
    if cls is Respond and field == "status":
        return "http.response.status_code"
    return _ATTRIBUTES[field]


_FIELDS: dict[type[Record], tuple[tuple[str, str, bool, Any], ...]] = {
    cls: tuple(
        (f.name, _attribute(cls, f.name), f.required, f.type)
        for f in msgspec.structs.fields(cls)
        if f.name not in _HEADER
    )
    for cls in KINDS.values()
}


def is_record_name(name: str) -> bool:
    """Whether a span of this name is a record; every other span is ignored, ``kv.transfer`` included."""
    return name in KINDS


def from_attributes(name: str, time_ns: int, attributes: Mapping[str, Any]) -> Record:
    """Reads a record from a span's name, start time and attributes.

    Args:
        name: The span's name, one of `KINDS`.
        time_ns: The span's start.
        attributes: Attribute values; integers may come as decimal strings, as in OTLP/JSON.

    Raises:
        RecordError: A field is missing or is not what the convention says. Its ``header`` gives the place in
            the stream where that could still be read.
    """
    cls = KINDS[name]
    try:
        header: dict[str, Any] = {
            "stream": _id(attributes, "kv.stream.id"),
            "epoch": _int(attributes, "kv.stream.epoch"),
            "seq": _int(attributes, "kv.seq"),
            "time_ns": time_ns,
        }
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None
    try:
        if cls is not Pool and (cls is not Scrub or "kv.request.id" in attributes):
            header["request"] = _id(attributes, "kv.request.id")
            header["tenant"] = _id(attributes, "kv.tenant.id")
        if "kv.pool.id" in attributes:
            header["pool"] = _id(attributes, "kv.pool.id")
        body = {
            field: _READERS[kind](attributes, attribute)
            for field, attribute, required, kind in _FIELDS[cls]
            if required or attribute in attributes
        }
        record = cls(**header, **body)
        _check(record)
    except RecordError as error:
        bad = RecordError(f"{name} (stream {header['stream']}, seq {header['seq']}): {error}")
        bad.header = Record(**{k: header[k] for k in ("stream", "epoch", "seq", "time_ns")})
        raise bad from None
    return record


def to_attributes(record: Record) -> dict[str, AttributeValue]:
    """The span attributes of a record; its name is ``record.NAME`` and its start ``record.time_ns``."""
    attributes: dict[str, AttributeValue] = {
        "kv.stream.id": record.stream,
        "kv.stream.epoch": record.epoch,
        "kv.seq": record.seq,
    }
    if record.request is not None:
        attributes["kv.request.id"] = record.request
    if record.tenant is not None:
        attributes["kv.tenant.id"] = record.tenant
    if record.pool:
        attributes["kv.pool.id"] = record.pool
    for field, attribute, required, _kind in _FIELDS[type(record)]:
        value = getattr(record, field)
        if value is None or (not required and value is False):
            continue
        if isinstance(value, PageSet):
            value = str(value)
        elif isinstance(value, StrEnum):
            value = value.value
        elif isinstance(value, tuple):
            value = ",".join(value)
        attributes[attribute] = value
    return attributes


def _check(record: Record) -> None:
    """What no single field shows."""
    if isinstance(record, TransferBegin):
        if len(record.pages) != len(record.peer_pages):
            raise RecordError(f"kv.pages names {len(record.pages)} pages, kv.peer.pages {len(record.peer_pages)}")
        if record.digests is not None and len(record.digests) != len(record.pages):
            raise RecordError(f"kv.digests has {len(record.digests)} digests for {len(record.pages)} pages")
    elif isinstance(record, TransferEnd):
        if record.digests is not None and len(record.digests) != len(record.pages):
            raise RecordError(f"kv.digests has {len(record.digests)} digests for {len(record.pages)} pages")
    elif isinstance(record, Pool) and record.pages > MAX_PAGE_INDEX:
        raise RecordError(f"kv.pool.pages is {record.pages}, more than 2**40")


def _get(attributes: Mapping[str, Any], key: str) -> Any:
    try:
        return attributes[key]
    except KeyError:
        raise RecordError(f"{key} is missing") from None


def _id(attributes: Mapping[str, Any], key: str) -> str:
    value = _get(attributes, key)
    if not isinstance(value, str):
        raise RecordError(f"{key} is {value!r:.60}, not a string")
    if not value or len(value) > MAX_ID_LENGTH:
        raise RecordError(f"{key} has {len(value)} characters, not 1 to {MAX_ID_LENGTH}")
    return value


def _int(attributes: Mapping[str, Any], key: str) -> int:
    value = _get(attributes, key)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecordError(f"{key} is {value!r:.60}, not an integer")
    if not 0 <= value < 1 << 63:
        raise RecordError(f"{key} is {value}, not within 0 to 2**63 - 1")
    return value


def _bool(attributes: Mapping[str, Any], key: str) -> bool:
    value = _get(attributes, key)
    if not isinstance(value, bool):
        raise RecordError(f"{key} is {value!r:.60}, not a boolean")
    return value


def _pages(attributes: Mapping[str, Any], key: str) -> PageSet:
    value = _get(attributes, key)
    if not isinstance(value, str):
        raise RecordError(f"{key} is {value!r:.60}, not a string")
    try:
        return PageSet.parse(value)
    except ValueError as error:
        raise RecordError(f"{key}: {error}") from None


def _digests(attributes: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = _get(attributes, key)
    if not isinstance(value, str):
        raise RecordError(f"{key} is {value!r:.60}, not a string")
    digests = tuple(value.split(",")) if value else ()
    for digest in digests:
        if not digest or not set(digest) <= set("0123456789abcdef"):
            raise RecordError(f"{key}: {digest[:40]!r} is not lower-case hexadecimal")
    return digests


def _enum(kind: type[StrEnum]) -> Any:
    def read(attributes: Mapping[str, Any], key: str) -> StrEnum:
        value = _get(attributes, key)
        try:
            return kind(value)
        except ValueError:
            raise RecordError(f"{key} is {value!r:.60}, not one of {', '.join(kind)}") from None

    return read


_READERS: dict[Any, Any] = {
    int: _int,
    int | None: _int,
    bool: _bool,
    str: _id,
    str | None: _id,
    PageSet: _pages,
    tuple[str, ...] | None: _digests,
    **{kind: _enum(kind) for kind in (Role, Scope, Side, TransferStatus, Outcome)},
}
