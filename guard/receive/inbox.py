"""The bounded queue between the receivers' threads and the one ledger thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from guard.receive.decode import Rows


class Received(NamedTuple):
    """One message's records and when they came."""

    rows: Rows
    received_ns: int


class Inbox:
    """Batches in order of arrival, at most ``capacity`` records of them.

    Bounded by records and not by messages, because that is what costs memory. A message larger than the whole
    capacity is taken when nothing else waits: it could never be taken otherwise.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.depth = 0
        """Records that wait."""
        self._batches: deque[Received] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, rows: Rows, received_ns: int) -> bool:
        """Queues a batch; False if it is full or closed."""
        size = len(rows)
        with self._changed:
            if self._closed or (self.depth and self.depth + size > self.capacity):
                return False
            self._batches.append(Received(rows, received_ns))
            self.depth += size
            self._changed.notify()
        return True

    def full(self) -> bool:
        """Whether not even one more record would be taken."""
        return self.depth >= self.capacity

    def take(self, timeout_s: float) -> Received | None:
        """The next batch; None if none came within the time, or none will."""
        with self._changed:
            if not self._batches and not self._closed:
                self._changed.wait(timeout_s)
            if not self._batches:
                return None
            received = self._batches.popleft()
            self.depth -= len(received.rows)
            return received

    def close(self) -> None:
        """Takes nothing more; what is queued can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def drained(self) -> bool:
        """Whether it is closed and nothing is left."""
        return self._closed and not self._batches
