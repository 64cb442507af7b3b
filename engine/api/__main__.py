"""The router's process: ``python -m engine.api --config FILE [--listen-fd N]``, started by `engine.supervisor`."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
import uvloop
from prometheus_client import disable_created_metrics

import engine.model
from engine.api.app import Front
from engine.api.protocol import Protocol
from engine.config import ConfigError, EngineConfig, load
from engine.fleet import ROUTER
from engine.metrics import Metrics
from engine.model.weights import WeightsError
from engine.resolve import advertised_context, check
from engine.router import Router
from engine.verdicts import Verdicts
from hooks.emit import EmitError, configure

KEEP_ALIVE_S = 30
GRACE_S = 2


class _Server(uvicorn.Server):
    """uvicorn's server; told to stop, it has the router end all requests, so that connections end too."""

    router: Router

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.router.fail_all()
        super().handle_exit(sig, frame)


def serve(config: EngineConfig, listener: socket.socket | None) -> None:
    """Runs the router until it is told to stop.

    Raises:
        ConfigError: The configuration does not fit the model, or the model is not there.
    """
    try:
        # Nothing is computed here: only the tokenizer and the model's shape are wanted.
        shape, tokenizer = engine.model.describe(config.model, config.dtype)
    except WeightsError as error:
        raise ConfigError(f"model: {error}") from error
    context = advertised_context(config, shape.context)
    guard = config.guard
    try:
        emitter, provider = configure(
            ROUTER,
            endpoint=guard.endpoint,
            ring=guard.ring,
            token=guard.token,
            queue=guard.queue,
            otlp_endpoint=config.otlp_endpoint,
        )
    except EmitError as error:
        raise ConfigError(f"guard.endpoint, guard.ring or otlp_endpoint: {error}") from error
    verdicts = Verdicts(guard.board)
    router = Router(config, context, emitter, verdicts)
    metrics = Metrics()
    metrics.watch(router, emitter)
    tracer = provider.get_tracer("kvguard.engine") if provider is not None else None
    front = Front(router, (shape, tokenizer), metrics, tracer)
    server = _Server(
        uvicorn.Config(
            front.app(),
            host=config.host,
            port=config.port,
            http=Protocol,
            ws="none",
            lifespan="on",
            access_log=False,
            server_header=False,
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    server.router = router
    # uvicorn sends a signal on to itself once it has stopped; by then it has nothing left to say.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        uvloop.run(server.serve(sockets=[listener] if listener is not None else None))
    finally:
        verdicts.close()
        if provider is not None:
            provider.shutdown()


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m engine.api", description="The engine's router process.")
    parser.add_argument("--config", type=Path, required=True, help="a resolved configuration, YAML")
    parser.add_argument("--listen-fd", type=int, help="a listening socket that was handed down")
    options = parser.parse_args(arguments)
    # Each counter's time of birth would double what is scraped, and a restart is seen without it.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    logging.basicConfig(format=f"{ROUTER}: %(message)s", level=logging.WARNING)
    try:
        config = load(options.config)
        check(config)
        listener = socket.socket(fileno=options.listen_fd) if options.listen_fd is not None else None
        serve(config, listener)
    except (ConfigError, msgspec.ValidationError) as error:
        print(f"{ROUTER}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
