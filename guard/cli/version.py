"""`guardctl version`."""

from __future__ import annotations

import json
import platform

import click

import guard


@click.command("version", short_help="Print versions.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(output: str) -> None:
    """Print the version of this guardctl and of the record convention it speaks."""
    versions = {"kvguard": guard.__version__, "records": 1, "findings": 1, "python": platform.python_version()}
    if output == "json":
        click.echo(json.dumps(versions))
        return
    for name, version in versions.items():
        click.echo(f"{name:8} {version}")
