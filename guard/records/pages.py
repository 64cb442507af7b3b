"""Sets of page indices, kept as runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

MAX_PAGE_INDEX = 1 << 40
"""Page indices from here on are refused: no pool is that large, and a run of them must not cost memory."""

MAX_PAGES = 1 << 24
"""More pages than this in one record are refused: what is said of a page costs time for each."""


class PageSet:
    """Page indices in a stated order, kept as runs, so that a request of 100,000 pages stays small.

    The order matters (page *i* of a transfer's source goes to page *i* of its destination) and an index
    may occur only once in well-formed records; `PageSet` itself does not insist on it.
    """

    __slots__ = ("_length", "runs")

    runs: tuple[tuple[int, int], ...]
    """Half-open runs ``(start, stop)`` in order, neighbours joined: equal sets have equal runs."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if start >= stop:
                continue
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        self.runs = tuple(joined)
        self._length = sum(stop - start for start, stop in self.runs)

    @classmethod
    def of(cls, indices: Iterable[int]) -> Self:
        """Keeps the indices in the order given, joining neighbours into runs.

        Raises:
            ValueError: An index is negative.
        """
        runs: list[tuple[int, int]] = []
        start = stop = -1
        for index in indices:
            if index == stop and start >= 0:
                stop += 1
                continue
            if index < 0:
                raise ValueError(f"{index} is no page index")
            if start >= 0:
                runs.append((start, stop))
            start, stop = index, index + 1
        if start >= 0:
            runs.append((start, stop))
        return cls(runs)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``12-15,40,7``; an empty string is no pages.

        Raises:
            ValueError: A part is not an index or a rising run, an index is 2**40 or more, or there are more
                than 2**24 pages.
        """
        runs: list[tuple[int, int]] = []
        for part in text.split(",") if text else ():
            first, dash, last = part.partition("-")
            # isdecimal alone admits other scripts' digits, which int() would take.
            if not (first.isascii() and first.isdecimal()) or (dash and not (last.isascii() and last.isdecimal())):
                raise ValueError(f"{part[:40]!r} is neither an index nor a run a-b")
            # The length first: int() takes time for a number of a thousand digits.
            if max(len(first), len(last)) > 20 or max(int(first), int(last or 0)) >= MAX_PAGE_INDEX:
                raise ValueError(f"{part[:40]!r} is beyond the largest page index, 2**40 - 1")
            start, stop = int(first), int(last if dash else first) + 1
            if stop <= start:
                raise ValueError(f"the run {part[:40]!r} does not rise")
            runs.append((start, stop))
        pages = cls(runs)
        if pages._length > MAX_PAGES:
            raise ValueError(f"{pages._length} pages are more than one record may name, 2**24")
        return pages

    def sorted(self) -> PageSet:
        """The same indices in rising order, each once, in the fewest runs."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.runs):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return PageSet(merged)

    def below(self, end: int) -> PageSet:
        """Those of the indices that are less than `end`, in the same order."""
        return PageSet((start, min(stop, end)) for start, stop in self.runs if start < end)

    def __str__(self) -> str:
        return ",".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in self.runs)

    def __repr__(self) -> str:
        return f"PageSet.parse({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs:
            yield from range(start, stop)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and any(start <= index < stop for start, stop in self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageSet) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)
