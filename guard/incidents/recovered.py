"""Incidents that the guard before this one had told of and may not have saved: out of its journal, into the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from guard.findings import Kind
from guard.incidents.recorder import Recovered
from guard.incidents.store import Incident
from guard.log import log


class _Finding(msgspec.Struct):
    """What the store's tables are looked up by; the rest of it is taken as it is."""

    kind: str
    request: str | None
    pool: str | None
    time_ns: int


class _Noted(msgspec.Struct):
    """As the native core writes it; see its incidents.hpp."""

    id: str
    request: str | None
    tenant: str | None
    kind: str
    severity: str
    action: str
    pool: str | None
    mode: str
    finding: msgspec.Raw
    record_ns: int
    received_ns: int | None
    verdict_ns: int | None


def recovered(texts: Iterable[bytes]) -> Iterator[Recovered]:
    """The incidents in a journal's texts; what is none is told of in the log and left out.

    Args:
        texts: What the journal gave when it was opened, oldest first.
    """
    for text in texts:
        try:
            yield Recovered(_incident(msgspec.json.decode(text, type=_Noted)))
        except msgspec.DecodeError as error:
            log("error", "an incident in the journal cannot be read", error=str(error))


def _incident(noted: _Noted) -> Incident:
    finding: dict[str, Any] = msgspec.json.decode(noted.finding)
    known = msgspec.convert(finding, _Finding)
    return Incident(
        id=noted.id, opened_ns=noted.verdict_ns or noted.received_ns or noted.record_ns, updated_ns=time.time_ns(),
        kind=noted.kind, severity=noted.severity, action=noted.action, mode=noted.mode, request=noted.request,
        tenant=noted.tenant, pool=noted.pool, disclosed=known.kind == Kind.TAINTED_RESPONSE,
        record_ns=noted.record_ns, received_ns=noted.received_ns, verdict_ns=noted.verdict_ns, findings=[finding],
    )  # fmt: skip
