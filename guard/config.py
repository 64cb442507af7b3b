"""The guard's configuration: one YAML file, the environment over it, ``--set`` over both.

Every field has a default. ``KVGUARD_LISTEN__OTLP_GRPC=unix:/run/kvguard/otlp.sock`` sets ``listen.otlp_grpc``: the
prefix, then the field in capitals, two underscores for a dot. Variables whose first part is no field are others'
business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from guard.ledger import LedgerSettings
from guard.policy import Policy
from guard.receive.access import AccessError, Certificates, Tokens
from guard.receive.address import Address
from guard.receive.target import Target

PREFIX = "KVGUARD_"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, where it was set and the remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _secret(value: SecretStr | None, file: str | None, name: str) -> str | None:
    if value is not None:
        return value.get_secret_value()
    if file is None:
        return None
    try:
        text = Path(file).read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{name}_file {file}: {getattr(error, 'strerror', None) or error}") from error
    if not text:
        raise ConfigError(f"{name}_file {file}: is empty")
    return text


class Listen(_Section):
    """Where the guard listens, and to whom."""

    otlp_grpc: str | None = "127.0.0.1:4317"
    """Records over OTLP/gRPC: ``unix:PATH`` or ``HOST:PORT``; None does not listen."""
    otlp_http: str | None = "127.0.0.1:4318"
    """Records over OTLP/HTTP (``POST /v1/traces``, protobuf or JSON): likewise."""
    http: str = "127.0.0.1:9464"
    """``/livez``, ``/readyz`` and ``/metrics``: ``HOST:PORT``."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """What senders of records must show (``authorization: Bearer TOKEN``)."""
    token_file: str | None = None
    """Further tokens, one a line; read anew when the file changes."""
    tls_cert_file: str | None = None
    """The certificate chain (PEM) that the OTLP listeners show on TCP addresses, which then speak TLS only. It and
    the two below are read anew when they change. Unix sockets stay plain."""
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    """Senders must show a certificate that one of these signed (mTLS)."""
    allowed_uids: list[int] | None = None
    """Users whose processes may connect to OTLP/HTTP's Unix socket, beside root's; this user's when None. OTLP/gRPC's
    socket is this user's and root's alone."""
    metrics_token: SecretStr | None = Field(default=None, min_length=1)
    """What readers of ``/metrics`` must show."""
    metrics_token_file: str | None = None
    insecure_bind: bool = False
    """Allow addresses that other machines can reach, in plain text or without asking who sends."""
    max_message_mib: int = Field(default=16, ge=1, le=64)
    """Of one message, compressed or not."""
    max_connections: int = Field(default=256, ge=1, le=65_536)
    """To each of the OTLP listeners."""
    idle_timeout_s: float = Field(default=60.0, gt=0)
    """After this OTLP/HTTP closes a connection that asks nothing."""
    request_timeout_s: float = Field(default=30.0, gt=0)
    """Within this a request over OTLP/HTTP must have come."""
    queue_records: int = Field(default=262_144, ge=1)
    """Records that may wait for the ledger; senders are told to come back when it is full."""
    unknown_spans: Literal["ignore", "forward"] = "ignore"
    """What happens to spans that are no records."""
    forward_to: str | None = None
    """Where they are forwarded: ``grpc://HOST:PORT``, ``grpcs://…``, ``unix:PATH`` (gRPC), ``http://HOST:PORT`` or
    ``https://…``. At most, and never at the cost of records: what finds the queue full or the target away is dropped
    and counted."""
    forward_token_file: str | None = None
    """Holds what is shown there as ``authorization: Bearer TOKEN``."""
    forward_queue_mib: int = Field(default=16, ge=1, le=1024)
    """Messages that may wait to be forwarded."""

    @model_validator(mode="after")
    def _addresses(self) -> Listen:
        for name in ("otlp_grpc", "otlp_http", "http"):
            text = getattr(self, name)
            if text is None:
                continue
            try:
                address = Address.parse(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if address.local or self.insecure_bind:
                continue
            reach = f"{name}: other machines can reach {address}"
            if name == "http":
                raise ValueError(f"{reach}; listen on loopback, or set listen.insecure_bind: true")
            if self.tls_cert_file is None:
                raise ValueError(
                    f"{reach}; listen on loopback or a Unix socket, give listen.tls_cert_file, "
                    "or set listen.insecure_bind: true"
                )
            if self.tls_client_ca_file is None and self.token is None and self.token_file is None:
                raise ValueError(
                    f"{reach} and nobody is asked who they are; give listen.tls_client_ca_file or listen.token_file, "
                    "or set listen.insecure_bind: true"
                )
        if Address.parse(self.http).path:
            raise ValueError(f"http: {self.http} is a Unix socket; probes and Prometheus need HOST:PORT")
        return self

    @model_validator(mode="after")
    def _tls(self) -> Listen:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            missing, given = ("cert", "key") if self.tls_cert_file is None else ("key", "cert")
            raise ValueError(f"tls_{given}_file: needs listen.tls_{missing}_file beside it")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file: needs listen.tls_cert_file and listen.tls_key_file")
        return self

    @model_validator(mode="after")
    def _forwarding(self) -> Listen:
        if self.forward_to is None:
            if self.unknown_spans == "forward":
                raise ValueError("unknown_spans: is forward; say where to, with listen.forward_to")
            return self
        if self.unknown_spans != "forward":
            raise ValueError("forward_to: does nothing unless listen.unknown_spans is forward")
        try:
            target = Target.parse(self.forward_to)
        except ValueError as error:
            raise ValueError(f"forward_to: {error}") from None
        for name in ("otlp_grpc", "otlp_http"):
            if (text := getattr(self, name)) is not None and target.address == Address.parse(text):
                raise ValueError(f"forward_to: {target.address} is this guard's own listen.{name}; name another")
        return self

    def tokens(self) -> Tokens | None:
        """What senders must show; None if nothing is asked for.

        Raises:
            ConfigError: The file cannot be read or is empty.
        """
        if self.token is None and self.token_file is None:
            return None
        try:
            return Tokens([self.token.get_secret_value()] if self.token is not None else [], self.token_file)
        except AccessError as error:
            raise ConfigError(f"listen.token_file {error}") from None

    def certificates(self) -> Certificates | None:
        """What the OTLP listeners show; None if they speak plain text.

        Raises:
            ConfigError: A file cannot be read, or they do not belong together.
        """
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        try:
            return Certificates(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        except AccessError as error:
            raise ConfigError(f"listen.tls_cert_file, tls_key_file, tls_client_ca_file: {error}") from None

    def forward_token_text(self) -> str | None:
        """What is shown to `forward_to`.

        Raises:
            ConfigError: The file cannot be read or is empty.
        """
        return _secret(None, self.forward_token_file, "listen.forward_token")

    def metrics_token_text(self) -> str | None:
        """The metrics readers' token, likewise."""
        return _secret(self.metrics_token, self.metrics_token_file, "listen.metrics_token")


