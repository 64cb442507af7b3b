"""`guardctl replay`: recorded traces through the same ledger as the live guard."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import click

from guard.cli._progress import Reading
from guard.cli._terminal import add_row, console, fail, styled, table
from guard.config import ConfigError, load
from guard.findings import Finding
from guard.ledger import Ledger, LedgerSettings, Request
from guard.native import _core
from guard.native.ledger import Ledger as NativeLedger
from guard.native.ledger import Request as NativeRequest
from guard.policy import Policy
from guard.receive.otlp import Batch, OtlpError, parse_json_line, parse_protobuf, read_delimited
from guard.records import Record, RecordError

_ROWS = 1024
"""Records that the native ledger is given at once."""


class _PythonFeed:
    """The Python ledger, a record at a time."""

    def __init__(self, replay: Replay, policy: Policy, settings: LedgerSettings) -> None:
        self.ledger = Ledger(policy, settings, replay.found, replay.retire)
        self.record, self.place = self.ledger.feed, self.ledger.feed_invalid

    def flush(self) -> None:
        """Nothing waits."""


class _NativeFeed:
    """The native ledger, many records at a time."""

    def __init__(self, replay: Replay, policy: Policy, settings: LedgerSettings) -> None:
        self.ledger = NativeLedger(policy, settings, replay.found, replay.retire)
        self._rows = _core.Rows()

    def record(self, record: Record) -> None:
        """A record behind those that wait."""
        self._rows.append(record)
        self._flush_some()

    def place(self, header: Record) -> None:
        """The place of a record that could not be read."""
        self._rows.place(header.stream, header.epoch, header.seq, header.time_ns)
        self._flush_some()

    def rows(self, rows: _core.Rows) -> None:
        """Many records behind those that wait."""
        self.flush()
        self.ledger.feed_rows(rows)

    def flush(self) -> None:
        """Judges what waits."""
        rows, self._rows = self._rows, _core.Rows()
        self.ledger.feed_rows(rows)

    def _flush_some(self) -> None:
        if len(self._rows) >= _ROWS:
            self.flush()


class Replay:
    """One run of the ledger over files. Memory goes with pools and live requests, not with the trace.

    Args:
        policy: What is done about findings.
        settings: How much the ledger keeps.
        native: Whether the native ledger judges, or the Python one.
    """

    def __init__(self, policy: Policy, settings: LedgerSettings, *, native: bool = True) -> None:
        self.findings: list[Finding] = []
        self.counts = {"read": 0, "kv": 0, "ignored": 0, "invalid": 0}
        # Requests that are over leave the ledger's memory; what is to be printed of them waits on disk.
        self._marked: dict[str, dict[str, Any]] = {}
        """Of those, the ones that were to be killed or gave something away: an id that comes again stays so."""
        self._retired: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._feed: _PythonFeed | _NativeFeed = (_NativeFeed if native else _PythonFeed)(self, policy, settings)

    @property
    def ledger(self) -> Ledger | NativeLedger:
        """The ledger, which has judged all but the last few records."""
        return self._feed.ledger

    def found(self, finding: Finding, new: bool) -> None:
        """Keeps a finding."""
        if new:
            self.findings.append(finding)

    def retire(self, request: Request | NativeRequest) -> None:
        """Keeps what is to be printed of a request that the ledger forgets."""
        summary = self._with_past(request)
        if summary["verdict"] == "kill" or summary["disclosed"]:
            self._marked[request.id] = summary
        self._retired.write(json.dumps([request.id, summary]) + "\n")

    def _with_past(self, request: Request | NativeRequest) -> dict[str, Any]:
        summary = _summary(request)
        past = self._marked.get(request.id)
        if past is not None:
            summary["verdict"] = max(summary["verdict"], past["verdict"])  # "kill" over "allow"
            summary["disclosed"] |= past["disclosed"]
            summary["lineage"] = sorted({*summary["lineage"], *past["lineage"]})
        return summary

    def feed(self, batch: Batch, where: str, strict: bool) -> None:
        """Takes one message's records; names each invalid one on standard error.

        Raises:
            OtlpError: `strict`, and a record is invalid.
        """
        for item in batch.items:
            if isinstance(item, RecordError):
                if strict:
                    raise OtlpError(str(item))
                click.echo(f"guardctl: {where}: {item}", err=True)
                if item.header is not None:
                    self._feed.place(item.header)
            else:
                self._feed.record(item)
        self.counts["read"] += batch.read
        self.counts["kv"] += batch.kv
        self.counts["ignored"] += batch.ignored
        self.counts["invalid"] += batch.invalid

    def feed_protobuf(self, message: bytes, where: str, strict: bool) -> None:
        """Takes one message in protobuf, likewise.

        Raises:
            OtlpError: It is broken as a whole; or `strict`, and a record is invalid.
        """
        if isinstance(self._feed, _NativeFeed):
            try:
                decoded = _core.decode_otlp(message)
            except ValueError as error:
                raise OtlpError(str(error)) from None
            if not decoded.invalid:
                self._feed.rows(decoded.rows)
                self.counts["read"] += decoded.read
                self.counts["kv"] += decoded.read - decoded.ignored
                self.counts["ignored"] += decoded.ignored
                return
        # The native decoder does not name each invalid record.
        self.feed(parse_protobuf(message), where, strict)

    def broken(self) -> None:
        """Counts a line that held no message."""
        self.counts["read"] += 1
        self.counts["invalid"] += 1

    def finish(self) -> None:
        """The input is over."""
        self._feed.flush()
        self.ledger.finish()
        self.findings.sort(key=lambda f: (f.time_ns, f.stream, f.epoch, f.seq, f.kind, f.request or "", f.pool or ""))

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each request's id and summary."""
        self._retired.seek(0)
        for line in self._retired:
            request, summary = json.loads(line)
            if request not in self.ledger.requests:
                yield request, summary
        for request in self.ledger.requests.values():
            yield request.id, self._with_past(request)


