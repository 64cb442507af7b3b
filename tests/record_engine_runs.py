"""Records real runs of the reference engine, one of each fault and one without, into ``data/engine_runs``.

``python tests/record_engine_runs.py [FAULT...]``: for whoever changes what the engine says. A run is a file of
OTLP/JSON lines, a record a line, compressed; nothing but ids, counts and keyed digests is in them.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine_runs import CORRECT, RUNS
from guarded import TraceSink

from guard.demo.client import ALICE, BOB, TENANTS, Client
from guard.demo.scenarios import SCENARIOS
from guard.demo.stand import Stand
from guard.records import to_attributes

TRIES = 2
NAMES = {str: "stringValue", int: "intValue", bool: "boolValue"}

Play = Callable[[Client, random.Random], Awaitable[object]]


async def unfaulty(client: Client, rng: random.Random) -> None:
    """Requests of all tenants at once, of which some leave and some share their beginnings."""

    async def one(number: int) -> None:
        tenant = TENANTS[number % len(TENANTS)]
        text = f"Note {number % 3}: the harbour is open. " * rng.randrange(1, 12)
        if number % 6 == 5:
            leaving = asyncio.create_task(client.stream(tenant, text, max_tokens=64))
            await asyncio.sleep(rng.random() * 0.3)
            leaving.cancel()
        elif number % 2:
            await client.chat(tenant, text, max_tokens=rng.randrange(1, 24))
        else:
            await client.stream(tenant, text, max_tokens=rng.randrange(1, 24))

    await asyncio.gather(*(one(number) for number in range(30)))
    # And some one after the other: what was cached is there.
    for tenant in (ALICE, ALICE, BOB):
        await client.complete(tenant, "The harbour is open in winter. " * 8, max_tokens=4)


def record(name: str, faults: tuple[str, ...], play: Play, engine: dict[str, Any]) -> None:
    """One run into its file."""

    async def several() -> None:
        client = Client(stand.url)
        rng = random.Random(1)
        for _ in range(TRIES):
            await play(client, rng)
        await client.close()

    with TraceSink() as sink:
        folder = Path(tempfile.mkdtemp(prefix="kvg"))
        with Stand(folder, {"model": "smollm2", "otlp_endpoint": sink.url, **engine}, faults) as stand:
            asyncio.run(several())
        records = sink.records()
    with gzip.GzipFile(RUNS / f"{name}.jsonl.gz", "wb", mtime=0) as file:
        for item in records:
            attributes = [{"key": k, "value": {NAMES[type(v)]: v}} for k, v in to_attributes(item).items()]
            span = {"name": item.NAME, "startTimeUnixNano": str(item.time_ns), "attributes": attributes}
            line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}, separators=(",", ":"))
            file.write(line.encode() + b"\n")
    print(f"{name}: {len(records)} records")


def main() -> None:
    """Records what is named, or everything."""
    RUNS.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:]
    for scenario in SCENARIOS:
        if not wanted or scenario.fault in wanted:
            record(scenario.fault, (scenario.fault,), scenario.play, scenario.engine)
    if not wanted or CORRECT in wanted:
        record(CORRECT, (), unfaulty, {"prefill": {"pages": 64}, "decode": {"pages": 48}})


if __name__ == "__main__":
    main()
