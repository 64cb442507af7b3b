"""What goes into each incident: the findings that belong to it, and the records that led to them.

Which incident a finding belongs to, and its id, the native core has said before: it stands on the verdict board.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from guard.findings import Action, Finding, Kind, Severity
from guard.incidents.recorder import Saved
from guard.incidents.store import Evidence, Incident
from guard.records import Record

_KINDS = {kind: n for n, kind in enumerate(Kind)}
_SEVERITIES = {severity: n for n, severity in enumerate(Severity)}
_OTHERS_SHOWN = 8
"""Other requests whose records an incident gets, at most."""

ACTED = {
    ("enforce", Action.KILL): "killed",
    ("enforce", Action.QUARANTINE): "quarantined",
    ("monitor", Action.KILL): "observed: would kill",
    ("monitor", Action.QUARANTINE): "observed: would quarantine",
    **{(mode, Action.ALERT): "alerted" for mode in ("enforce", "monitor")},
    **{(mode, Action.OBSERVE): "observed" for mode in ("enforce", "monitor")},
}
"""What an incident says was done, by mode and action; the native core says the same in its journal."""


class State(Protocol):
    """What the native core says of an incident."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def request(self) -> str | None:
        """Whose it is: the finding's own request or one that it kills; None if the finding names none."""

    @property
    def tenant(self) -> str | None:
        """That request's tenant."""

    @property
    def record_ns(self) -> int:
        """Of a kill: when the record happened that gave it away."""

    @property
    def received_ns(self) -> int:
        """When the guard had that."""

    @property
    def verdict_ns(self) -> int:
        """When the verdict was on the board; 0 if nothing was to be killed."""


class Recent(Protocol):
    """Where evidence comes from."""

    def evidence(self, requests: Sequence[str], streams: Sequence[str]) -> list[tuple[Record, int]]:
        """What is kept of these requests, and of these streams' records that have no request; each with the time
        when it was received.
        """


class _Open:
    """An incident that can still grow."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident
        self.findings: dict[tuple[str, str | None, str | None], Finding] = {}
        self.action = Action.OBSERVE


class Book:
    """Gathers findings by incident: there is one for each request, or for each kind and pool where none is named."""

    def __init__(self, mode: str, recent: Recent, *, limit: int = 65_536) -> None:
        """Makes an empty book.

        Args:
            mode: ``monitor`` or ``enforce``.
            recent: Where evidence comes from.
            limit: Incidents that can grow at once; those longest quiet are closed.
        """
        self._mode = mode
        self._recent = recent
        self._limit = limit
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._touched: dict[str, _Open] = {}
        self._killed: list[Incident] = []

    def note(self, finding: Finding, state: State, received_ns: int) -> Incident:
        """Puts a finding, new or grown, into its incident.

        Args:
            finding: The finding.
            state: The incident.
            received_ns: When the record was received that showed it.

        Returns:
            The incident; it is yet to be saved.
        """
        entry = self._open.get(state.id)
        if entry is None:
            now_ns = time.time_ns()
            entry = self._open[state.id] = _Open(
                Incident(
                    id=state.id, opened_ns=now_ns, updated_ns=now_ns, kind=finding.kind, severity=finding.severity,
                    action="", mode=self._mode, request=state.request, tenant=state.tenant, pool=finding.pool,
                    disclosed=False, record_ns=finding.time_ns, received_ns=received_ns, verdict_ns=None,
                )
            )  # fmt: skip
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(state.id)
        incident = entry.incident
        action = finding.action
        if action is Action.KILL and state.request not in finding.kills:
            action = Action.ALERT
        if action.rank > entry.action.rank or not incident.action:
            entry.action = action
            incident.action = ACTED[self._mode, action]
            if incident.verdict_ns is None:
                incident.record_ns, incident.received_ns = finding.time_ns, received_ns
        if state.verdict_ns and incident.verdict_ns is None:
            incident.record_ns, incident.received_ns = state.record_ns, state.received_ns
            incident.verdict_ns = state.verdict_ns
            self._killed.append(incident)
        entry.findings[finding.kind, finding.request, finding.pool] = finding
        self._touched[state.id] = entry
        return incident

    def forget(self, incident: str) -> None:
        """Its request is over and forgotten: it grows no more."""
        self._open.pop(incident, None)

    def take_changed(self) -> list[Saved]:
        """Copies of the incidents that changed since the last call, with the evidence for them."""
        touched, self._touched = self._touched, {}
        return [self._saved(entry) for entry in touched.values()]

    def take_killed(self) -> list[Incident]:
        """Those whose request was killed since the last call, or would have been."""
        killed, self._killed = self._killed, []
        return killed

    def _saved(self, entry: _Open) -> Saved:
        incident, findings = entry.incident, list(entry.findings.values())
        worst = min(findings, key=lambda f: (-_SEVERITIES[f.severity], _KINDS[f.kind]))
        incident.kind, incident.severity, incident.pool = worst.kind, worst.severity, worst.pool
        incident.disclosed = any(f.kind is Kind.TAINTED_RESPONSE for f in findings)
        incident.updated_ns = time.time_ns()
        offending = {(f.stream, f.epoch, f.seq) for f in findings}
        named = {f.request for f in findings} | {incident.request}
        others = {request for f in findings for request in f.other_requests} - named
        requests = {request for request in named if request} | set(sorted(others)[:_OTHERS_SHOWN])
        evidence = []
        for record, received_ns in self._recent.evidence(sorted(requests), sorted({f.stream for f in findings})):
            offends = (record.stream, record.epoch, record.seq) in offending
            evidence.append(Evidence(record, received_ns, offends))
            if offends and record.time_ns == incident.record_ns:
                incident.received_ns = received_ns
        bodies = [{**f.as_json(), "reason": f.reason, "time_ns": f.time_ns} for f in findings]
        return Saved(replace(incident, findings=bodies), evidence)
