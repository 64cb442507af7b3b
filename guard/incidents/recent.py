"""The last records of each request, kept in memory until an incident asks for them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from guard.incidents.store import Evidence
from guard.records import Record

_Kept = tuple[Record, int]


class Recent:
    """A bounded memory of records by request; those of no request are kept by stream.

    Requests that were quiet longest are forgotten first. Belongs to the ledger thread.
    """

    def __init__(self, *, per_request: int = 32, records: int = 32768) -> None:
        """Makes an empty memory.

        Args:
            per_request: Records kept of one request.
            records: Records kept in all.
        """
        self._per_request = per_request
        self._limit = records
        self._size = 0
        self._kept: OrderedDict[str, deque[_Kept]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def add(self, record: Record, received_ns: int) -> None:
        """Keeps a record."""
        key = record.request or f"\0{record.stream}"
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = deque(maxlen=self._per_request)
        else:
            self._kept.move_to_end(key)
        if len(kept) < self._per_request:
            self._size += 1
        kept.append((record, received_ns))
        while self._size > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self._size -= len(oldest)

    def evidence(
        self, requests: Iterable[str], streams: Iterable[str], offending: set[tuple[str, int, int]]
    ) -> list[Evidence]:
        """What is kept of these requests, and of these streams' records that have no request.

        Args:
            requests: Request ids.
            streams: Stream ids.
            offending: The (stream, epoch, seq) of records to be marked.
        """
        found: list[Evidence] = []
        for key in {*requests, *(f"\0{stream}" for stream in streams)}:
            for record, received_ns in self._kept.get(key, ()):
                place = (record.stream, record.epoch, record.seq)
                found.append(Evidence(record, received_ns, place in offending))
        return found
