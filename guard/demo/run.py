"""Plays every scenario on a fresh engine, without the guard and then with it, and says what came of it."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from guard.demo.client import TENANTS, Answer, Client, leaked, leaked_bytes
from guard.demo.scenarios import SCENARIOS, Played, Scenario
from guard.demo.stand import Stand
from guard.incidents.store import Incident, Store

TRIES = 3
"""How often a fault may be tried, without the guard, until it leaks; what a model says is not in our hands."""
CLEAN_REQUESTS = 50
_SETTLE_S = 5.0

Progress = Callable[[str], None]


@dataclass
class Unguarded:
    """What the other tenant got without the guard."""

    status: int = 0
    leaked: int = 0
    """Bytes of the canary's secret part in the answer."""
    text: str = field(default="", repr=False)
    trace: str = field(default="", repr=False)
    """The piece of the canary in the text."""


@dataclass
class Guarded:
    """What the other tenant got with the guard, and what the guard did."""

    status: int = 0
    leaked: int = 0
    findings: list[str] = field(default_factory=list)
    incident: str | None = None
    verdict_ms: float | None = None
    """From the record that gave it away to the verdict on the board."""
    cut_ms: float | None = None
    """From that record to the client's last byte."""
    text: str = field(default="", repr=False)


@dataclass
class FaultResult:
    """One fault, side by side."""

    fault: str
    without_guard: Unguarded
    with_guard: Guarded
    caught: bool


@dataclass
class CleanResult:
    """A run without any fault: nothing may be found."""

    requests: int
    findings: int


