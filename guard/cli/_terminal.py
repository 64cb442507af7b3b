"""How commands talk to people: tables on a terminal, plain text elsewhere, one line for an error."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import NoReturn

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 400
STYLES = {"critical": "bold red", "high": "yellow", "warning": "cyan", "kill": "bold red", "allow": "green"}


def console() -> Console:
    """Standard output; no colour when it is not a terminal.

    Wider than any terminal, so that a long row is wrapped by the terminal and an id in it stays whole.
    """
    return Console(highlight=False, width=_WIDTH)


def table(*columns: str) -> Table:
    """An empty table with these columns."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def add_row(rows: Table, *cells: str | Text) -> None:
    """Adds a row. Text from records is shown as it is: it is no markup, and its control characters do nothing."""
    rows.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in cells))


def visible(text: str) -> str:
    """The text with what does not print written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def styled(word: str) -> Text:
    """The word in the colour that its meaning has."""
    return Text(word, STYLES.get(word, ""))


def time_text(time_ns: int | None) -> str:
    """A time in UTC, to the millisecond."""
    if time_ns is None:
        return "-"
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def fail(message: str) -> NoReturn:
    """Ends the command: the input could not be read."""
    click.echo(f"guardctl: {message}", err=True)
    sys.exit(2)
