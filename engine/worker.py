"""``python -m engine.worker``: one prefill or decode worker, as the supervisor starts it."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch

import engine.model
from engine.config import ConfigError, EngineConfig, load
from engine.decode import DecodeStage
from engine.digest import PageDigester
from engine.faults import Fault
from engine.fleet import ROUTER
from engine.host import Host, Stage
from engine.mailbox import Mailbox
from engine.messages import AnyMessage, Hello, Stats, StatsRequest, WorkerDown
from engine.model.weights import WeightsError
from engine.pool import PagePool
from engine.prefill import PrefillStage
from engine.resolve import advertised_context, check, run_dir
from engine.segment import Segment, SegmentError, remove_stale, segment_path
from engine.transport.link import MissingError, listen
from engine.transport.link import load as load_transport
from guard.records import Pool, Read, Record, Role, TransferEnd, Write
from hooks.emit import EmitError, configure

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

EXIT_CONFIG = 2
_STATS_S = 1.0
_PR_SET_PDEATHSIG = 1
_LOST = (Read, Write, TransferEnd)


class Worker:
    """The loop of one worker: takes messages, does a step, and waits when there is nothing to do.

    Args:
        host: The worker's means.
        stage: What it does.
        address: Where its pool is reached.
    """

    def __init__(self, host: Host, stage: Stage, address: str) -> None:
        self._host = host
        self._stage = stage
        self._address = address
        self._stop = False
        self._next_stats = 0.0

    def stop(self) -> None:
        """Ends `run` after the present step; may be called from a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Runs until `stop`."""
        host = self._host
        host.mailbox.send(
            ROUTER,
            Hello(
                worker=host.name,
                epoch=host.epoch,
                role=host.role,
                pages=host.pool.pages,
                page_tokens=host.pool.page_tokens,
                page_bytes=host.pool.segment.page_bytes,
                address=self._address,
            ),
        )
        patience_ms = 0.0
        while not self._stop:
            for message in host.mailbox.receive(patience_ms):
                self._take(message)
            busy = self._stage.step()
            patience_ms = 0.0 if busy else self._stage.patience_ms()
            now = time.monotonic()
            if now >= self._next_stats:
                self._next_stats = now + _STATS_S
                self._send_stats(0)

    def _take(self, message: AnyMessage) -> None:
        host = self._host
        if isinstance(message, WorkerDown):
            host.dead[message.worker] = max(message.epoch, host.dead.get(message.worker, -1))
            self._stage.handle(message)
        elif getattr(message, "epoch", host.epoch) != host.epoch:
            host.counters["stale_messages"] += 1
        elif isinstance(message, StatsRequest):
            self._send_stats(message.reply_id)
        else:
            self._stage.handle(message)

    def _send_stats(self, reply_id: int) -> None:
        host, pool = self._host, self._host.pool
        gauges = {
            "pages_free": pool.free_pages,
            "pages_owned": pool.owned_pages,
            "pages_cached": pool.cached_pages,
            "pages_deferred": pool.deferred_pages,
            **self._stage.gauges(),
        }
        counters = {
            **host.counters,
            **host.emitter.counts,
            "messages_unreadable": host.mailbox.unreadable,
            "messages_undelivered": host.mailbox.undelivered,
            **self._stage.counters(),
        }
        host.mailbox.send(
            ROUTER,
            Stats(worker=host.name, epoch=host.epoch, reply_id=reply_id, gauges=gauges, counters=counters),
        )


def _losing() -> Callable[[Record], bool]:
    """Fault lost-telemetry: every seventh page record after the first request goes missing."""
    first: list[str | None] = []
    seen = 0

    def drop(record: Record) -> bool:
        nonlocal seen
        if not isinstance(record, _LOST):
            return False
        first[:] = first or [record.request]
        seen += record.request != first[0]
        return record.request != first[0] and seen % 7 == 0

    return drop


def run(name: str, role: Role, config: EngineConfig) -> None:
    """Builds the worker and runs it until SIGTERM or SIGINT.

    Raises:
        ConfigError: The configuration cannot be used here.
    """
    if not config.digest_key:
        raise ConfigError("digest_key: workers need the one that the supervisor made; start `python -m engine`")
    own = config.prefill if role is Role.PREFILL else config.decode
    key = bytes.fromhex(config.digest_key)
    directory = run_dir(config)
    guard = config.guard
    try:
        model = engine.model.load(config.model, config.dtype, own.threads)
    except WeightsError as error:
        raise ConfigError(f"model: {error}") from error
    try:
        load_transport(config.transport)
    except MissingError as error:
        raise ConfigError(str(error)) from error
    context_limit = advertised_context(config, model.config.context)
    drop = _losing() if role is Role.DECODE and Fault.LOST_TELEMETRY in config.faults else None
    try:
        emitter, provider = configure(
            name,
            endpoint=guard.endpoint,
            ring=guard.ring,
            token=guard.token,
            queue=guard.queue,
            otlp_endpoint=config.otlp_endpoint,
            drop=drop,
        )
    except EmitError as error:
        raise ConfigError(f"guard.endpoint, guard.ring or otlp_endpoint: {error}") from error
    shape = model.config.page_shape(config.page_tokens)
    dtype: torch.dtype = getattr(torch, config.dtype)
    remove_stale(directory, name)
    path = segment_path(directory, name, emitter.epoch)
    try:
        segment = Segment.create(path, own.pages, torch.Size(shape).numel() * dtype.itemsize)
    except SegmentError as error:
        raise ConfigError(f"{role.value}.pages: {error}") from error
    try:
        checked = Fault.DOUBLE_FREE not in config.faults
        mailbox = Mailbox(directory, name)
        host = Host(
            name=name,
            role=role,
            epoch=emitter.epoch,
            config=config,
            model=model,
            pool=PagePool(segment, shape, dtype, key, checked=checked),
            digester=PageDigester(key),
            emitter=emitter,
            mailbox=mailbox,
            tracer=provider.get_tracer("kvguard.engine") if provider and config.otlp_endpoint else None,
        )
        emitter.emit(
            Pool(
                pages=own.pages,
                page_tokens=config.page_tokens,
                page_bytes=segment.page_bytes,
                role=role,
                context_limit=context_limit,
            )
        )
        _serve(host)
    finally:
        segment.unlink()
        _shut_down(provider)


def _serve(host: Host) -> None:
    stage: Stage
    if host.role is Role.PREFILL:
        stage, address = PrefillStage(host), ""
    else:
        receiver = listen(host.config.transport, host.pool.segment, host.digester, host.mailbox.wake)
        stage, address = DecodeStage(host, receiver), receiver.address
    worker = Worker(host, stage, address)
    # A signal also writes to the mailbox's pipe, so that a worker that waits for messages hears it.
    signal.set_wakeup_fd(host.mailbox.wake_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    try:
        worker.run()
    finally:
        stage.close()
        signal.set_wakeup_fd(-1)
        host.mailbox.close()


def _shut_down(provider: TracerProvider | None) -> None:
    if provider is not None:
        provider.shutdown()


def _die_with_parent() -> None:
    """Whoever started this worker may be killed without a chance to stop it."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker", description="One worker of the engine.")
    parser.add_argument("--name", required=True, help="for example prefill-0: names its inbox and its stream")
    parser.add_argument("--role", required=True, type=Role, choices=[Role.PREFILL, Role.DECODE])
    parser.add_argument("--config", type=Path, required=True, help="a resolved configuration, YAML")
    options = parser.parse_args(arguments)
    logging.basicConfig(format=f"{options.name}: %(message)s", level=logging.WARNING)
    _die_with_parent()
    try:
        config = load(options.config)
        check(config)
        run(options.name, options.role, config)
    except (ConfigError, msgspec.ValidationError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process without the destructors of libraries: one in NIXL's wheel crashes (libnl-route, 1.5.1)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
