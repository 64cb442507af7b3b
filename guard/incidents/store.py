"""The incidents on disk: SQLite in WAL mode, so that `guardctl` reads while the guard writes.

Schema version 1 (``PRAGMA user_version``): an ``incident`` has ``finding`` rows and the ``record`` rows that led
to it. Times are nanoseconds since the Unix epoch. Ids, counts and digests only, never contents.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self

from guard.records import Record, to_attributes

VERSION = 1

_SCHEMA = """
CREATE TABLE incident (
  id TEXT PRIMARY KEY, opened_ns INTEGER NOT NULL, updated_ns INTEGER NOT NULL,
  kind TEXT NOT NULL, severity TEXT NOT NULL, action TEXT NOT NULL, mode TEXT NOT NULL,
  request TEXT, tenant TEXT, pool TEXT, disclosed INTEGER NOT NULL,
  record_ns INTEGER NOT NULL, received_ns INTEGER, verdict_ns INTEGER,
  abort_ns INTEGER, abort_result TEXT
) STRICT;
CREATE INDEX incident_opened ON incident (opened_ns);
CREATE INDEX incident_request ON incident (request);
CREATE TABLE finding (
  incident TEXT NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
  kind TEXT NOT NULL, request TEXT NOT NULL, pool TEXT NOT NULL, body TEXT NOT NULL,
  PRIMARY KEY (incident, kind, request, pool)
) STRICT, WITHOUT ROWID;
CREATE TABLE record (
  incident TEXT NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
  stream TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL,
  time_ns INTEGER NOT NULL, received_ns INTEGER NOT NULL, offending INTEGER NOT NULL,
  name TEXT NOT NULL, attributes TEXT NOT NULL,
  PRIMARY KEY (incident, stream, epoch, seq)
) STRICT, WITHOUT ROWID;
"""


class StoreError(RuntimeError):
    """A store that cannot be opened; the message names the file and what to do."""


@dataclass(frozen=True)
class Evidence:
    """One record that led to an incident."""

    record: Record
    received_ns: int
    offending: bool = False
    """Whether one of the incident's findings names it."""


