"""`guardctl`: the incident CLI. One module a command.

Exit codes: 0 it went well, 1 it went well and something is wrong (`replay` found something, `demo` failed), 2 bad
usage, or input that could not be read; one line on standard error says what and where.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

COMMANDS = {
    "demo": "guard.cli.demo",
    "incidents": "guard.cli.incidents",
    "replay": "guard.cli.replay",
    "version": "guard.cli.version",
}


class LazyGroup(click.Group):
    """Commands are imported when they are named: `guardctl version` need not load what `demo` needs."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """All of them."""
        return sorted(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The one of that name."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: Any = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 well, 1 something was found (replay) or failed (demo), 2 bad usage or unreadable input.",
)
def main() -> None:
    """Observe and guard the KV cache of multi-tenant LLM inference."""
