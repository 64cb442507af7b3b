"""The guard at work: one native thread that judges and publishes, and one of Python's that writes up what it found.

The ledger's thread never waits for Python: it takes what was received, judges it, and publishes, verdicts first, then
the watermarks that vouch for them, then the heartbeat. Everything slow (incidents, the engine's abort call, the disk,
the log's reader) happens behind bounded queues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from guard.act.abort import Aborter
from guard.config import Config
from guard.counters import Counters
from guard.findings import Finding
from guard.incidents.book import Book
from guard.incidents.recorder import Aborted, Recorder
from guard.incidents.recovered import recovered
from guard.log import log
from guard.native._core import BoardWriter, Core, CoreStats, Happened, Inbox, Journal, Restored
from guard.native.ledger import core_policy, core_settings, finding_of
from guard.receive.address import BindError

_PAUSE_S = 0.2
"""Longest pause of the thread that writes up, which is woken when there is something."""
_SILENT_NS = 5_000_000_000


class Runtime:
    """Ledger, board, incidents and abort calls, and the threads that run them.

    Attributes:
        inbox: Where receivers put what comes.
        counters: What is counted outside of the native core.
        failure: The error that ended the guard, if one did; the board is then closed.
    """

    def __init__(
        self, config: Config, board: BoardWriter, recorder: Recorder, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Wires the parts; `start` runs them.

        Args:
            config: The configuration.
            board: The verdict board, whose writer the ledger thread becomes.
            recorder: Where incidents go; started and stopped here.
            on_failure: Called from the thread that dies of an error of its own.

        Raises:
            BindError: The ring or the journal cannot be had.
        """
        self.config = config
        self.board = board
        self.recorder = recorder
        self.inbox = Inbox(config.listen.queue_records)
        self.counters = Counters()
        self.failure: BaseException | None = None
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
        self._journal, before, unsettled = _journal(config)
        try:
            self._core = Core(
                core_policy(config.policy),
                core_settings(config.ledger),
                enforce=self._enforce,
                inbox=self.inbox,
                board=board,
                ring=config.ring.path if config.ring.on else None,
                ring_lanes=config.ring.lanes,
                ring_rows=config.ring.rows,
                journal=self._journal,
            )
        except RuntimeError as error:
            raise BindError(str(error)) from None
        recorder.on_saved = self._core.settled
        if before is not None:
            self._core.restore(before)
        for incident in recovered(unsettled):
            recorder.put(incident)
        self._book = Book(config.mode, self._core)
        self._judging = threading.Thread(target=self._judge, name="ledger", daemon=True)
        self._writing = threading.Thread(target=self._write_up, name="findings", daemon=True)

    def start(self) -> None:
        """Starts the threads."""
        self.recorder.start()
        if self.aborter is not None:
            self.aborter.start()
        self._writing.start()
        self._judging.start()

    @property
    def alive(self) -> bool:
        """Whether the ledger finished a round in the last five seconds, and what it finds is written up."""
        running = self._judging.is_alive() and self._writing.is_alive()
        return running and time.monotonic_ns() - self._core.last_round_ns < _SILENT_NS

    def stats(self) -> CoreStats:
        """What the native core has counted, and what it holds."""
        return self._core.stats()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Judges what was received, tells the engine and the disk about it, closes the board."""
        self.inbox.close()
        self._judging.join(timeout_s)
        self._writing.join(timeout_s)
        if self.aborter is not None:
            self.aborter.stop()
        self.recorder.stop()
        if not self._judging.is_alive():
            self.board.close()
            if self._journal is not None:
                self._journal.flush()  # that the store has now what it was given last

    def _judge(self) -> None:
        try:
            self._core.run()
        except BaseException as error:  # the thread's end of the world: whatever it is, say so and vouch no more
            self._fail("the ledger failed; the board is closed", error)
            raise
        finally:
            if self.failure is not None:
                self.board.close()

    def _write_up(self) -> None:
        try:
            while (happened := self._core.take(_PAUSE_S)) is not None:
                self._act_on(happened)
        except BaseException as error:
            self._fail("findings cannot be written up; the board is closed", error)
            # The ledger's thread closes the board once it is through with what it has.
            self._core.abandon()
            raise

    def _fail(self, event: str, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            log("error", event, error=repr(error))
            self._on_failure()

    def _act_on(self, happened: list[Happened]) -> None:
        for what in happened:
            if not what.over:
                self._on_finding(what)
        for saved in self._book.take_changed():
            self.recorder.put(saved)
        # Behind the incidents themselves: what the engine says to the call is put into them.
        for incident in self._book.take_killed():
            if self._enforce and self.aborter is not None and incident.request is not None:
                self.aborter.abort(incident.request, incident.id)
        for what in happened:
            if what.over:
                self._book.forget(what.incidents[0].id)

    def _on_finding(self, what: Happened) -> None:
        finding = finding_of(what.finding)
        incidents = [self._book.note(finding, state, what.received_ns).id for state in what.incidents]
        if what.fresh:
            self.counters.findings[finding.kind, finding.action] += 1
            self._tell(finding, sorted(incidents))

    def _tell(self, finding: Finding, incidents: list[str]) -> None:
        body = {k: v for k, v in finding.as_json().items() if v not in (None, [], "")}
        log("warning", "finding", mode=self.config.mode, incidents=incidents, **body, reason=finding.reason)

    def _on_aborted(self, incident: str, time_ns: int, result: str) -> None:
        level = "warning" if result.startswith("failed") else "info"
        log(level, "abort call", incident=incident, result=result)
        self.recorder.put(Aborted(incident, time_ns, result))


def _journal(config: Config) -> tuple[Journal | None, Restored | None, list[bytes]]:
    path = config.journal_path
    if path is None:
        return None, None, []
    try:
        journal, before, unsettled = Journal.open(path, config.journal.limit_mib << 20)
    except RuntimeError as error:
        raise BindError(str(error)) from None
    if before.streams or before.pools or before.requests:
        log(
            "info", "took over from an earlier guard", streams=len(before.streams), pools=len(before.pools),
            requests=len(before.requests), incidents=len(unsettled),
        )  # fmt: skip
        return journal, before, unsettled
    return journal, None, unsettled
