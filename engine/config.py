"""The engine's configuration: one YAML file, validated, every field with a default."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from engine.faults import Fault


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and the remedy."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of worker."""

    workers: int = 1
    pages: int = 128
    threads: int = 1
    """Torch threads a worker."""
    max_batch: int = 8
    """Sequences that one step computes together."""
    chunk_tokens: int = 128
    """Prefill only: prompt tokens that one step computes."""


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine does with the guard beside it."""

    endpoint: str | None = None
    """Where records go as spans: ``unix:PATH`` or ``HOST:PORT`` (OTLP/gRPC)."""
    ring: str | None = None
    """The guard's ring, where records go through shared memory. With an endpoint too, each goes both ways; with
    neither, records are not emitted."""
    token: str | None = None
    """What the guard's ``listen.token`` asks for."""
    board: str | None = None
    """The verdict board. None: no verdict is looked for."""
    gate: Literal["off", "sync", "async"] = "off"
    """``sync``: first tokens and page boundaries wait until the guard has judged the records so far."""
    wait_ms: float = 250.0
    """Bound on one such wait."""
    on_timeout: Literal["open", "closed"] = "open"
    """What a wait that ran out, or a guard that is gone, means: go on, or end the request with 503."""
    queue: int = 65_536
    """Records that may wait to be sent as spans; what does not fit is dropped, counted, and is a hole in `kv.seq`."""

    @property
    def emits(self) -> bool:
        """Whether the guard gets records."""
        return self.endpoint is not None or self.ring is not None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole engine."""

    model: Literal["smollm2", "tiny"] = "smollm2"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    run_dir: str = "/tmp/kvguard-engine"
    """Sockets and shared memory names live here; made if absent, mode 0700."""
    host: str = "127.0.0.1"
    port: int = 8000
    context: int | None = None
    """The advertised context in tokens; None: what the smallest pool on the way holds, at most the model's."""
    page_tokens: int = 16
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig(pages=256)
    transport: Literal["shm", "tcp", "nixl", "mooncake"] = "shm"
    """What carries pages from worker to worker; ``nixl`` and ``mooncake`` need the extra of that name."""
    transfer_s: float = 60.0
    """How long a transfer may take before its request fails. Its pages stay until the transport confirms its end."""
    piece_pages: int = 0
    """Pages that one piece of a transfer carries; 0: the whole request in one piece."""
    lease_s: float = 30.0
    """How long prefill keeps pages for a decode that does not say where they go."""
    stop_s: float = 4.0
    """How long the engine's processes may take to stop, all together, before they are killed."""
    max_waiting: int = 256
    """Requests that may wait; more get 429."""
    prefix_cache: bool = True
    zero_on_free: bool = False
    digests: bool = True
    digest_key: str = ""
    """Hexadecimal, 32 bytes; empty: a fresh one at each start."""
    tenants: dict[str, str] = {}
    """API key → tenant. Empty: nobody gets in."""
    admin_key: str = ""
    """May abort any request and read `/get_server_info`; empty: made at start and printed nowhere."""
    faults: tuple[Fault, ...] = ()
    guard: GuardConfig = GuardConfig()
    otlp_endpoint: str | None = None
    """A second OTLP/gRPC endpoint that gets every span, records and requests, through the stock batch processor."""


def load(path: Path) -> EngineConfig:
    """Reads a YAML file.

    Raises:
        ConfigError: The file cannot be read or a field is wrong; names the field.
    """
    try:
        return msgspec.yaml.decode(path.read_bytes() or b"{}", type=EngineConfig)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error


def explain(error: msgspec.MsgspecError) -> str:
    """One line that names the field first: ``prefill.pages: Expected `int`, got `str```."""
    message, at, where = " ".join(str(error).split()).partition(" - at `$")
    return f"{where.strip('.`')}: {message}" if at else message


def dump(config: EngineConfig) -> bytes:
    """The configuration as YAML that `load` takes back."""
    return msgspec.yaml.encode(config)
