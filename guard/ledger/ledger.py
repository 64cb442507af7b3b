"""The ledger: takes records in any order of arrival, applies the rules in each stream's order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from guard.findings import Finding
from guard.ledger import access, late, lifecycle, limits, moves, ownership
from guard.ledger.requests import Request, RequestStream, Where
from guard.ledger.restored import Restored, resume
from guard.ledger.streams import Gap, Stream
from guard.ledger.world import FOREVER, LedgerSettings, World
from guard.policy import Policy
from guard.records import (
    Admit,
    Alloc,
    Cache,
    Free,
    Pool,
    Read,
    Record,
    Refuse,
    RequestEnd,
    Respond,
    Scrub,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    Write,
)  # fmt: skip


def _ignore(*_: object) -> None:
    """Nobody wants to know."""


class Ledger:
    """A deterministic state machine from records to findings: no I/O, and no clock but its arguments.

    Live, `now_ns` is the arrival time and `advance` is called while nothing arrives; in replay the window is
    None, `now_ns` does not matter and `finish` says that the input is over.

    Args:
        policy: What is done about findings, and the optional rules.
        settings: How long to wait and how much to keep.
        on_finding: Called with each finding when it is new (True) and whenever more adds to it (False).
        on_retire: Called with each request that is over when it is forgotten.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        settings: LedgerSettings | None = None,
        on_finding: Callable[[Finding, bool], None] = _ignore,
        on_retire: Callable[[Request], None] = _ignore,
    ) -> None:
        self._world = World(policy or Policy(), settings or LedgerSettings(), on_finding, on_retire)
        self._streams: dict[str, Stream] = {}
        self._waiting: dict[str, set[str]] = {}
        """Bare transfer id → streams that wait for its begin."""
        self._leaks: dict[str, list[tuple[int, int, RequestStream, Where]]] = {}
        self._time_ns = 0
        self._fed = 0
        self._dropped = dict.fromkeys(limits.LIMITS, 0)
        self._restarting: dict[str, int] = {}
        """In replay: streams with a new epoch → how many records may be fed before it begins."""

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream heard of."""
        return self._streams

    @property
    def requests(self) -> Mapping[str, Request]:
        """Live requests, and the ones that ended lately."""
        return self._world.requests

    @property
    def sizes(self) -> dict[str, int]:
        """How much is kept: pages, requests (live and ended), transfers in flight, records held back."""
        world = self._world
        return {
            "pages": sum(len(pool.pages) for pool in world.pools.values()),
            "requests_live": len(world.requests) - len(world.ended),
            "requests_ended": len(world.ended),
            "transfers": len(world.transfers),
            "records_held": sum(stream.holding for stream in self._streams.values()),
        }

    @property
    def gaps(self) -> int:
        """How often something was missed: holes given up, sequences that ran backwards, unknown transfers."""
        return self._world.gaps

    @property
    def dropped(self) -> int:
        """Records beyond some limit, in all."""
        return sum(self._dropped.values())

    @property
    def dropped_by(self) -> Mapping[str, int]:
        """Records beyond each limit: ``max_streams``, … without the ``max_``, and ``page_transfers``."""
        return self._dropped

    def watermark(self, stream: str) -> tuple[int, int]:
        """(epoch, seq): every record of the stream up to it is judged; (-1, -1) for an unknown stream."""
        state = self._streams.get(stream)
        return (-1, -1) if state is None else (state.epoch, state.processed)

    def restore(self, before: Restored) -> None:
        """What the guard before this one knew; to be told before any record.

        None of its pages is vouched for until it is handed out anew, and a `stream-gap` for each pool says so.
        """
        resume(self._world, self._streams, before)

    def feed(self, record: Record, now_ns: int = 0) -> None:
        """Takes one record in, and judges all that it makes ready."""
        self._world.now_ns = now_ns
        self._fed += 1
        stream = self._streams.get(record.stream)
        if stream is None:
            if len(self._streams) >= self._world.settings.max_streams:
                self._drop("streams", Where(record.time_ns, record.stream, record.epoch, record.seq))
                return
            stream = self._streams[record.stream] = Stream(record.stream)
        deadline = self._deadline(now_ns)
        if not stream.push(record, deadline):
            lifecycle.lost(self._world, stream, Gap(record.seq, stream.next_seq - 1), "the sequence ran backwards")
        self._run(stream)
        settings = self._world.settings
        if stream.successors and settings.window_ns is None:
            self._restarting.setdefault(stream.name, self._fed + settings.restart_records)
        while self._restarting and min(self._restarting.values()) <= self._fed:
            self._start_overdue()
        while stream.holding > settings.max_held:
            self._give_up_most_stuck(self._streams.values())

    def feed_invalid(self, header: Record, now_ns: int = 0) -> None:
        """Takes the place in its stream of a record that could not be read, so that it is not a gap."""
        self.feed(header, now_ns)

    def advance(self, now_ns: int) -> None:
        """Time passes: gives up what should have come by now, and looks for leaks."""
        world = self._world
        world.now_ns = now_ns
        for stream in sorted(self._streams.values(), key=lambda s: s.name):
            for deadline in (stream.wait_deadline_ns, stream.deadline_ns, stream.successor_deadline_ns):
                if deadline is not None and deadline <= now_ns:
                    self._give_up(stream, now_ns)
        self._confirm(now_ns)
        window = world.settings.window_ns or 0
        for name in self._leaks:
            self._find_leaks(name, now_ns - window)

    def finish(self) -> None:
        """The input is over: whatever did not come will not."""
        while self._give_up_most_stuck(self._streams.values()):
            pass
        self._confirm(FOREVER)
        for name in self._leaks:
            self._find_leaks(name, self._time_ns)

    def _drop(self, limit: str, where: Where) -> None:
        if self._dropped[limit] == 0:
            limits.tell(self._world, limit, where)
        self._dropped[limit] += 1

    def _start_overdue(self) -> None:
        """In replay, begins the epochs that have waited long enough for what is left of the old ones."""
        for name in sorted(n for n, due in self._restarting.items() if due <= self._fed):
            stream = self._streams[name]
            while stream.successors and stream.waiting_for is None:
                self._give_up(stream)
            if stream.successors:
                self._restarting[name] = self._fed + self._world.settings.restart_records
            else:
                del self._restarting[name]

    def _give_up_most_stuck(self, streams: Iterable[Stream]) -> bool:
        """Gives up one thing that a stream waits for; False when none waits.

        Holes first: what stands behind one may be the begin that another stream waits for.
        """
        stuck = [s for s in streams if s.holding]
        if not stuck:
            return False
        self._give_up(min(stuck, key=lambda s: (s.waiting_for is not None, -s.holding, s.name)))
        return True

    def _deadline(self, now_ns: int) -> int:
        window = self._world.settings.window_ns
        return FOREVER if window is None else now_ns + window

    def _confirm(self, now_ns: int) -> None:
        world = self._world
        suspects, world.suspects = world.suspects, []
        for deadline, writer in suspects:
            if (FOREVER if deadline is None else deadline) <= now_ns:
                if not writer.written:
                    late.confirm(writer, world)
            elif not writer.confirmed and not writer.written:
                world.suspects.append((deadline, writer))
        world.decide(now_ns)

    def _give_up(self, stream: Stream, now_ns: int | None = None) -> None:
        """Goes on without what the stream waits for; `now_ns`: only what is overdue."""
        due = FOREVER if now_ns is None else now_ns
        if stream.waiting_for is not None:
            if (stream.wait_deadline_ns or 0) > due:
                return
            self._stop_waiting(stream)
            self._apply(stream, stream.take_first())
        elif stream.held:
            if (stream.deadline_ns or 0) > due:
                return
            gap = stream.skip_hole()
            if gap is not None:
                lifecycle.lost(self._world, stream, gap, "a hole in kv.seq")
        elif stream.successors:
            if (stream.successor_deadline_ns or 0) > due:
                return
            lifecycle.restart(self._world, stream)
            self._leaks.pop(stream.name, None)
            stream.start_successor(self._deadline(self._world.now_ns))
            self._run(*self._woken(self._waiting))
        self._run(stream)

    def _run(self, *streams: Stream) -> None:
        """Judges what is ready, on these streams and on those that waited for what they bring."""
        runnable = deque(streams)
        while runnable:
            current = runnable.popleft()
            while current.ready and current.waiting_for is None:
                record = current.ready[0]
                missing = None
                if isinstance(record, TransferEnd) and record.side is Side.RECV:
                    missing = moves.missing_begin(self._world, record)
                # Many that wait behind each other have waited together.
                if missing is not None and current.due[record.seq] > self._world.now_ns:
                    current.waiting_for = missing
                    current.wait_deadline_ns = current.due[record.seq]
                    self._waiting.setdefault(missing, set()).add(current.name)
                    break
                current.take_first()
                self._apply(current, record)
                if isinstance(record, (TransferBegin, TransferEnd)):
                    runnable.extend(self._woken({record.transfer, record.transfer.rpartition("/")[0]}))

    def _woken(self, transfers: Iterable[str]) -> list[Stream]:
        """The streams that need not wait for these transfers any more."""
        woken = []
        for transfer in sorted(transfers):
            for name in sorted(self._waiting.get(transfer, ())):
                stream = self._streams[name]
                record = stream.ready[0]
                if isinstance(record, TransferEnd) and moves.missing_begin(self._world, record) is None:
                    self._stop_waiting(stream)
                    woken.append(stream)
        return woken

    def _stop_waiting(self, stream: Stream) -> None:
        if stream.waiting_for is not None:
            names = self._waiting[stream.waiting_for]
            names.discard(stream.name)
            if not names:
                del self._waiting[stream.waiting_for]
        stream.waiting_for = stream.wait_deadline_ns = None

    def _apply(self, stream: Stream, record: Record) -> None:
        world = self._world
        where = Where(record.time_ns, stream.name, record.epoch, record.seq)
        stream.time_ns = max(stream.time_ns, record.time_ns)
        self._time_ns = max(self._time_ns, record.time_ns)
        self._find_leaks(stream.name, stream.time_ns)
        limit = limits.exceeded(world, record)
        if limit is not None:
            self._drop(limit, where)
        elif isinstance(record, Pool):
            lifecycle.pool(world, stream, record, where)
        elif isinstance(record, Scrub):
            ownership.scrub(world, stream, record)
        elif record.request is not None:
            self._apply_to_request(stream, record, where)
        stream.processed = record.seq

    def _apply_to_request(self, stream: Stream, record: Record, where: Where) -> None:
        world = self._world
        rs = world.request(record)
        if rs.gone:
            lifecycle.reborn(world, rs)
            rs = world.request(record)
        lifecycle.went_on(world, stream, rs, record, where)
        match record:
            case Admit():
                lifecycle.admit(world, stream, rs, record)
            case Alloc():
                ownership.alloc(world, stream, rs, record, where)
            case Share():
                ownership.share(world, stream, rs, record, where)
            case Write():
                access.write(world, stream, rs, record, where)
            case TransferBegin():
                moves.begin(world, stream, rs, record, where)
            case TransferEnd(side=Side.SEND):
                moves.end_sent(world, record, where)
            case TransferEnd():
                moves.end_received(world, stream, rs, record, where)
            case Read():
                access.read(world, stream, rs, record, where)
                access.dead_or_rejected(world, rs.request)
            case Refuse():
                access.refuse(world, stream, rs, record, where)
            case Free() | Cache():
                ownership.give_back(world, stream, rs, record, where)
            case RequestEnd():
                lifecycle.request_end(world, stream, rs, record, where)
                deadline = record.time_ns + int(world.settings.leak_grace_s * 1e9)
                heapq.heappush(self._leaks.setdefault(stream.name, []), (deadline, record.seq, rs, where))
            case Respond():
                access.respond(world, rs, record, where)

    def _find_leaks(self, stream: str, time_ns: int) -> None:
        ended = self._leaks.get(stream)
        while ended and ended[0][0] < time_ns:
            *_, rs, where = heapq.heappop(ended)
            lifecycle.leaked(self._world, rs, where)
