"""Which incident a finding belongs to: the ledger thread's side of the incidents."""

from __future__ import annotations

import base64
import secrets
import time
from collections import OrderedDict
from dataclasses import replace

from guard.findings import Action, Finding, Kind, Severity
from guard.incidents.recent import Recent
from guard.incidents.recorder import Saved
from guard.incidents.store import Incident

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
"""What an incident says was done, by mode and action."""


def new_id() -> str:
    """An incident id: short enough to read out, and not to be guessed from another."""
    return "inc-" + base64.b32encode(secrets.token_bytes(10)).decode()[:10].lower()


class _Open:
    """An incident that can still grow."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident
        self.findings: dict[tuple[str, str | None, str | None], Finding] = {}
        self.action = Action.OBSERVE


class Book:
    """Groups findings into incidents: one a request, or one a kind and pool where no request is named."""

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

    def note(self, finding: Finding, request: str | None, tenant: str | None, received_ns: int) -> Incident:
        """Puts a finding, new or grown, into the incident of this request.

        Args:
            finding: The finding.
            request: Whose incident: the finding's own request or one that it kills.
            tenant: That request's tenant.
            received_ns: When the record now being judged was received.

        Returns:
            The incident, with its id; it is yet to be saved.
        """
        key = request if request is not None else f"\0{finding.kind}\0{finding.pool or finding.stream}"
        entry = self._open.get(key)
        if entry is None:
            now_ns = time.time_ns()
            entry = self._open[key] = _Open(
                Incident(
                    id=new_id(), opened_ns=now_ns, updated_ns=now_ns, kind=finding.kind, severity=finding.severity,
                    action="", mode=self._mode, request=request, tenant=tenant, pool=finding.pool, disclosed=False,
                    record_ns=finding.time_ns, received_ns=received_ns, verdict_ns=None,
                )
            )  # fmt: skip
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(key)
        incident = entry.incident
        action = finding.action
        if action is Action.KILL and request not in finding.kills:
            action = Action.ALERT
        if action.rank > entry.action.rank or not incident.action:
            entry.action = action
            incident.action = ACTED[self._mode, action]
            if incident.verdict_ns is None:
                incident.record_ns, incident.received_ns = finding.time_ns, received_ns
        entry.findings[finding.kind, finding.request, finding.pool] = finding
        self._touched[key] = entry
        return incident

    def forget(self, request: str) -> None:
        """The request is over and forgotten: a later one of the same id gets an incident of its own."""
        self._open.pop(request, None)

    def take_changed(self) -> list[Saved]:
        """Copies of the incidents that changed since the last call, with the evidence for them."""
        touched, self._touched = self._touched, {}
        return [self._saved(entry) for entry in touched.values()]

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
        evidence = self._recent.evidence(requests, {f.stream for f in findings}, offending)
        for e in evidence:
            if e.offending and e.record.time_ns == incident.record_ns:
                incident.received_ns = e.received_ns
        bodies = [{**f.as_json(), "reason": f.reason, "time_ns": f.time_ns} for f in findings]
        return Saved(replace(incident, findings=bodies), evidence)
