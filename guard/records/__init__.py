"""The record convention (version 1): the one language that engines, hooks and the guard speak.

A record is something that happened to KV-cache pages, at one point in time, in the order of one emitter's
stream. It travels as an OpenTelemetry span whose name starts with ``kv.``; `from_attributes` and
`to_attributes` are the two directions of that mapping. Records describe operations, never contents: they
hold ids, counts and keyed digests.
"""

from guard.records.attributes import (
    MAX_ID_LENGTH,
    AttributeValue,
    RecordError,
    from_attributes,
    is_record_name,
    to_attributes,
)
from guard.records.kinds import (
    KINDS,
    PUBLIC,
    Admit,
    Alloc,
    Cache,
    Free,
    Outcome,
    Pool,
    Read,
    Record,
    Refuse,
    RequestEnd,
    Respond,
    Role,
    Scope,
    Scrub,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)
from guard.records.pages import MAX_PAGE_INDEX, MAX_PAGES, PageSet

__all__ = [
    "KINDS",
    "MAX_ID_LENGTH",
    "MAX_PAGES",
    "MAX_PAGE_INDEX",
    "PUBLIC",
    "Admit",
    "Alloc",
    "AttributeValue",
    "Cache",
    "Free",
    "Outcome",
    "PageSet",
    "Pool",
    "Read",
    "Record",
    "RecordError",
    "Refuse",
    "RequestEnd",
    "Respond",
    "Role",
    "Scope",
    "Scrub",
    "Share",
    "Side",
    "TransferBegin",
    "TransferEnd",
    "TransferStatus",
    "Write",
    "from_attributes",
    "is_record_name",
    "to_attributes",
]
