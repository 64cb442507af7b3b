"""From a configuration file and the command line to a configuration that can be run."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from engine.config import ConfigError, EngineConfig, explain
from engine.faults import SEEN_IN, Fault

MAX_SOCKET_PATH = 107
"""Bytes that the path of a Unix socket may have (unix(7), ``sun_path``)."""

_ENDPOINT = re.compile(r"unix:.+|[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
_KEY = re.compile(r"[!-~]+")


def read(path: Path | None, sets: Sequence[str] = (), faults: Sequence[str] = ()) -> EngineConfig:
    """The file's configuration with the command line's changes, checked.

    Args:
        path: A YAML file; None: all defaults.
        sets: ``field=value`` or ``part.field=value``, the value in YAML.
        faults: Names of faults to switch on beside the file's.

    Raises:
        ConfigError: Names the field and the remedy.
    """
    where = str(path) if path is not None else "configuration"
    try:
        raw = yaml.safe_load(path.read_bytes()) if path is not None else {}
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: a mapping of fields is needed, not a {type(raw).__name__}")
    for change in sets:
        _set(raw, change)
    for fault in faults:
        if fault not in list(Fault):
            raise ConfigError(f"fault {fault!r}: there is none of that name; use one of {', '.join(Fault)}")
    if faults:
        listed = raw.get("faults") or []
        raw["faults"] = [*dict.fromkeys([*listed, *faults])] if isinstance(listed, list) else listed
    try:
        config = msgspec.convert(raw, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explain(error)}") from error
    check(config)
    return config


def _set(raw: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {change!r}: write it as field=value, for example prefill.pages=64")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {name}: the value is not YAML: {error}") from error
    # A tenant's key may hold dots, so only the first one parts a field from what is in it.
    part, dot, field = name.partition(".")
    if not dot:
        raw[part] = value
        return
    inner = raw.setdefault(part, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"--set {name}: {part} has no fields")
    inner[field] = value


def run_dir(config: EngineConfig) -> Path:
    """Where the engine's sockets are, as an absolute path."""
    return Path(config.run_dir).expanduser().absolute()


def check(config: EngineConfig) -> None:
    """What the types do not say.

    Raises:
        ConfigError: Names the field, its value and the remedy.
    """
    _check_numbers(config)
    _check_tenants(config)
    _check_guard(config)
    pools = min(config.prefill.pages, config.decode.pages) * config.page_tokens
    if config.context is not None and config.context < 2:
        raise ConfigError(f"context: {config.context} tokens; at least 2 are needed, one in and one out")
    if Fault.SWALLOWED_REJECT in config.faults and (config.context or 0) <= pools:
        raise ConfigError(
            f"context: the fault swallowed-reject needs an advertised context above the {pools} tokens that the "
            "smallest pool holds; set it, or make prefill.pages smaller"
        )
    if config.digest_key and not re.fullmatch(r"[0-9a-fA-F]{64}", config.digest_key):
        raise ConfigError("digest_key: 64 hexadecimal digits are needed; leave it empty for a fresh key")
    longest = max(config.prefill.workers, config.decode.workers) - 1
    socket = f"{run_dir(config)}/prefill-{longest}.inbox"
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"run_dir: {socket} has {len(socket.encode())} bytes, and a socket's path may have {MAX_SOCKET_PATH}; "
            "choose a shorter directory"
        )


def _check_numbers(config: EngineConfig) -> None:
    def whole(field: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise ConfigError(f"{field}: {value} is not within {low} to {high}")

    whole("port", config.port, 0, 65_535)
    whole("page_tokens", config.page_tokens, 1, 1024)
    whole("piece_pages", config.piece_pages, 0, 1 << 20)
    whole("max_waiting", config.max_waiting, 1, 1 << 20)
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        whole(f"{name}.workers", pool.workers, 1, 64)
        whole(f"{name}.pages", pool.pages, 1, 1 << 24)
        whole(f"{name}.threads", pool.threads, 1, 1024)
        whole(f"{name}.max_batch", pool.max_batch, 1, 4096)
        whole(f"{name}.chunk_tokens", pool.chunk_tokens, 1, 1 << 20)
    whole("guard.queue", config.guard.queue, 1, 1 << 24)
    times = {
        "lease_s": config.lease_s,
        "transfer_s": config.transfer_s,
        "stop_s": config.stop_s,
        "guard.wait_ms": config.guard.wait_ms,
    }
    for field, value in times.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{field}: {value} is not a time above 0")


def _check_tenants(config: EngineConfig) -> None:
    for place, (key, tenant) in enumerate(config.tenants.items()):
        # The key itself is a secret: errors end in logs.
        if not _KEY.fullmatch(key):
            raise ConfigError(f"tenants: key {place} is not printable ASCII without spaces")
        if not 1 <= len(tenant) <= 256:
            raise ConfigError(f"tenants: the tenant of key {place} has {len(tenant)} characters, not 1 to 256")
        if key == config.admin_key:
            raise ConfigError(f"admin_key: it is also a key of tenant {tenant}; make it another")
    if config.admin_key and not _KEY.fullmatch(config.admin_key):
        raise ConfigError("admin_key: it is not printable ASCII without spaces")


def _check_guard(config: EngineConfig) -> None:
    guard = config.guard
    if guard.endpoint is not None and not _ENDPOINT.fullmatch(guard.endpoint):
        raise ConfigError(f"guard.endpoint: {guard.endpoint!r} is neither unix:PATH nor HOST:PORT")
    if guard.ring is not None and ("\0" in guard.ring or not guard.ring.startswith("/")):
        raise ConfigError(f"guard.ring: {guard.ring!r} is no absolute path")
    if guard.gate != "off" and guard.board is None:
        raise ConfigError(f"guard.board: gate {guard.gate} needs the path of the verdict board")
    if guard.gate != "off" and not guard.emits:
        raise ConfigError(f"guard.endpoint or guard.ring: gate {guard.gate} needs a guard that gets records")


def advertised_context(config: EngineConfig, model_context: int) -> int:
    """The context that clients are promised.

    Raises:
        ConfigError: More is configured than the model can do.
    """
    if config.context is None:
        pools = min(config.prefill.pages, config.decode.pages) * config.page_tokens
        return min(pools, model_context)
    if config.context > model_context:
        raise ConfigError(f"context: {config.context} tokens, and model {config.model} takes {model_context}; lower it")
    return config.context


def with_secrets(config: EngineConfig) -> EngineConfig:
    """The configuration with fresh keys where it has none."""
    return msgspec.structs.replace(
        config,
        digest_key=config.digest_key or secrets.token_hex(32),
        admin_key=config.admin_key or secrets.token_urlsafe(32),
    )


def warnings(config: EngineConfig) -> list[str]:
    """What an operator must not overlook: faults that are switched on, nobody who may come in."""
    lines = [
        f"FAULT {fault.value} IS ON: this engine can give one tenant another tenant's data ({SEEN_IN[fault]})"
        for fault in config.faults
    ]
    pools = min(config.prefill.pages, config.decode.pages) * config.page_tokens
    if config.context is not None and config.context > pools:
        lines.append(f"context: {config.context} tokens are advertised and the smallest pool holds {pools}")
    if not config.tenants:
        lines.append("tenants: none are named, so every request gets 401")
    return lines
