"""``guardd``: the sidecar's process. Puts the parts together, serves until SIGTERM, and says why if it cannot.

Exit status: 0 stopped in order, 2 the configuration cannot be used, 3 an address, the board or the ring is taken or
cannot be had, 70 the ledger failed of an error of its own (start it again: it says what it missed, and which
pages it cannot vouch for).
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from guard import __version__
from guard.act.board import BoardError
from guard.config import Config, ConfigError, load
from guard.health import Handler, HealthServer, Page
from guard.incidents.recorder import Recorder
from guard.incidents.store import StoreError
from guard.log import log
from guard.native._core import BoardWriter
from guard.receive.address import Address, BindError
from guard.receive.receivers import Receivers
from guard.runtime import Runtime

if TYPE_CHECKING:
    from guard.receive.forward import Forwarder

EXIT_CONFIG, EXIT_BIND, EXIT_FAILED = 2, 3, 70
_EXITS = (
    "Exit status: 0 stopped in order, 2 the configuration cannot be used, 3 an address, the board or the ring is taken "
    "or cannot be had, 70 the ledger failed: start it again."
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXITS)
@click.option(
    "--config",
    "path",
    type=click.Path(),
    envvar="KVGUARD_CONFIG",
    help="YAML file; see guard/config.py for its fields.",
)
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Over the file, e.g. mode=enforce.")
@click.version_option(__version__)
def main(path: str | None, settings: tuple[str, ...]) -> None:
    """Run the guard beside an engine until SIGTERM or SIGINT.

    It takes records over OTLP (gRPC and HTTP) and through shared memory, judges them, puts verdicts on the board and
    keeps incidents.
    """
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        failed = serve(load(path, settings=settings), stopping)
    except (ConfigError, StoreError) as error:
        _die(EXIT_CONFIG, error)
    except (BindError, BoardError) as error:
        _die(EXIT_BIND, error)
    if failed:
        sys.exit(EXIT_FAILED)


def serve(config: Config, stopping: threading.Event) -> bool:
    """Runs the guard until ``stopping`` is set.

    Args:
        config: The configuration.
        stopping: Set to stop; set by the guard itself when its ledger fails.

    Returns:
        Whether the ledger failed.

    Raises:
        ConfigError: A secret's file cannot be read.
        StoreError: The incident store cannot be had.
        BoardError: The board cannot be had.
        BindError: An address, the ring or the board is taken.
    """
    metrics_token = config.listen.metrics_token_text()
    with ExitStack() as stack:
        stack.enter_context(_only_guard_of(config.board.path))
        recorder = Recorder(
            config.incidents.path,
            keep=config.incidents.keep,
            on_failure=lambda reason: log("error", "incidents cannot be written; trying again", error=reason),
        )
        ready = threading.Event()
        health = HealthServer(Address.parse(config.listen.http), token=metrics_token)
        stack.callback(health.stop)
        board = BoardWriter.create(config.board.path, requests=config.board.requests, streams=config.board.streams)
        runtime = Runtime(config, board, recorder, on_failure=stopping.set)
        receivers = Receivers(config.listen, runtime.inbox, runtime.counters.receivers)
        health.pages.update(_pages(runtime, receivers.forwarder, ready))
        runtime.start()
        stack.callback(runtime.stop)
        addresses = receivers.start()
        stack.callback(receivers.stop)
        health.start()
        ready.set()
        print(
            f"guardd ready mode={config.mode} {''.join(f'{n}={a} ' for n, a in addresses.items())}"
            f"http=http://{health.address} board={config.board.path} incidents={config.incidents.path}",
            flush=True,
        )
        stopping.wait()
        ready.clear()
    return runtime.failure is not None


@contextmanager
def _only_guard_of(board: str) -> Iterator[None]:
    """Holds the board's lock file, for as long as this process lives at most."""
    lock = f"{board}.lock"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(board)), mode=0o755, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BoardError(f"board {board}: {lock} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BoardError(f"board {board}: another guardd has it; stop that one or give board.path") from None
        yield
    finally:
        os.close(descriptor)


def _pages(runtime: Runtime, forwarder: Forwarder | None, ready: threading.Event) -> dict[str, Handler]:
    # Here alone the guard knows of its exporters, and only once it runs.
    from exporters.prometheus import Exposition

    exposition = Exposition(runtime, forwarder)

    def livez(_headers: Mapping[str, str]) -> Page:
        return Page(200, b"ok\n") if runtime.alive else Page(503, b"the ledger does not answer\n")

    def readyz(_headers: Mapping[str, str]) -> Page:
        if not ready.is_set():
            return Page(503, b"starting or stopping\n")
        if runtime.board.saturated:
            return Page(503, b"the board is full: raise board.requests\n")
        return livez(_headers)

    def metrics(headers: Mapping[str, str]) -> Page:
        body, content_type = exposition.render(headers.get("accept", ""))
        return Page(200, body, content_type)

    return {"/livez": livez, "/readyz": readyz, "/metrics": metrics}


def _die(status: int, error: Exception) -> NoReturn:
    print(f"guardd: {error}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
