"""The Python ledger and the native one side by side: the same input, and everything they say compared to the field."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

from guard.findings import Finding
from guard.ledger import Ledger, LedgerSettings
from guard.ledger.restored import Restored
from guard.native import _core
from guard.native.ledger import Ledger as NativeLedger
from guard.policy import Policy
from guard.records import Record

_MINIMISE_S = 10.0
"""How long a failing input is made smaller."""


class Op(NamedTuple):
    """One call: a record is fed, or (None) time passes; at the end the input is over."""

    record: Record | None
    now_ns: int = 0

    def __str__(self) -> str:
        if self.record is None:
            return f"advance to {self.now_ns / 1e6:g} ms"
        at = f"at {self.now_ns / 1e6:g} ms " if self.now_ns else ""
        r = self.record
        body = {
            name: str(value)
            for name in r.__struct_fields__
            if (value := getattr(r, name)) not in (None, "") and name not in ("stream", "epoch", "seq", "time_ns")
        }
        fields = " ".join(f"{name}={value}" for name, value in body.items())
        return f"{at}{r.stream}/{r.epoch}#{r.seq} ({r.time_ns / 1e6:g} ms) {r.NAME or 'place'} {fields}"


def feeds(records: Iterable[Record]) -> list[Op]:
    """Records as replay takes them."""
    return [Op(record) for record in records]


class Twin:
    """One of the two, and what it has said."""

    def __init__(self, kind: Callable[..., Any], policy: Policy | None, settings: LedgerSettings) -> None:
        self.found: list[Finding] = []
        self.killed: set[str] = set()
        self.retired: list[tuple[object, ...]] = []
        self.ledger = kind(policy, settings, self._on_finding, lambda r: self.retired.append(of_request(r)))

    def _on_finding(self, finding: Finding, new: bool) -> None:
        if new:
            self.found.append(finding)
        self.killed |= finding.kills

    def state(self) -> dict[str, object]:
        """Everything that can be asked of it, in words that can be compared."""
        ledger = self.ledger
        state: dict[str, object] = {
            "killed": sorted(self.killed), "retired": self.retired, "gaps": ledger.gaps, "dropped": ledger.dropped,
            "dropped_by": list(ledger.dropped_by.items()), "sizes": ledger.sizes,
            "order of requests": list(ledger.requests),
        }  # fmt: skip
        for number, text in enumerate(sorted(map(of_finding, self.found))):
            state[f"finding {number}"] = text
        for name, stream in ledger.streams.items():
            watermark = ledger.watermark(name)
            assert watermark == (stream.epoch, stream.processed)
            state[f"stream {name}"] = (*watermark, stream.duplicates, stream.late)
        for name, request in ledger.requests.items():
            state[f"request {name}"] = of_request(request)
        return state


def of_finding(f: Finding) -> str:
    where = f"{f.stream}/{f.epoch}#{f.seq} ({f.time_ns})"
    return (
        f"{f.kind.value} {f.request} {f.pool} {f.tenant} {f.action.value} {f.confidence.value} {where} "
        f"others={sorted(f.other_tenants)}/{sorted(f.other_requests)} subjects={sorted(f.subjects)} pages={f.pages} "
        f"transfer={f.transfer}: {f.reason}"
    )


def of_request(r: Any) -> tuple[object, ...]:
    return r.id, r.tenant, r.verdict, r.killed, sorted(r.lineage), r.disclosed


def difference(a: dict[str, object], b: dict[str, object]) -> str:
    """What is not the same, line by line; empty when all is."""
    lines = []
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            lines += [f"{key}:", f"  python {a.get(key)}", f"  native {b.get(key)}"]
    return "\n".join(lines)


def differ(
    policy: Policy | None, settings: LedgerSettings, ops: list[Op], batch: int = 1, before: Restored | None = None
) -> str:
    """Runs both; what differs, empty when nothing does.

    Args:
        policy: For both.
        settings: For both.
        ops: What is done with them.
        batch: How many records the native one is given at once; they are compared after each batch.
        before: What both know of a guard before them.
    """
    python, native = Twin(Ledger, policy, settings), Twin(NativeLedger, policy, settings)
    if before is not None:
        python.ledger.restore(before)
        native.ledger.restore(before)
    for first in range(0, len(ops), batch):
        for now_ns, group in groupby(ops[first : first + batch], key=lambda op: op.now_ns):
            rows = _core.Rows()
            for record, _ in group:
                if record is None:
                    native.ledger.feed_rows(rows, now_ns)
                    rows = _core.Rows()
                    python.ledger.advance(now_ns)
                    native.ledger.advance(now_ns)
                else:
                    python.ledger.feed(record, now_ns)
                    if batch == 1:
                        native.ledger.feed(record, now_ns)
                    else:
                        rows.append(record)
            native.ledger.feed_rows(rows, now_ns)
        if python.killed != native.killed or python.ledger.gaps != native.ledger.gaps:
            return f"after {ops[first]}:\n{difference(python.state(), native.state())}"
    if diff := difference(python.state(), native.state()):
        return f"before the end:\n{diff}"
    python.ledger.finish()
    native.ledger.finish()
    return difference(python.state(), native.state())


def assert_alike(
    policy: Policy | None, settings: LedgerSettings, ops: list[Op], batch: int = 1, before: Restored | None = None
) -> None:
    """Both ledgers say the same; otherwise fails with the shortest input found that shows the difference."""
    if not differ(policy, settings, ops, batch, before):
        return
    ops = minimal(policy, settings, ops, batch, before)
    told = "\n".join(f"  {op}" for op in ops)
    raise AssertionError(
        f"the ledgers differ under {policy!r}\n{settings!r}, batches of {batch}, after {before!r}, over\n{told}\n"
        f"{differ(policy, settings, ops, batch, before)}"
    )


def minimal(
    policy: Policy | None, settings: LedgerSettings, ops: list[Op], batch: int = 1, before: Restored | None = None
) -> list[Op]:
    """Leaves out what the difference does not need."""
    until = time.monotonic() + _MINIMISE_S
    size = len(ops) // 2
    while size >= 1:
        start = 0
        while start < len(ops) and time.monotonic() < until:
            fewer = ops[:start] + ops[start + size :]
            if differ(policy, settings, fewer, batch, before):
                ops = fewer
            else:
                start += size
        size //= 2
    return ops