class Board(_Section):
    """The verdict board."""

    path: str = "/dev/shm/kvguard/board"
    requests: int = Field(default=65_536, ge=8, le=1 << 24)
    """Requests that can have a verdict at once; a power of two."""
    streams: int = Field(default=1024, ge=8, le=1 << 20)
    """Streams that can have a watermark; a power of two."""

    @field_validator("requests", "streams")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value


class Ring(_Section):
    """Shared memory through which processes on this machine hand over records, beside OTLP."""

    on: bool = True
    path: str = "/dev/shm/kvguard/ring"
    """The file; engines are told the same. It gets mode 0600, so engine and guard run as the same user."""
    lanes: int = Field(default=16, ge=1, le=1024)
    """Processes' streams that can write at once."""
    rows: int = Field(default=32_768, ge=64, le=1 << 24)
    """Rows of 64 bytes a lane, a power of two; most records take three to five. Memory for all of them is reserved
    when the ring is made. One that is there already is taken as it is."""

    @field_validator("rows")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value


class Incidents(_Section):
    """What the guard remembers."""

    path: str = "/var/lib/kvguard/incidents.db"
    keep: int = Field(default=100_000, ge=1)
    """Incidents kept; the oldest go."""


class Journal(_Section):
    """What the guard that takes over after this one must know: pools, epochs, live requests, and incidents that the
    store does not have yet."""

    on: bool = True
    path: str | None = None
    """The file; ``journal`` beside the incidents when None. It gets mode 0600."""
    limit_mib: int = Field(default=32, ge=1, le=4096)
    """Beyond this it is written anew from what is live."""


