"""How far a command that reads files has come, for whoever waits at a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

_EVERY_S = 0.1


class _Records(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['records']:,} records")


class Reading:
    """A progress bar on standard error while it is a terminal; otherwise nothing is shown.

    Of files it shows the part read, of standard input (``-``) how many records came.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._read = 0
        self._next = 0.0
        self._bar: Progress | None = None
        if not sys.stderr.isatty():
            return
        total = _bytes_of(names)
        columns: list[ProgressColumn] = [TextColumn("replay"), _Records(), TimeElapsedColumn()]
        if total is not None:
            columns[1:1] = [BarColumn(), TextColumn("{task.percentage:>3.0f} %")]
            columns.append(TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("replay", total=total, records=0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, size: int, records: int) -> None:
        """So many bytes more were read, and so many records since the beginning."""
        if self._bar is None:
            return
        self._read += size
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            self._bar.update(self._task, completed=self._read, records=records)


def _bytes_of(names: tuple[str, ...]) -> int | None:
    """How long the files are together; None when that cannot be known."""
    total = 0
    for name in names:
        path = Path(name)
        if name == "-" or not path.is_file():
            return None
        total += path.stat().st_size
    return total
