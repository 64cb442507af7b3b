"""Incidents out of the journal: the store gets what it lacks, and nothing that it has is lost by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guard_process import until

from guard.incidents.recorder import Recorder, Saved
from guard.incidents.recovered import recovered
from guard.incidents.store import Incident, Store


def text(**changes: Any) -> bytes:
    finding = {
        "kind": "foreign-read", "severity": "critical", "action": "kill", "request": "b1", "tenant": "tenant-b",
        "other_tenants": ["tenant-a"], "other_requests": ["a1"], "pool": "d", "pages": "0-1", "transfer": None,
        "stream": "d", "seq": 7, "confidence": "full", "reason": "read pages", "time_ns": 5, "epoch": 1,
    }  # fmt: skip
    noted = {
        "id": "inc-aaaaaaaaaa", "request": "b1", "tenant": "tenant-b", "kind": "foreign-read", "severity": "critical",
        "action": "killed", "pool": "d", "mode": "enforce", "finding": finding, "record_ns": 5, "received_ns": 6,
        "verdict_ns": 7,
    }  # fmt: skip
    return json.dumps({**noted, **changes}).encode()


def settle(path: Path, *events: Any) -> list[str]:
    """Puts the events into the store; what the recorder says that it has."""
    saved: list[str] = []
    recorder = Recorder(str(path))
    recorder.on_saved = saved.extend
    recorder.start()
    for event in events:
        recorder.put(event)
    until(lambda: recorder.depth == 0)
    recorder.stop()
    return saved


def stored(path: Path) -> Incident:
    (incident,) = Store.open(path, read_only=True).list()
    return incident


def test_what_the_store_lacks_is_put_into_it(tmp_path: Path) -> None:
    path = tmp_path / "incidents.db"
    assert settle(path, *recovered([text()])) == ["inc-aaaaaaaaaa"]
    incident = stored(path)
    assert (incident.request, incident.tenant, incident.pool) == ("b1", "tenant-b", "d")
    assert (incident.kind, incident.severity, incident.action) == ("foreign-read", "critical", "killed")
    assert (incident.record_ns, incident.received_ns, incident.verdict_ns, incident.opened_ns) == (5, 6, 7, 7)
    (finding,) = incident.findings
    assert (finding["pages"], finding["other_tenants"], finding["reason"]) == ("0-1", ["tenant-a"], "read pages")


def test_what_the_store_has_stays(tmp_path: Path) -> None:
    path = tmp_path / "incidents.db"
    ((known,),) = [list(recovered([text()]))]
    whole = replace(
        known.incident,
        kind="tainted-response",
        disclosed=True,
        updated_ns=99,
        findings=[{**known.incident.findings[0], "pages": "0-9"}, {**known.incident.findings[0], "kind": "stale-read"}],
    )
    settle(path, Saved(whole, []), known)
    incident = stored(path)
    assert (incident.kind, incident.disclosed, incident.updated_ns) == ("tainted-response", True, 99)
    assert sorted((f["kind"], f["pages"]) for f in incident.findings) == [
        ("foreign-read", "0-9"),
        ("stale-read", "0-1"),
    ]


def test_that_it_was_killed_is_added(tmp_path: Path) -> None:
    path = tmp_path / "incidents.db"
    (known,) = recovered([text()])
    alerted = replace(known.incident, kind="double-free", severity="high", action="alerted", verdict_ns=None)
    alerted.findings = [{**known.incident.findings[0], "kind": "double-free"}]
    settle(path, Saved(alerted, []), known)
    incident = stored(path)
    assert (incident.kind, incident.action, incident.verdict_ns) == ("foreign-read", "killed", 7)
    assert {f["kind"] for f in incident.findings} == {"double-free", "foreign-read"}


def test_one_that_names_no_request(tmp_path: Path) -> None:
    path = tmp_path / "incidents.db"
    settle(path, *recovered([text(request=None, tenant=None, received_ns=None, verdict_ns=None, action="alerted")]))
    incident = stored(path)
    assert (incident.request, incident.verdict_ns, incident.opened_ns) == (None, None, 5)


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"{", b"\xff", b"[]", b"{}", text(id=1), text(finding=None), text(finding={}), text(finding=[1]),
        text(record_ns="x"),
    ],
)  # fmt: skip
def test_what_is_none_is_told_of_and_left_out(broken: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    assert [r.incident.id for r in recovered([broken, text()])] == ["inc-aaaaaaaaaa"]
    said = json.loads(capfd.readouterr().err)
    assert said["event"] == "an incident in the journal cannot be read"
