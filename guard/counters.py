"""What the guard counts about itself; `exporters.prometheus` shows it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter


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


REFUSALS = (
    "full", "malformed", "unauthenticated", "too-large", "unsupported", "timeout", "connections", "memory", "uid",
    "tls",
)  # fmt: skip
"""Why a receiver refuses a call or a connection."""


class ReceiverCounts:
    """What came in by one protocol. Any thread may count."""

    def __init__(self) -> None:
        self.calls = 0
        """Messages that were taken."""
        self.bytes = 0
        """Their bytes, as they came over the wire where that is known."""
        self.read = 0
        """Their spans."""
        self.ignored = 0
        """Spans that are no records."""
        self.invalid = 0
        """Spans named like a record that break the convention."""
        self.refused = dict.fromkeys(REFUSALS, 0)
        """Calls and connections that were refused, by reason."""
        self._lock = threading.Lock()

    def took(self, size: int, read: int, ignored: int, invalid: int) -> None:
        """Counts a message that was taken."""
        with self._lock:
            self.calls += 1
            self.bytes += size
            self.read += read
            self.ignored += ignored
            self.invalid += invalid

    def refuse(self, reason: str) -> None:
        """Counts one that was not, by one of `REFUSALS`."""
        with self._lock:
            self.refused[reason] += 1


class Counters:
    """Counts since the guard started.

    The ledger thread writes all of it but `receivers`.
    """

    def __init__(self) -> None:
        self.records: Counter[str] = Counter()
        """Records judged or waiting, by span name."""
        self.receivers = {"grpc": ReceiverCounts(), "http": ReceiverCounts()}
        """What came in over OTLP, by protocol."""
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
