"""`guardctl incidents`: what the guard remembers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.text import Text

from guard.cli._terminal import add_row, console, fail, styled, table, time_text
from guard.config import ConfigError, load
from guard.findings import Kind
from guard.incidents.store import Incident, Store, StoreError

# Their values: of an enumeration itself, click takes the names.
_KINDS = [kind.value for kind in Kind]
_OUTPUT = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)


_F = TypeVar("_F", bound=Callable[..., Any])


def _where(function: _F) -> _F:
    """Options that say where the store is: before the subcommand or behind it."""
    for option in (
        click.option("--config", type=click.Path(dir_okay=False), help="The guard's configuration file."),
        click.option("--db", metavar="FILE", help="The incident store; without it the configuration's incidents.path."),
    ):
        function = option(function)
    return function


@click.group("incidents", short_help="Look at incidents.")
@_where
@click.pass_context
def command(ctx: click.Context, db: str | None, config: str | None) -> None:
    """Look at incidents: what was found, about whom, what was done, and whether anything got out."""
    ctx.obj = (db, config)


def _store(ctx: click.Context, db: str | None, config: str | None) -> Store:
    before_db, before_config = ctx.obj
    db, config = db or before_db, config or before_config or os.environ.get("KVGUARD_CONFIG")
    try:
        return Store.open(db or load(config).incidents.path, read_only=True)
    except (ConfigError, StoreError) as error:
        fail(str(error))


@command.command("list")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Newest so many.")
@click.option("--kind", type=click.Choice(_KINDS), metavar="KIND", help="Only those with a finding of this kind.")
@click.option("--tenant", help="Only those about this tenant's requests.")
@_where
@_OUTPUT
@click.pass_context
def list_(
    ctx: click.Context,
    limit: int,
    kind: str | None,
    tenant: str | None,
    db: str | None,
    config: str | None,
    output: str,
) -> None:
    """List incidents, newest first."""
    incidents = _store(ctx, db, config).list(limit, kind=kind, tenant=tenant)
    if output == "json":
        for incident in incidents:
            body = incident.as_json()
            body.pop("records")
            click.echo(json.dumps(body))
    else:
        heads = (
            "INCIDENT",
            "OPENED (UTC)",
            "SEVERITY",
            "KIND",
            "ACTION",
            "TENANT",
            "REQUEST",
            "DISCLOSED",
            "CONFIDENCE",
        )
        rows = table(*heads)
        for i in incidents:
            add_row(
                rows, i.id, time_text(i.opened_ns), styled(i.severity), i.kind, i.action, i.tenant or "-",
                i.request or "-", Text("yes", "bold red") if i.disclosed else "no",
                "full" if any(f["confidence"] == "full" for f in i.findings) else "degraded",
            )  # fmt: skip
        console().print(rows if incidents else "no incidents")


@command.command("show")
@click.argument("incident_id", metavar="ID")
@_where
@_OUTPUT
@click.pass_context
def show(ctx: click.Context, incident_id: str, db: str | None, config: str | None, output: str) -> None:
    """Show one incident: findings, timings, and the records that led to it."""
    store = _store(ctx, db, config)
    incident = store.get(incident_id)
    if incident is None:
        fail(f"{store.path} has no incident {incident_id}; `guardctl incidents list` names those it has")
    if output == "json":
        click.echo(json.dumps(incident.as_json(), indent=1))
    else:
        _print(incident)


def _ms(later: int | None, earlier: int | None) -> str:
    return "-" if later is None or earlier is None else f"{(later - earlier) / 1e6:.1f} ms"


def _print(i: Incident) -> None:
    out = console()
    facts = table("", "")
    facts.show_header = False
    lines: tuple[tuple[str, str | Text], ...] = (
        ("incident", i.id), ("opened (UTC)", time_text(i.opened_ns)), ("severity", styled(i.severity)),
        ("action", f"{i.action} (mode {i.mode})"), ("request", i.request or "-"), ("tenant", i.tenant or "-"),
        ("disclosed", Text("yes: output left for the client", "bold red") if i.disclosed else "no"),
        ("record to guard", _ms(i.received_ns, i.record_ns)), ("record to verdict", _ms(i.verdict_ns, i.record_ns)),
        ("record to abort", f"{_ms(i.abort_ns, i.record_ns)} {i.abort_result or ''}"),
    )  # fmt: skip
    for name, value in lines:
        add_row(facts, name, value)
    out.print(facts)
    found = table("KIND", "SEVERITY", "ACTION", "POOL", "PAGES", "OTHER TENANTS", "OTHER REQUESTS", "RECORD", "WHY")
    for f in i.findings:
        add_row(
            found, f["kind"], styled(f["severity"]), f["action"], f["pool"] or "-", f["pages"] or "-",
            ",".join(f["other_tenants"]) or "-", ",".join(f["other_requests"]) or "-", f"{f['stream']}#{f['seq']}",
            f.get("reason", "") + (" (degraded)" if f["confidence"] == "degraded" else ""),
        )  # fmt: skip
    out.print(found)
    records = table("TIME (UTC)", "STREAM", "SEQ", "RECORD", "REQUEST", "TENANT", "FIELDS")
    for r in i.records:
        a = dict(r["attributes"])
        stream, seq = a.pop("kv.stream.id"), a.pop("kv.seq")
        request, tenant = a.pop("kv.request.id", "-"), a.pop("kv.tenant.id", "-")
        a.pop("kv.stream.epoch", None)
        a.pop("kv.digests", None)
        what: str | Text = Text(f"{r['name']} <", "bold red") if r["offending"] else r["name"]
        fields = " ".join(f"{key.removeprefix('kv.')}={value}" for key, value in a.items())
        add_row(records, time_text(r["time_ns"])[11:], stream, str(seq), what, request, tenant, fields)
    out.print(records)
