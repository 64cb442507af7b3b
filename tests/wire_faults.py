"""A wire that does harm, around any kind of link: what it does is said by the transfer's id, ``FAULT-…``.

========= ===================================================================================
flip      one bit of the first page is another when it arrives
drop      the last page does not arrive, and all is said to have
swap      two pages arrive in each other's place
duplicate everything arrives twice
delay     it is polled four times before anything moves
reorder   the pages arrive one by one, the last one first
hang      nothing arrives, and nothing is said, until the file `let-go` is in the run directory
cut       the connection ends when half of the pages have arrived
kill      the sender's process ends when half of the pages have arrived
bug       polling raises what no link should when half of the pages have arrived
========= ===================================================================================
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.segment import Segment
from engine.transport.link import Batch, Fate, Link, TransferError


def some(batch: Batch, places: Sequence[int]) -> Batch:
    """Those of the batch's pages, in that order."""
    places = list(places)
    return Batch(
        batch.transfer,
        [batch.source[place] for place in places],
        [batch.destination[place] for place in places],
        batch.tags[places],
    )


class FaultyLink:
    """See the module.

    Args:
        link: The wire as it is.
        segment: Where the pages come from.
        run_dir: The engine's.
    """

    def __init__(self, link: Link, segment: Segment, run_dir: Path) -> None:
        self._link = link
        self._segment = segment
        self._run_dir = run_dir
        self._steps: Iterator[Fate] = iter(())
        self._wait_s = 0.0
        self.error = ""

    def post(self, batch: Batch) -> None:
        fault = batch.transfer.partition("-")[0]
        harm = getattr(self, f"_{fault}", None)
        self._steps = harm(batch) if harm is not None else self._move(batch)

    def poll(self, wait_s: float) -> Fate:
        self._wait_s = wait_s
        fate = next(self._steps)
        self.error = self.error or self._link.error
        return fate

    def abort(self) -> None:
        self._link.abort()

    def close(self) -> None:
        self._link.close()

    # The wires

    def _move(self, batch: Batch) -> Iterator[Fate]:
        """As it should be."""
        self._link.post(batch)
        while (fate := self._link.poll(self._wait_s)) is Fate.MOVING:
            yield fate
        yield fate

    def _flip(self, batch: Batch) -> Iterator[Fate]:
        page = self._segment.data[batch.source[0]]
        page[len(page) // 2] ^= 1 << 3
        for fate in self._move(batch):
            if fate is not Fate.MOVING:
                page[len(page) // 2] ^= 1 << 3
            yield fate

    def _drop(self, batch: Batch) -> Iterator[Fate]:
        return self._move(some(batch, range(len(batch.source) - 1)))

    def _swap(self, batch: Batch) -> Iterator[Fate]:
        source = [batch.source[1], batch.source[0], *batch.source[2:]]
        return self._move(Batch(batch.transfer, source, batch.destination, batch.tags))

    def _duplicate(self, batch: Batch) -> Iterator[Fate]:
        return self._parts(batch, batch)

    def _reorder(self, batch: Batch) -> Iterator[Fate]:
        return self._parts(*(some(batch, [place]) for place in reversed(range(len(batch.source)))))

    def _parts(self, *batches: Batch) -> Iterator[Fate]:
        """One after the other."""
        for number, batch in enumerate(batches, 1):
            for fate in self._move(batch):
                if fate is not Fate.DONE or number == len(batches):
                    yield fate

    def _delay(self, batch: Batch) -> Iterator[Fate]:
        for _ in range(4):
            yield Fate.MOVING
        yield from self._move(batch)

    def _hang(self, batch: Batch) -> Iterator[Fate]:
        while not (self._run_dir / "let-go").exists():
            time.sleep(self._wait_s)
            yield Fate.MOVING
        self.error = "let go"
        yield Fate.FAILED

    def _cut(self, batch: Batch) -> Iterator[Fate]:
        yield from self._half(batch)
        self._link.abort()
        while (fate := self._link.poll(self._wait_s)) is Fate.MOVING:
            yield fate
        self.error = "the connection was cut"
        yield Fate.FAILED

    def _kill(self, batch: Batch) -> Iterator[Fate]:
        yield from self._half(batch)
        os.kill(os.getpid(), signal.SIGKILL)

    def _bug(self, batch: Batch) -> Iterator[Fate]:
        yield from self._half(batch)
        raise KeyError("a bug")

    def _half(self, batch: Batch) -> Iterator[Fate]:
        for fate in self._move(some(batch, range(len(batch.source) // 2))):
            if fate is Fate.MOVING:
                yield fate
            elif fate is Fate.FAILED:
                raise TransferError(f"the wire failed by itself: {self._link.error}")
