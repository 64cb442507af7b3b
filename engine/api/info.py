"""What `/get_server_info` tells: sizes and settings, and no secret."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from engine.fleet import ROUTER, names
from engine.model.config import ModelConfig
from engine.router import Router
from guard.records import Role


def version() -> str:
    """The distribution's version."""
    return importlib.metadata.version("kvguard")


def server_info(router: Router, model: ModelConfig) -> dict[str, Any]:
    """The engine as a JSON object."""
    config, guard = router.config, router.config.guard
    workers: list[dict[str, Any]] = []
    live = {worker.name: worker for worker in router.fleet}
    for name, role in names(config):
        pool = config.prefill if role is Role.PREFILL else config.decode
        entry: dict[str, Any] = {
            "name": name,
            "role": role.value,
            "live": name in live,
            "pages": pool.pages,
            "page_tokens": config.page_tokens,
            "tokens": pool.pages * config.page_tokens,
            "max_batch": pool.max_batch,
        }
        if name in live:
            worker = live[name]
            entry |= {
                "epoch": worker.epoch,
                "pages": worker.hello.pages,
                "page_tokens": worker.hello.page_tokens,
                "page_bytes": worker.hello.page_bytes,
                "tokens": worker.capacity,
                "requests": len(worker.requests),
                "transfers": int(worker.gauges.get("transfers", 0)),
            }
        workers.append(entry)
    return {
        "name": ROUTER,
        "role": Role.ROUTER.value,
        "version": version(),
        "epoch": router.epoch,
        "model": model.name,
        "context": router.context,
        "model_context": model.context,
        "page_tokens": config.page_tokens,
        "dtype": config.dtype,
        "transport": config.transport,
        "piece_pages": config.piece_pages,
        "lease_s": config.lease_s,
        "prefix_cache": config.prefix_cache,
        "zero_on_free": config.zero_on_free,
        "digests": config.digests,
        "max_waiting": config.max_waiting,
        "gate": {"mode": guard.gate, "wait_ms": guard.wait_ms, "on_timeout": guard.on_timeout},
        "records": guard.emits,
        "faults": [fault.value for fault in config.faults],
        "workers": workers,
    }
