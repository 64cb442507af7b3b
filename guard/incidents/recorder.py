"""The thread that writes incidents to disk, so that no verdict ever waits for one."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from guard.incidents.store import Evidence, Incident, Store, StoreError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Saved(NamedTuple):
    """An incident as it is now, and evidence to add to it."""

    incident: Incident
    evidence: list[Evidence]


class Recovered(NamedTuple):
    """An incident of the guard before this one, which the store may not have, or not in full."""

    incident: Incident


class Aborted(NamedTuple):
    """What the engine said to an abort call."""

    incident: str
    abort_ns: int
    result: str


Event = Saved | Recovered | Aborted


class Recorder:
    """Queues events and writes them in order. What cannot be written is tried again until it can.

    Attributes:
        written: Events written.
        failures: Attempts that failed: a full disk, a locked database.
        dropped: Events that found the queue full; their findings are in the log all the same.
        on_saved: Called with the ids of incidents that the disk has, from the recorder's thread; to be set before
            `start`.
    """

    def __init__(
        self,
        path: str,
        *,
        keep: int = 100_000,
        queue: int = 10_000,
        on_failure: Callable[[str], None] = lambda _message: None,
    ) -> None:
        """Opens the store; `start` begins writing.

        Args:
            path: The store's file.
            keep: Incidents kept; the oldest go.
            queue: Events that may wait.
            on_failure: Called with the reason when writing begins to fail, from the recorder's thread.

        Raises:
            StoreError: The file cannot be had at all.
        """
        self.written = self.failures = self.dropped = 0
        self.on_saved: Callable[[list[str]], None] = lambda _incidents: None
        Store.open(path).close()
        self._path = path
        self._keep = keep
        self._limit = queue
        self._on_failure = on_failure
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._stopping_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="incidents", daemon=True)

    def start(self) -> None:
        """Begins writing."""
        self._thread.start()

    @property
    def depth(self) -> int:
        """Events that wait."""
        return len(self._events)

    def put(self, event: Event) -> None:
        """Queues an event; never waits and never raises."""
        with self._changed:
            if len(self._events) >= self._limit:
                self.dropped += 1
                return
            self._events.append(event)
            self._changed.notify()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Writes what waits, within the time, and ends."""
        with self._changed:
            self._stopping_at = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s + 2)

    def _run(self) -> None:
        store: Store | None = None
        pause = _FIRST_PAUSE_S
        while True:
            with self._changed:
                while not self._events and self._stopping_at is None:
                    self._changed.wait()
                if not self._events:
                    break
                events = list(self._events)
            try:
                store = store or Store.open(self._path)
                self._write(store, events)
            except (sqlite3.Error, StoreError) as error:
                self.failures += 1
                if pause == _FIRST_PAUSE_S:
                    self._on_failure(str(error))
                # A file that was moved away or replaced needs a new connection.
                if store is not None:
                    store.close()
                    store = None
                with self._changed:
                    if self._stopping_at is not None and time.monotonic() >= self._stopping_at:
                        break
                    self._changed.wait(pause if self._stopping_at is None else min(pause, 0.2))
                pause = min(pause * 2, _LONGEST_PAUSE_S)
                continue
            pause = _FIRST_PAUSE_S
            self.written += len(events)
            self.on_saved([event.incident.id for event in events if not isinstance(event, Aborted)])
            with self._changed:
                for _ in events:
                    self._events.popleft()
        if store is not None:
            store.close()

    def _write(self, store: Store, events: list[Event]) -> None:
        saved: list[Saved] = []
        for event in events:
            if isinstance(event, Saved):
                saved.append(event)
                continue
            if saved:
                store.save(saved, keep=self._keep)
                saved = []
            if isinstance(event, Recovered):
                store.recover(event.incident)
            else:
                store.aborted(*event)
        if saved:
            store.save(saved, keep=self._keep)