def _summary(request: Request | NativeRequest) -> dict[str, Any]:
    return {
        "tenant": request.tenant,
        "verdict": request.verdict,
        "lineage": sorted(request.lineage),
        "disclosed": request.disclosed,
    }


@click.command("replay", short_help="Judge recorded traces.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--strict", is_flag=True, help="Stop at the first line or record that is not valid (exit 2).")
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    envvar="KVGUARD_CONFIG",
    help="The guard's configuration: policy and ledger settings.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Override one field, e.g. policy.digests=require."
)
@click.option(
    "--ledger",
    type=click.Choice(["native", "python"]),
    default="native",
    show_default=True,
    help="Which of the two ledgers judges; they say the same, the native one sooner.",
)
def command(
    files: tuple[str, ...], output: str, strict: bool, config: str | None, overrides: tuple[str, ...], ledger: str
) -> None:
    """Judge recorded traces: OTLP/JSON lines, or length-delimited protobuf (.pb).

    FILE may be - for standard input (OTLP/JSON lines). All files are one input: the streams in them may be
    spread over files and arrive in any order. Exit status: 0 nothing found, 1 findings, 2 the input could not
    be read.
    """
    try:
        settings = load(config, settings=overrides)
    except ConfigError as error:
        fail(str(error))
    replay = Replay(
        settings.policy,
        settings.ledger.model_copy(update={"reorder_window_ms": None}),
        native=ledger == "native",
    )
    with Reading(files) as progress:
        for name in files:
            _read(replay, name, strict, progress)
        replay.finish()
    if not replay.counts["kv"]:
        click.echo("guardctl: no record was read, so nothing was judged", err=True)
    if output == "json":
        _print_json(replay)
    else:
        _print_table(replay)
    sys.exit(1 if replay.findings else 0)


def _read(replay: Replay, name: str, strict: bool, progress: Reading) -> None:
    where = name
    try:
        with _open(name) as file:
            if name.endswith(".pb"):
                for number, message in enumerate(read_delimited(file), 1):
                    where = f"{name}, message {number}"
                    replay.feed_protobuf(message, where, strict)
                    progress.add(len(message), replay.counts["kv"])
                return
            for number, line in enumerate(file, 1):
                where = f"{name}, line {number}"
                progress.add(len(line), replay.counts["kv"])
                if not line.strip():
                    continue
                try:
                    batch = parse_json_line(line)
                except OtlpError as error:
                    if strict:
                        raise
                    replay.broken()
                    click.echo(f"guardctl: {where}: {error}", err=True)
                    continue
                replay.feed(batch, where, strict)
    except OSError as error:
        fail(f"{name}: {error.strerror}")
    except OtlpError as error:
        fail(f"{where}: {error}")


def _open(name: str) -> BinaryIO:
    return sys.stdin.buffer if name == "-" else Path(name).open("rb")


def _print_json(replay: Replay) -> None:
    out = sys.stdout
    out.write('{"findings":' + json.dumps([f.as_json() for f in replay.findings]) + ',\n "requests":{')
    for number, (request, summary) in enumerate(replay.requests()):
        out.write(("," if number else "") + f"{json.dumps(request)}:{json.dumps(summary)}")
    out.write('},\n "records":' + json.dumps(replay.counts) + "}\n")


def _print_table(replay: Replay) -> None:
    out = console()
    if replay.findings:
        found = table(
            "SEVERITY", "KIND", "ACTION", "REQUEST", "TENANT", "OTHER TENANTS", "POOL", "PAGES", "RECORD", "WHY"
        )
        for f in replay.findings:
            pages = str(f.pages)
            add_row(
                found, styled(f.severity), f.kind, styled(f.action), f.request or "-", f.tenant or "-",
                ",".join(sorted(f.other_tenants)) or "-", f.pool or "-",
                (pages if len(pages) <= 24 else f"{len(f.pages)} pages") or "-", f"{f.stream}#{f.seq}",
                f.reason + (" (degraded)" if f.confidence == "degraded" else ""),
            )  # fmt: skip
        out.print(found)
    killed = disclosed = total = 0
    for _, summary in replay.requests():
        total += 1
        killed += summary["verdict"] == "kill"
        disclosed += summary["disclosed"]
    counts = replay.counts
    out.print(
        f"{len(replay.findings)} findings; {total} requests, {killed} to be killed, {disclosed} disclosed; "
        f"{counts['kv']} records of {counts['read']} spans read, {counts['ignored']} ignored, "
        f"{counts['invalid']} invalid"
    )
