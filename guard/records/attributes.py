"""Records as span attributes and back: the mapping of the convention, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from guard.records.kinds import (
    KINDS,
    Outcome,
    Pool,
    Record,
    Respond,
    Role,
    Scope,
    Scrub,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
)
from guard.records.pages import MAX_PAGE_INDEX, PageSet

MAX_ID_LENGTH = 256
"""Longest stream, request, tenant, pool or transfer id, in characters."""


class RecordError(ValueError):
    """A span that is named like a record and is not one; the message names the field and what it holds.

    Attributes:
        header: The record's place in its stream when that much could be read, so that an invalid record
            is not mistaken for a lost one.
    """

    header: Record | None = None


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