@dataclass
class Incident:
    """One incident: what was found about one request, or about one pool or stream where no request is named."""

    id: str
    """What a client may be told, and support looks up."""
    opened_ns: int
    updated_ns: int
    kind: str
    """The worst of its findings."""
    severity: str
    action: str
    """``killed``, ``observed: would kill`` (in monitor mode), ``quarantined``, ``alerted`` or ``observed``."""
    mode: str
    request: str | None
    tenant: str | None
    pool: str | None
    disclosed: bool
    """Whether another tenant's data had gone into bytes that left."""
    record_ns: int
    """When the record happened that gave it away: the offending one, or the one that made it so."""
    received_ns: int | None
    """When the guard had it."""
    verdict_ns: int | None
    """When the verdict was on the board; None if there was none to write."""
    abort_ns: int | None = None
    """When the engine answered the abort call."""
    abort_result: str | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Each as `Finding.as_json` gives it, and its ``reason``."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Each with ``name``, ``time_ns``, ``received_ns``, ``offending`` and ``attributes``; only from `Store.get`."""

    def as_json(self) -> dict[str, Any]:
        """All of it, for printing."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


_COLUMNS = tuple(f.name for f in fields(Incident) if f.name not in ("findings", "records"))
_SAVED = tuple(name for name in _COLUMNS if not name.startswith("abort_"))
_SAVE = (
    f"INSERT INTO incident ({', '.join(_SAVED)}) VALUES ({', '.join('?' * len(_SAVED))}) "
    f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{n} = excluded.{n}' for n in _SAVED[1:])}"
)


_RECOVER = (
    f"INSERT INTO incident ({', '.join(_SAVED)}) VALUES ({', '.join('?' * len(_SAVED))}) "
    "ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{n} = excluded.{n}" for n in ("kind", "severity", "action", "record_ns", "received_ns", "verdict_ns"))
    + " WHERE incident.verdict_ns IS NULL AND excluded.verdict_ns IS NOT NULL"
)


class Store:
    """The incidents of one file. Use it from one thread."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, read_only: bool = False, timeout_s: float = 1.0) -> Self:
        """Opens the file; makes it, mode 0600, if it is missing and this is not read-only.

        Args:
            path: The file.
            read_only: For those who only look; nothing is made and nothing is changed.
            timeout_s: How long to wait for another writer.

        Raises:
            StoreError: It is missing, cannot be opened, is no such store, or is of a newer version.
        """
        path = os.fspath(path)
        if read_only and not os.path.exists(path):
            raise StoreError(f"incidents {path}: there is no such file; has the guard run with this path?")
        connection: sqlite3.Connection | None = None
        try:
            if not read_only:
                os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None)
            connection.row_factory = sqlite3.Row
            store = cls(path, connection)
            store._prepare(read_only)
        except (OSError, sqlite3.Error) as error:
            if connection is not None:
                connection.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StoreError(f"incidents {path}: cannot be opened: {reason}") from error
        except StoreError:
            if connection is not None:
                connection.close()
            raise
        return store

    def _prepare(self, read_only: bool) -> None:
        version = self._version()
        if version > VERSION:
            raise StoreError(
                f"incidents {self.path}: written by a newer kvguard (schema {version}, this one knows {VERSION}); "
                "upgrade, or give another path"
            )
        if read_only:
            self._db.execute("PRAGMA query_only = ON")
            if version == 0:
                raise StoreError(f"incidents {self.path}: is not an incident store")
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if version == 0:
            self._db.execute("BEGIN IMMEDIATE")
            if self._version() == 0:
                if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise StoreError(f"incidents {self.path}: is another program's database")
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.execute("COMMIT")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def save(self, incidents: Iterable[tuple[Incident, Iterable[Evidence]]], *, keep: int = 0) -> None:
        """Writes incidents, new or known, in one transaction; what an abort call gave is left as it is.

        Args:
            incidents: Each with the evidence to add to it.
            keep: Oldest incidents beyond this many are deleted; 0 keeps all.

        Raises:
            sqlite3.Error: Nothing was written.
        """
        with self._transaction():
            for incident, evidence in incidents:
                self._db.execute(_SAVE, [getattr(incident, name) for name in _SAVED])
                self._db.executemany(
                    "INSERT OR REPLACE INTO finding VALUES (?, ?, ?, ?, ?)",
                    _finding_rows(incident),
                )
                self._db.executemany(
                    "INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
                    "SET offending = max(offending, excluded.offending)",
                    [_record_row(incident.id, e) for e in evidence],
                )
            if keep:
                self._db.execute(
                    "DELETE FROM incident WHERE id IN "
                    "(SELECT id FROM incident ORDER BY opened_ns DESC, id LIMIT -1 OFFSET ?)",
                    (keep,),
                )

    def recover(self, incident: Incident) -> None:
        """Puts in what is not known of an incident: all of it, a finding, or that its request was killed.

        Args:
            incident: As the guard's journal has it; what the store says already is newer and stays.

        Raises:
            sqlite3.Error: Nothing was written.
        """
        with self._transaction():
            self._db.execute(_RECOVER, [getattr(incident, name) for name in _SAVED])
            self._db.executemany("INSERT OR IGNORE INTO finding VALUES (?, ?, ?, ?, ?)", _finding_rows(incident))

    def aborted(self, incident: str, abort_ns: int, result: str) -> None:
        """Notes what the engine said to the abort call.

        Raises:
            sqlite3.Error: Nothing was written.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE incident SET abort_ns = ?, abort_result = ? WHERE id = ?", (abort_ns, result, incident)
            )

    def list(self, limit: int = 100, *, kind: str | None = None, tenant: str | None = None) -> list[Incident]:
        """The newest incidents first, each with its findings.

        Args:
            limit: At most this many.
            kind: Only those with a finding of this kind.
            tenant: Only those of this tenant's requests, or with this tenant's data.
        """
        rows = self._db.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM incident i WHERE "
            "(:kind IS NULL OR EXISTS (SELECT 1 FROM finding WHERE incident = i.id AND kind = :kind)) AND "
            "(:tenant IS NULL OR tenant = :tenant OR EXISTS (SELECT 1 FROM finding f, "
            "json_each(f.body, '$.other_tenants') t WHERE f.incident = i.id AND t.value = :tenant)) "
            "ORDER BY opened_ns DESC, id LIMIT :limit",
            {"kind": kind, "tenant": tenant, "limit": limit},
        ).fetchall()
        return [self._incident(row) for row in rows]

    def get(self, incident: str) -> Incident | None:
        """One incident, with its findings and the records that led to it; None if there is none of this id."""
        row = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM incident WHERE id = ?", (incident,)).fetchone()
        if row is None:
            return None
        found = self._incident(row)
        found.records = [
            {
                "name": r["name"],
                "time_ns": r["time_ns"],
                "received_ns": r["received_ns"],
                "offending": bool(r["offending"]),
                "attributes": json.loads(r["attributes"]),
            }
            for r in self._db.execute(
                "SELECT * FROM record WHERE incident = ? ORDER BY time_ns, stream, epoch, seq", (incident,)
            )
        ]
        return found

    def count(self) -> int:
        """How many incidents there are."""
        return int(self._db.execute("SELECT count(*) FROM incident").fetchone()[0])

    def close(self) -> None:
        """Lets go of the file."""
        self._db.close()

    def _incident(self, row: sqlite3.Row) -> Incident:
        incident = Incident(**dict(row))
        incident.disclosed = bool(incident.disclosed)
        incident.findings = [
            json.loads(f["body"])
            for f in self._db.execute("SELECT body FROM finding WHERE incident = ?", (incident.id,))
        ]
        return incident

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """All or nothing, and the write lock from the start, so that waiting for it happens in one place."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
            except sqlite3.Error:
                self._rollback()
                raise
        else:
            self._rollback()

    def _rollback(self) -> None:
        # A full disk makes SQLite roll back by itself.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


def _finding_rows(incident: Incident) -> list[tuple[str, ...]]:
    return [(incident.id, f["kind"], f["request"] or "", f["pool"] or "", json.dumps(f)) for f in incident.findings]


def _record_row(incident: str, evidence: Evidence) -> tuple[Any, ...]:
    record = evidence.record
    return (
        incident, record.stream, record.epoch, record.seq, record.time_ns, evidence.received_ns,
        int(evidence.offending), record.NAME, json.dumps(to_attributes(record)),
    )  # fmt: skip
