"""Rows in shared memory that one process writes and others look up while it does."""

from __future__ import annotations

from guard.act.board.layout import (
    CLEARED,
    EMPTY,
    LIVE,
    ROW_WORDS,
)

_LONGEST_RUN = 4096
"""A run of used rows longer than this is left as it is: it takes a board that is nearly full."""


class Table:
    """An open-addressed table of rows inside the mapping, for the one process that writes it."""

    def __init__(self, words: memoryview[int], first: int, rows: int) -> None:
        self._words = words
        self._first = first
        self._mask = rows - 1
        self._room = rows - rows // 8  # searches stay short below 7/8
        self.rows: dict[tuple[int, int], int] = {}
        """Key → word index of the row, of the live ones."""

    def place(self, key: tuple[int, int]) -> int | None:
        """The row of this key, or a free one for it; None if the table is full."""
        base = self.rows.get(key)
        if base is not None:
            return base
        if len(self.rows) >= self._room:
            return None
        index = key[0] & self._mask
        while True:
            base = self._first + index * ROW_WORDS
            if self._words[base + 3] < LIVE:
                return base
            index = (index + 1) & self._mask

    def store(self, base: int, key: tuple[int, int], state: int, body: tuple[int, ...]) -> None:
        """Writes a row, at a place that `place` gave for the key."""
        words = self._words
        version = words[base] | 1
        words[base] = version
        words[base + 1], words[base + 2] = key
        for offset, word in enumerate(body, 4):
            words[base + offset] = word
        words[base + 3] = state
        words[base] = (version + 1) & 0xFFFF_FFFF_FFFF_FFFF
        self.rows[key] = base

    def clear(self, key: tuple[int, int]) -> None:
        """Takes the key's row away, if it has one."""
        base = self.rows.pop(key, None)
        if base is None:
            return
        words = self._words
        version = words[base] | 1
        words[base] = version
        words[base + 3] = CLEARED
        for offset in (1, 2, 4, 5, 6, 7):
            words[base + offset] = 0
        words[base] = (version + 1) & 0xFFFF_FFFF_FFFF_FFFF
        self._tidy((base - self._first) // ROW_WORDS)

    def _tidy(self, cleared: int) -> None:
        """Makes cleared rows round this one never-used again where no live row's search passes."""
        words, first, mask = self._words, self._first, self._mask
        end = cleared
        while end - cleared <= mask and words[first + (end & mask) * ROW_WORDS + 3] != EMPTY:
            end += 1
            if end - cleared > _LONGEST_RUN:
                return
        # Backwards, with the earliest row at which a search for one of the rows behind begins. Where no row
        # is never-used, the rows behind are all the others: one more round to know them.
        certain = end - mask - 1 if end - cleared > mask else end
        earliest = end
        for position in range(end - 1, certain - mask - 2, -1):
            base = first + (position & mask) * ROW_WORDS
            state = words[base + 3]
            if state == EMPTY:
                return
            if state == CLEARED:
                if earliest > position and position < certain:
                    words[base + 3] = EMPTY
            else:
                earliest = min(earliest, position - ((position - words[base + 1]) & mask))
