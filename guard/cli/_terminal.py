"""How commands talk to people: tables on a terminal, plain text elsewhere, one line for an error."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import NoReturn

import click
from rich import box
from rich.console import Console
from rich.table import Table

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


def styled(word: str) -> str:
    """The word in the colour that its meaning has."""
    style = STYLES.get(word)
    return f"[{style}]{word}[/]" if style else word


def time_text(time_ns: int | None) -> str:
    """A time in UTC, to the millisecond."""
    if time_ns is None:
        return "-"
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def fail(message: str) -> NoReturn:
    """Ends the command: the input could not be read."""
    click.echo(f"guardctl: {message}", err=True)
    sys.exit(2)