class Engine(_Section):
    """The engine that is asked to abort what was killed."""

    abort_url: str | None = None
    """``POST {"rid": request, "incident": id}`` goes here. None: the board alone stops requests."""
    admin_key: SecretStr | None = Field(default=None, min_length=1)
    admin_key_file: str | None = None
    retry_s: float = Field(default=5.0, ge=0, le=60)
    """How long a failed call is tried again."""

    @field_validator("abort_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)  # its port is checked when it is asked for
            if url.scheme not in ("http", "https") or not url.hostname or (url.port or 1) < 1:
                raise ValueError(f"{value!r} is not http://HOST:PORT/PATH")
        return value

    def key_text(self) -> str | None:
        """The key, read from its file if it is in one.

        Raises:
            ConfigError: The file cannot be read or is empty.
        """
        return _secret(self.admin_key, self.admin_key_file, "engine.admin_key")


class Config(_Section):
    """All of it."""

    mode: Literal["monitor", "enforce"] = "monitor"
    """``monitor`` judges and reports and kills nothing."""
    listen: Listen = Listen()
    ring: Ring = Ring()
    board: Board = Board()
    incidents: Incidents = Incidents()
    journal: Journal = Journal()
    engine: Engine = Engine()
    ledger: LedgerSettings = LedgerSettings()
    policy: Policy = Policy()

    @property
    def journal_path(self) -> str | None:
        """The journal's file; None when there is to be none."""
        if not self.journal.on:
            return None
        return self.journal.path or os.path.join(os.path.dirname(self.incidents.path), "journal")

    @field_validator("ledger")
    @classmethod
    def _window(cls, value: LedgerSettings) -> LedgerSettings:
        if value.reorder_window_ms is None:
            raise ValueError("reorder_window_ms: only a replay can wait for the end of the input")
        return value


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    settings: Iterable[str] = (),
) -> Config:
    """Reads the configuration.

    Args:
        path: The YAML file; None takes the defaults.
        environ: Where ``KVGUARD_*`` is looked for; the process's environment by default.
        settings: ``field.field=value``, strongest.

    Raises:
        ConfigError: Names the field, and the line, variable or option that set it.
    """
    name = os.fspath(path) if path is not None else "configuration"
    values, lines = _read(name) if path is not None else ({}, {})
    origins: dict[tuple[str, ...], str] = {loc: f"{name}:{line}" for loc, line in lines.items()}
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        loc = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        if variable.startswith(PREFIX) and loc[0] in Config.model_fields:
            _set(values, loc, text, variable)
            origins[loc] = variable
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not equals or not field:
            raise ConfigError(f"--set {setting}: is not field.field=value")
        loc = tuple(field.strip().split("."))
        _set(values, loc, text, f"--set {field}")
        origins[loc] = f"--set {field}"
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, name, origins) for e in error.errors(include_url=False))) from None


def _explain(error: Any, name: str, origins: Mapping[tuple[str, ...], str]) -> str:
    loc = tuple(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "there is no such field"
    # A section's own check names its field in front of the message.
    field, colon, rest = message.partition(": ")
    if colon and field.isidentifier():
        loc, message = (*loc, field), rest
    where = next((origins[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in origins), name)
    return f"{where}: {'.'.join(loc) or 'configuration'}: {message}"


def _set(values: dict[str, Any], loc: tuple[str, ...], text: str, origin: str) -> None:
    for part in loc[:-1]:
        inner = values.get(part)
        if inner is None:
            inner = values[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{origin}: {part} is not a section")
        values = inner
    # Scalars stay text, for pydantic to read as the field wants: a token may look like a number.
    if text.strip() in ("null", "~"):
        values[loc[-1]] = None
    elif text.lstrip().startswith(("{", "[")):
        try:
            values[loc[-1]] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{origin}: is not YAML: {getattr(error, 'problem', error)}") from None
    else:
        values[loc[-1]] = text


def _read(path: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: is not YAML: {getattr(error, 'problem', error)}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: is not a mapping of fields")
    lines: dict[tuple[str, ...], int] = {}
    _lines(path, root, (), lines)
    return values, lines


def _lines(path: str, node: yaml.Node | None, loc: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    if not isinstance(node, yaml.MappingNode) or len(loc) > 8:
        return
    for key, value in node.value:
        here = (*loc, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{path}:{line}: {'.'.join(here)} is given twice, first on line {lines[here]}")
        lines[here] = line
        _lines(path, value, here, lines)
