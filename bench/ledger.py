"""The readable ledger: records a second on one core, by the size of the pool."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from engine_model import Model  # the tests' model of an engine

from guard.ledger import Ledger, LedgerSettings
from guard.records import Record

RECORDS = 60_000


def trace(pages: int) -> list[Record]:
    """Records of a modelled engine under a steady load."""
    rng = random.Random(1)

    def choices() -> Iterator[int]:
        while True:
            yield rng.randrange(256)

    model = Model(choices(), pages=pages)
    model.restart = lambda worker: None  # type: ignore[method-assign]
    while len(model.log) < RECORDS:
        model.step()
        if sum(len(worker.lives) for worker in model.workers) > 60:
            for request in model.requests[-90:]:
                request.cancelled = True
    return model.log


def main() -> int:
    """Prints records a second and what the ledger keeps."""
    for pages in (64, 1024):
        records = trace(pages)
        ledger = Ledger(settings=LedgerSettings(reorder_window_ms=None))
        started = time.process_time()
        for record in records:
            ledger.feed(record)
        spent = time.process_time() - started
        print(f"  pools of {pages:5} pages: {len(records) / spent:9.0f} records/s of CPU time; kept {ledger.sizes}")
    return 0


if __name__ == "__main__":
    main()
