"""What the guard counts about itself; `exporters.prometheus` shows it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

from guard.receive.otlp import Batch


class Histogram:
    """Observations by upper bound. One thread observes, others may read a little behind."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations within each bound and above the one before; the last are above them all."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Counters:
    """Counts since the guard started.

    The ledger thread writes all of it but what `received` and `refused` count, which any receiver may call.
    """

    def __init__(self) -> None:
        self.records: Counter[str] = Counter()
        """Records judged or waiting, by span name."""
        self.spans_read = 0
        self.spans_ignored = 0
        self.spans_invalid = 0
        self.calls_refused: Counter[str] = Counter()
        """Export calls that were refused, by reason."""
        self.findings: Counter[tuple[str, str]] = Counter()
        """New findings, by kind and action."""
        self.kills = 0
        """Requests killed."""
        self.kills_withheld = 0
        """Requests that would have been killed in enforce mode."""
        self.stream_gaps = 0
        """Holes given up, sequences that ran backwards, and transfers that ended and never began."""
        self.records_dropped = 0
        """Records of streams beyond `ledger.max_streams`."""
        self.latency = Histogram(
            (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
        )
        """Seconds from a record's time to its verdict."""
        self._lock = threading.Lock()

    def received(self, batch: Batch) -> None:
        """Counts a batch's spans."""
        with self._lock:
            self.spans_read += batch.read
            self.spans_ignored += batch.ignored
            self.spans_invalid += batch.invalid

    def refused(self, reason: str) -> None:
        """Counts a refused call."""
        with self._lock:
            self.calls_refused[reason] += 1