@dataclass
class Report:
    """All of it."""

    faults: list[FaultResult] = field(default_factory=list)
    clean: CleanResult | None = None

    @property
    def ok(self) -> bool:
        """Whether every fault was caught, nothing leaked past the guard, and the clean run was clean."""
        return (
            all(result.caught and not result.with_guard.leaked for result in self.faults)
            and (self.clean is None or self.clean.findings == 0)
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The object that `guardctl demo -o json` prints: what was said is not in it."""
        faults = [asdict(result) for result in self.faults]
        for result in faults:
            del result["without_guard"]["text"], result["without_guard"]["trace"], result["with_guard"]["text"]
        return {"faults": faults, "clean": asdict(self.clean) if self.clean else None, "ok": self.ok}


def run(faults: Iterable[str] | None, folder: Path, progress: Progress) -> Report:
    """Runs the demo.

    Args:
        faults: Names of faults; None: all of them, and the clean run.
        folder: For configurations, logs and incident stores.
        progress: Called with a line on what is being done.

    Raises:
        StandError: Engine or guard did not start.
    """
    report = Report()
    chosen = [s for s in SCENARIOS if faults is None or s.fault in set(faults)]
    for number, scenario in enumerate(chosen, 1):
        head = f"[{number}/{len(chosen)}] {scenario.fault}"
        without = _without(scenario, folder / f"{scenario.fault}-off", partial(_headed, progress, head))
        guarded = _with(scenario, folder / f"{scenario.fault}-on", partial(_headed, progress, head))
        caught = bool(scenario.kinds & set(guarded.findings)) and not guarded.leaked
        report.faults.append(FaultResult(scenario.fault, without, guarded, caught))
    if faults is None:
        progress(f"clean run: {CLEAN_REQUESTS} requests of {len(TENANTS)} tenants")
        report.clean = _clean(folder / "clean")
    return report


def _headed(progress: Progress, head: str, line: str) -> None:
    progress(f"{head}: {line}")


def _engine(scenario: Scenario) -> dict[str, Any]:
    return {"model": "smollm2", **scenario.engine}


def _without(scenario: Scenario, folder: Path, progress: Progress) -> Unguarded:
    progress("starting the engine, no guard")
    result = Unguarded()
    with Stand(folder, _engine(scenario), (scenario.fault,)) as stand:
        for number in range(TRIES if scenario.leaks_text else 1):
            progress(f"no guard, try {number + 1}")
            played = _play(scenario, stand)
            trace = leaked(played.canary, played.answer.text)
            if number == 0 or trace:
                result = Unguarded(played.answer.status, len(trace), played.answer.text, trace)
            if trace:
                break
    return result


def _with(scenario: Scenario, folder: Path, progress: Progress) -> Guarded:
    progress("starting engine and guard")
    with Stand(folder, _engine(scenario), (scenario.fault,), guarded=True, guard=scenario.guard) as stand:
        played: list[Played] = []
        for number in range(scenario.tries):
            progress(f"guarded, try {number + 1}")
            played.append(_play(scenario, stand))
        incidents = _incidents(
            stand, lambda found: bool(scenario.kinds & {f["kind"] for i in found for f in i.findings})
        )
    answer = played[0].answer
    result = Guarded(
        status=answer.status,
        leaked=max(leaked_bytes(p.canary, p.answer.text) for p in played),
        findings=sorted({f["kind"] for incident in incidents for f in incident.findings}),
        text=answer.text,
    )
    incident = _whose(answer, scenario, incidents)
    if incident is not None:
        result.incident = incident.id
        if incident.verdict_ns is not None:
            result.verdict_ms = round((incident.verdict_ns - incident.record_ns) / 1e6, 2)
            if answer.code == "kv_guard_killed":
                result.cut_ms = round((answer.ended_ns - incident.record_ns) / 1e6, 2)
    return result


def _play(scenario: Scenario, stand: Stand) -> Played:
    async def play() -> Played:
        client = Client(stand.url)
        try:
            return await scenario.play(client, random.Random(secrets.randbits(64)))
        finally:
            await client.close()

    return asyncio.run(play())


def _incidents(stand: Stand, enough: Callable[[list[Incident]], bool]) -> list[Incident]:
    """What the guard has written down, waited for some seconds: it writes after it has acted."""
    deadline = time.monotonic() + _SETTLE_S
    store = Store.open(stand.incidents, read_only=True)
    while not enough(found := store.list(1000)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _whose(answer: Answer, scenario: Scenario, incidents: list[Incident]) -> Incident | None:
    """The incident that the client was told, or his request's, or the one that shows the fault."""
    for fits in (
        lambda i: i.id == answer.incident,
        lambda i: i.request is not None and i.request == answer.rid,
        lambda i: scenario.shown_by([i]),
    ):
        for incident in incidents:
            if fits(incident):
                return incident
    return None


def _clean(folder: Path) -> CleanResult:
    """Requests of all tenants, mixed: chats and completions, streams, clients that leave, shared beginnings."""

    async def play(stand: Stand) -> int:
        client = Client(stand.url)
        limit = asyncio.Semaphore(8)
        rng = random.Random(7)

        async def one(number: int) -> None:
            tenant = TENANTS[number % len(TENANTS)]
            text = f"Note {number % 5}: the harbour is open. " * rng.randrange(1, 12)
            tokens = rng.randrange(1, 24)
            async with limit:
                if number % 10 == 9:
                    leaving = asyncio.create_task(client.stream(tenant, text, max_tokens=64))
                    await asyncio.sleep(rng.random() * 0.5)
                    leaving.cancel()
                elif number % 3 == 0:
                    await client.chat(tenant, text, max_tokens=tokens)
                else:
                    await client.stream(tenant, text, max_tokens=tokens)

        await asyncio.gather(*(one(number) for number in range(CLEAN_REQUESTS)))
        await client.close()
        return CLEAN_REQUESTS

    engine = {"model": "smollm2", "prefill": {"pages": 64}, "decode": {"pages": 48}}
    with Stand(folder, engine, guarded=True) as stand:
        requests = asyncio.run(play(stand))
        _wait_until_idle(stand)
        found = _incidents(stand, bool)
    return CleanResult(requests, sum(len(incident.findings) for incident in found))


def _wait_until_idle(stand: Stand) -> None:
    """Until no request is left in the engine."""

    async def wait() -> None:
        client = Client(stand.url)
        for _ in range(200):
            info = await client.info(stand.admin_key)
            if not any(worker.get("requests") for worker in info["workers"]):
                break
            await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(wait())
