"""Order within a stream: holes, repeats, restarts, and how long to wait for what is missing."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from guard.records import Record

Clock = dict[str, tuple[int, int]]
"""What a stream has seen of others: stream → (epoch, seq), through transfers. Never changed in place."""

RECENT = 1024
"""Sequence numbers back to which a repeated record is recognised as such (senders retry)."""


@dataclass
class Gap:
    """Records ``first`` to ``last`` (inclusive) that did not come."""

    first: int
    last: int


@dataclass
class Stream:
    """One emitter's stream: takes records in any order, gives them back in the order of `kv.seq`."""

    name: str
    epoch: int = -1
    next_seq: int = 0
    """The next record to be given out."""
    processed: int = -1
    """The last record whose verdict is known: the watermark."""
    clock: Clock = field(default_factory=dict)
    time_ns: int = 0
    """The latest record time seen in order: the only clock that this stream's deadlines run on."""
    held: dict[int, Record] = field(default_factory=dict)
    """Records beyond a hole."""
    ready: deque[Record] = field(default_factory=deque)
    """Records in order that wait for another stream."""
    due: dict[int, int] = field(default_factory=dict)
    """Of each record held or ready: the arrival time until which it may wait, from when it came itself."""
    deadline_ns: int | None = None
    """Arrival time until which the hole before `held` may fill."""
    waiting_for: str | None = None
    """The transfer whose begin the first ready record waits for."""
    wait_deadline_ns: int | None = None
    successors: dict[int, dict[int, Record]] = field(default_factory=dict)
    """Records of later epochs, held until this one is over."""
    successor_deadline_ns: int | None = None
    recent: OrderedDict[int, Record] = field(default_factory=OrderedDict)
    given_up: deque[Gap] = field(default_factory=lambda: deque(maxlen=64))
    past: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Epochs that are over."""
    resumed: int = -1
    """Records of this epoch below it were judged before the guard's restart; -1 when there was none in it."""
    duplicates: int = 0
    late: int = 0
    """Records that came after their place was given up, or of an epoch that is over."""

    @property
    def holding(self) -> int:
        """Records that wait."""
        later = sum(map(len, self.successors.values())) if self.successors else 0
        return len(self.held) + len(self.ready) + later

    def push(self, record: Record, deadline_ns: int) -> bool:
        """Takes a record in.

        Args:
            record: The record.
            deadline_ns: Arrival time until which what is missing before it may come.

        Returns:
            False when the sequence runs backwards with it: another record already had its place.
        """
        if self.epoch < 0:
            self.epoch = record.epoch
        if record.epoch in self.past:
            self.late += 1
            return True
        if record.epoch != self.epoch:
            self.successors.setdefault(record.epoch, {})[record.seq] = record
            if self.successor_deadline_ns is None:
                self.successor_deadline_ns = deadline_ns
            return True
        if record.seq < self.next_seq:
            if any(gap.first <= record.seq <= gap.last for gap in self.given_up):
                self.late += 1
                return True
            self.duplicates += 1
            return record.seq < self.resumed or self.recent.get(record.seq) == record
        if record.seq in self.held:
            self.duplicates += 1
            return self.held[record.seq] == record
        self.held[record.seq] = record
        self.due[record.seq] = deadline_ns
        self._release()
        if self.held and self.deadline_ns is None:
            self.deadline_ns = deadline_ns
        return True

    def take_first(self) -> Record:
        """The first ready record, which waits no more."""
        record = self.ready.popleft()
        del self.due[record.seq]
        return record

    def skip_hole(self) -> Gap | None:
        """Gives up the hole before what is held; None when there is none."""
        if not self.held:
            return None
        gap = Gap(self.next_seq, min(self.held) - 1)
        self.next_seq = gap.last + 1
        self.given_up.append(gap)
        self._release()
        if self.held:
            self.deadline_ns = self.due[min(self.held)]
        return gap

    def start_successor(self, deadline_ns: int) -> None:
        """Goes on to the next epoch that is held. What was ready of the old one must be done first."""
        # Epochs rise, unless the emitter's clock was set back: then only the order of arrival is left.
        self.past.append(self.epoch)
        rising = [epoch for epoch in self.successors if epoch > self.epoch]
        self.epoch = min(rising) if rising else next(iter(self.successors))
        held = self.successors.pop(self.epoch)
        self.next_seq, self.processed, self.resumed, self.clock = 0, -1, -1, {}
        self.held, self.due, self.deadline_ns = {}, {}, None
        self.recent.clear()
        self.given_up.clear()
        if not self.successors:
            self.successor_deadline_ns = None
        for seq in sorted(held):
            self.push(held[seq], deadline_ns)

    def _release(self) -> None:
        while (record := self.held.pop(self.next_seq, None)) is not None:
            self.ready.append(record)
            self.recent[self.next_seq] = record
            if len(self.recent) > RECENT:
                self.recent.popitem(last=False)
            self.next_seq += 1
        if not self.held:
            self.deadline_ns = None
