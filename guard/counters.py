"""What the guard counts about itself; `exporters.prometheus` shows it."""

from __future__ import annotations

import threading
from collections import Counter

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
    """Counts since the guard started, beside those of the native core (`guard.native._core.CoreStats`)."""

    def __init__(self) -> None:
        self.receivers = {"grpc": ReceiverCounts(), "http": ReceiverCounts()}
        """What came in over OTLP, by protocol."""
        self.findings: Counter[tuple[str, str]] = Counter()
        """New findings, by kind and action."""
