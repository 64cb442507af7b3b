"""The guard at work: one thread that feeds the ledger and acts on what it says.

A round takes what was received, judges it, and publishes: verdicts first, then the watermarks that vouch for
them, then the heartbeat. Everything slow (the engine's abort call, the disk, the log's reader) has a thread and
a bounded queue of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from guard.act.abort import Aborter
from guard.act.board import BoardWriter, Verdict
from guard.config import Config
from guard.counters import Counters
from guard.findings import Action, Finding
from guard.incidents.book import Book
from guard.incidents.recent import Recent
from guard.incidents.recorder import Aborted, Recorder
from guard.incidents.store import Incident
from guard.ledger import Ledger, Request
from guard.log import log
from guard.receive.inbox import Inbox, Received
from guard.records import Record

_IDLE_S = 0.02
"""Longest pause between two rounds."""
_ADVANCE_EVERY_NS = 10_000_000
_PUBLISH_EVERY = 256
"""Records judged between two publications of one large message."""
_HOUSEKEEPING_EVERY_NS = 1_000_000_000
_CARRIED_OVER_FOR_NS = 600_000_000_000
"""How long verdicts of the guard before this one stay in force."""
_LATENCY_PENDING = 65_536


class Runtime:
    """Ledger, board, incidents and abort calls, and the thread that runs them.

    Attributes:
        inbox: Where receivers put what comes.
        counters: What is counted.
        sizes: What the ledger holds, as of the last second.
        failure: The error that ended the ledger thread, if one did; the board is then closed.
    """

    def __init__(
        self, config: Config, board: BoardWriter, recorder: Recorder, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Wires the parts; `start` runs them.

        Args:
            config: The configuration.
            board: The verdict board, whose writer the ledger thread becomes.
            recorder: Where incidents go; started and stopped here.
            on_failure: Called from the ledger thread when it dies of an error of its own.
        """
        self.config = config
        self.board = board
        self.recorder = recorder
        self.inbox = Inbox(config.listen.queue_records)
        self.counters = Counters()
        self.sizes: dict[str, int] = {}
        self.streams: dict[str, dict[str, int]] = {}
        self.failure: BaseException | None = None
        self.last_round_ns = time.monotonic_ns()
        self.aborter: Aborter | None = None
        if config.engine.abort_url is not None:
            self.aborter = Aborter(
                config.engine.abort_url,
                config.engine.key_text(),
                retry_s=config.engine.retry_s,
                on_done=self._on_aborted,
            )
        self._enforce = config.mode == "enforce"
        self._on_failure = on_failure
        self._ledger = Ledger(config.policy, config.ledger, self._on_finding, self._on_retire)
        self._recent = Recent()
        self._book = Book(config.mode, self._recent)
        self._dirty: dict[int, tuple[Finding, bool]] = {}
        self._killed: set[str] = set()
        self._published: dict[str, tuple[int, int]] = {}
        self._unjudged: dict[str, deque[tuple[int, int, int]]] = {}
        self._aborted: deque[Aborted] = deque()
        self._received_ns = 0
        self._judging_ns = 0
        """The time of the record that is being judged; 0 when it is time itself that passes."""
        self._started_ns = time.time_ns()
        self._clock_offset_ns = self._started_ns - time.monotonic_ns()
        self._next_advance_ns = self._next_housekeeping_ns = 0
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        """Starts the threads."""
        self.recorder.start()
        if self.aborter is not None:
            self.aborter.start()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the ledger thread finished a round in the last five seconds."""
        return self._thread.is_alive() and time.monotonic_ns() - self.last_round_ns < 5_000_000_000

    def stop(self, timeout_s: float = 5.0) -> None:
        """Judges what was received, tells the engine and the disk about it, closes the board."""
        self.inbox.close()
        self._thread.join(timeout_s)
        if self.aborter is not None:
            self.aborter.stop()
        self._pass_on_aborted()
        self.recorder.stop()
        if not self._thread.is_alive():
            self.board.close()

    def _run(self) -> None:
        try:
            while not self.inbox.drained:
                self._round(self.inbox.take(_IDLE_S))
        except BaseException as error:  # the thread's end of the world: whatever it is, say so and vouch no more
            self.failure = error
            self.board.close()
            log("error", "the ledger failed; the board is closed", error=repr(error))
            self._on_failure()
            raise

    def _clock_ns(self) -> int:
        """Wall time that never jumps: what waits for a deadline must not be given up for a set clock."""
        return time.monotonic_ns() + self._clock_offset_ns

    def _round(self, received: Received | None) -> None:
        if received is not None:
            self._received_ns = received.received_ns
            items = list(received.rows)
            for first in range(0, len(items), _PUBLISH_EVERY):
                for item in items[first : first + _PUBLISH_EVERY]:
                    self._feed(item)
                self._publish()
        now_ns = self._clock_ns()
        if now_ns >= self._next_advance_ns:
            self._next_advance_ns = now_ns + _ADVANCE_EVERY_NS
            self._judging_ns = 0
            self._ledger.advance(now_ns)
            self._publish()
        self._pass_on_aborted()
        if now_ns >= self._next_housekeeping_ns:
            self._next_housekeeping_ns = now_ns + _HOUSEKEEPING_EVERY_NS
            self._keep_house()

    def _feed(self, item: Record) -> None:
        now_ns = self._clock_ns()
        if type(item) is Record:  # a place in the stream, and what was there could not be read
            self._ledger.feed_invalid(item, now_ns)
            return
        self.counters.records[item.NAME] += 1
        self._recent.add(item, self._received_ns)
        self._judging_ns = item.time_ns
        self._ledger.feed(item, now_ns)
        unjudged = self._unjudged.get(item.stream)
        if unjudged is None:
            if item.stream not in self._ledger.streams:
                return
            unjudged = self._unjudged[item.stream] = deque(maxlen=_LATENCY_PENDING)
        unjudged.append((item.epoch, item.seq, item.time_ns))

    def _on_finding(self, finding: Finding, new: bool) -> None:
        """Acts at once on what kills; the rest is written up when the round is over."""
        for request in finding.kills:
            if request not in self._killed:
                self._kill(request, finding)
        if finding.action is Action.QUARANTINE and finding.request is not None and self._enforce:
            self.board.set_verdict(finding.request, Verdict.QUARANTINE, self._note(finding, finding.request).id)
        known = self._dirty.get(id(finding))
        self._dirty[id(finding)] = (finding, new or (known is not None and known[1]))

    def _kill(self, request: str, finding: Finding) -> None:
        self._killed.add(request)
        incident = self._note(finding, request)
        # What a finding names may have been innocent until a later record came: it is that one which counts.
        incident.record_ns = max(finding.time_ns, self._judging_ns)
        if self._enforce:
            self.board.set_verdict(request, Verdict.KILL, incident.id)
            incident.verdict_ns = time.time_ns()
            self.counters.kills += 1
            if self.aborter is not None:
                self.aborter.abort(request, incident.id)
        else:
            incident.verdict_ns = time.time_ns()
            self.counters.kills_withheld += 1

    def _note(self, finding: Finding, request: str | None) -> Incident:
        live = self._ledger.requests.get(request) if request is not None else None
        tenant = live.tenant if live is not None else finding.tenant
        return self._book.note(finding, request, tenant, self._received_ns)

    def _on_retire(self, request: Request) -> None:
        self._killed.discard(request.id)
        self._book.forget(request.id)
        self.board.clear(request.id)

    def _publish(self) -> None:
        if self._dirty:
            self._write_up()
        self.counters.stream_gaps, self.counters.records_dropped = self._ledger.gaps, self._ledger.dropped
        done_ns = time.time_ns()
        for name, stream in self._ledger.streams.items():
            mark = (stream.epoch, stream.processed)
            if self._published.get(name) != mark:
                self._published[name] = mark
                self.board.advance(name, *mark)
                self._observe(name, mark, done_ns)
        self.board.heartbeat()
        self.last_round_ns = time.monotonic_ns()

    def _observe(self, stream: str, mark: tuple[int, int], done_ns: int) -> None:
        unjudged = self._unjudged.get(stream)
        while unjudged and unjudged[0][:2] <= mark:
            self.counters.latency.observe(max(0, done_ns - unjudged.popleft()[2]) / 1e9)

    def _write_up(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for finding, new in dirty.values():
            requests: set[Any] = set(finding.kills) or {finding.request}
            incidents = [self._note(finding, request).id for request in sorted(requests, key=str)]
            if new:
                self.counters.findings[finding.kind, finding.action] += 1
                body = {k: v for k, v in finding.as_json().items() if v not in (None, [], "")}
                log("warning", "finding", mode=self.config.mode, incidents=incidents, **body, reason=finding.reason)
        for saved in self._book.take_changed():
            self.recorder.put(saved)

    def _pass_on_aborted(self) -> None:
        while self._aborted:
            self.recorder.put(self._aborted.popleft())

    def _keep_house(self) -> None:
        self.sizes = self._ledger.sizes
        self.streams = {
            name: {"duplicates": stream.duplicates, "late": stream.late}
            for name, stream in self._ledger.streams.items()
        }
        if self._started_ns and time.time_ns() - self._started_ns > _CARRIED_OVER_FOR_NS:
            self.board.expire(self._started_ns)
            self._started_ns = 0

    def _on_aborted(self, incident: str, time_ns: int, result: str) -> None:
        level = "warning" if result.startswith("failed") else "info"
        log(level, "abort call", incident=incident, result=result)
        # By way of the ledger thread: the incident itself has to be in the recorder's queue before.
        self._aborted.append(Aborted(incident, time_ns, result))
