"""An engine for the restart test: what a modelled one does, with seeded bugs in between, by the ring or over OTLP.

``restart_traffic.py FLEET CARRIER WHERE TRUTH SEED RATE`` emits until its standard input is closed. It says ``bug ID``
for each request that a guard which misses nothing kills, and writes every record that it emitted into TRUTH.
"""

from __future__ import annotations

import random
import select
import sys
import time
from typing import Any

import msgspec
from engine_model import PAGE_TOKENS, Model, Worker
from opentelemetry.sdk.trace import TracerProvider

from guard.native._core import Rows
from guard.records import Admit, Alloc, Free, Outcome, PageSet, Read, Record, RequestEnd, Respond, Write
from hooks.emit import Emitter, configure

PAGES = 16
BUG_PAGES = 4
_LIVES = 16
"""Sides of requests that are under way at most."""
_BUG_EVERY = 60
"""Steps of the model between two bugs."""


class Emitting(Model):
    """A model whose records leave at once, and whose workers and requests bear the fleet's name."""

    def __init__(self, fleet: str, carrier: str, where: str, seed: int) -> None:
        self.fleet = fleet
        rng = random.Random(seed)
        self.emitters: dict[str, Emitter] = {}
        self.provider: TracerProvider | None = None
        self.truth = Rows()
        self.arrived = 0
        self._carrier, self._where = carrier, where
        super().__init__(iter(lambda: rng.randrange(256), None), pages=PAGES)

    def emitter(self, stream: str) -> Emitter:
        emitter = self.emitters.get(stream)
        if emitter is None:
            if self._carrier == "ring":
                emitter, _ = configure(stream, endpoint=None, ring=self._where)
            elif self.provider is None:
                emitter, self.provider = configure(stream, endpoint=self._where)
            else:
                emitter = Emitter(stream, tracer_provider=self.provider)
            self.emitters[stream] = emitter
        return emitter

    def emit(self, worker: Worker, record: Record) -> Record:
        emitter = self.emitter(f"{self.fleet}-{worker.name}")
        changes: dict[str, Any] = {"time_ns": time.time_ns()}
        if record.NAME == "kv.pool":
            changes["pages"] = PAGES + BUG_PAGES
        if (peer := getattr(record, "peer_pool", None)) is not None:
            changes["peer_pool"] = f"{self.fleet}-{peer}"
        record = msgspec.structs.replace(record, **changes)
        seq = emitter.emit(record)
        self.truth.append(msgspec.structs.replace(record, stream=emitter.stream, epoch=emitter.epoch, seq=seq))
        return record

    def arrive(self, tenant: str | None = None, tokens: int | None = None) -> Any:
        r = super().arrive(tenant, tokens)
        self.arrived += 1
        r.id = f"{self.fleet}-r{self.arrived}"
        return r

    def step(self) -> None:
        """Without end: not more requests than the pools can serve, and no two that wait for each other for ever."""
        lives = [(worker, life) for worker in self.workers for life in worker.lives]
        choice = self.pick(40)
        if not lives or (choice < 6 and len(lives) < _LIVES):
            self.arrive()
            return
        worker, life = lives[self.pick(len(lives))]
        if choice == 39:
            life[0].cancelled = True
        elif next(life[1], life) is life:
            worker.lives.remove(life)
        if len(self.requests) > 1000:
            del self.requests[:]

    def bug(self, number: int) -> str:
        """Decode reads what another tenant's request left in pages that it got and did not write."""
        worker, pages = self.workers[-1], PageSet(((PAGES, PAGES + BUG_PAGES),))
        tokens = BUG_PAGES * PAGE_TOKENS
        victim = {"request": f"{self.fleet}-left{number}", "tenant": "tenant-v"}
        who = {"request": f"{self.fleet}-bug{number}", "tenant": "tenant-w"}
        for record in (
            Admit(**victim, tokens=tokens), Alloc(**victim, pages=pages),
            Write(**victim, pages=pages, tokens=tokens), Read(**victim, pages=pages, tokens=tokens),
            RequestEnd(**victim, outcome=Outcome.FINISHED), Free(**victim, pages=pages),
            Admit(**who, tokens=tokens), Alloc(**who, pages=pages), Read(**who, pages=pages, tokens=0),
            Respond(**who, status=200, tokens=1), RequestEnd(**who, outcome=Outcome.FINISHED), Free(**who, pages=pages),
        ):  # fmt: skip
            self.emit(worker, record)
        return who["request"]


def main() -> None:
    fleet, carrier, where, truth, seed, rate = sys.argv[1:]
    model = Emitting(fleet, carrier, where, int(seed))
    started = time.monotonic()
    step = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        step += 1
        model.step()
        model.log.clear()
        if step % _BUG_EVERY == 0:
            print("bug", model.bug(step // _BUG_EVERY), flush=True)
        ahead = len(model.truth) / float(rate) - (time.monotonic() - started)
        if ahead > 0:
            time.sleep(min(ahead, 0.05))
    if model.provider is not None:
        model.provider.force_flush(20_000)
        model.provider.shutdown()
    with open(truth, "wb") as file:
        file.write(model.truth.tobytes())
    print("done", flush=True)


if __name__ == "__main__":
    main()
