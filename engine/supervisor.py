"""Starts the engine's processes, keeps them running, and stops them in order."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import msgspec

from engine.child import Child
from engine.config import ConfigError, EngineConfig, dump
from engine.fleet import ROUTER, SUPERVISOR, names
from engine.mailbox import Mailbox
from engine.messages import Hello, WorkerDown
from engine.resolve import run_dir, warnings, with_secrets
from guard.records import Role

ROUTERS_SHARE = 0.6
"""Of `stop_s`: the workers are told to stop after this at the latest."""
GIVE_UP = 3
"""Deaths of one process before the engine was ever ready; then it will not become so by trying."""
BACKLOG = 2048

WORKER = ("-m", "engine.worker")
"""A worker, to the interpreter."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_IN_USE = 3


class InUseError(RuntimeError):
    """The port or the run directory belongs to another process; the message says which, and the remedy."""


class Supervisor:
    """The engine's first process.

    Args:
        config: As checked by `engine.resolve`.
        worker: What the interpreter runs as a worker.

    Raises:
        ConfigError: The run directory cannot be used.
        InUseError: The port or the run directory is taken.
    """

    def __init__(self, config: EngineConfig, worker: Sequence[str] = WORKER) -> None:
        self._directory = _make_directory(run_dir(config))
        self._lock = _lock(self._directory)
        self._listener = _listen(config.host, config.port)
        self.port: int = self._listener.getsockname()[1]
        config = msgspec.structs.replace(with_secrets(config), port=self.port, run_dir=str(self._directory))
        self.config = config
        path = self._directory / "engine.yaml"
        _write_secret(path, dump(config))
        self._mailbox = Mailbox(self._directory, SUPERVISOR)
        fd = self._listener.fileno()
        # The router first, so that it is the first to be started and to be stopped.
        self._children = {
            ROUTER: Child(ROUTER, ["-m", "engine.api", "--config", str(path), "--listen-fd", str(fd)], [fd])
        }
        for name, role in names(config):
            command = [*worker, "--name", name, "--role", role.value, "--config", str(path)]
            self._children[name] = Child(name, command)
        self._hellos: dict[str, Hello] = {}
        self._ready = False
        self._stop = False

    def run(self) -> int:
        """Runs until it is told to stop, or cannot go on. Returns the exit status."""
        for line in warnings(self.config):
            _say(f"WARNING: {line}")
        self._catch_signals()
        try:
            while not self._stop:
                status = self._round()
                if status is not None:
                    return status
            return 0
        finally:
            self._shut_down()

    def _catch_signals(self) -> None:
        # A signal wakes the mailbox, so the loop hears at once of an order to stop and of a child's death.
        signal.set_wakeup_fd(self._mailbox.wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop = True

    def _round(self) -> int | None:
        """One round of the loop; an exit status if the engine cannot go on."""
        now = time.monotonic()
        for child in self._children.values():
            if child.next_start is not None and child.next_start <= now:
                child.start()
        planned = [child.next_start for child in self._children.values() if child.next_start is not None]
        timeout = min((at - now for at in planned), default=60.0)
        for message in self._mailbox.receive(max(0.0, timeout) * 1000):
            if isinstance(message, Hello):
                self._greet(message)
        for child in self._children.values():
            status = child.died()
            if status is not None and not self._stop:
                verdict = self._bury(child, status)
                if verdict is not None:
                    return verdict
        return None

    def _greet(self, hello: Hello) -> None:
        """A process is up, as the router tells: whoever knew its predecessor learns what lives now."""
        known = self._hellos.get(hello.worker)
        if known is not None and known.epoch == hello.epoch:
            return
        self._hellos[hello.worker] = hello
        if hello.role is Role.ROUTER:
            # A new router knows nobody yet.
            for other in self._hellos.values():
                if other.role is not Role.ROUTER:
                    self._mailbox.send(ROUTER, other)
        if not self._ready and self._hellos.keys() == self._children.keys():
            self._ready = True
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            print(f"ready http://{host}:{self.port}", flush=True)

    def _bury(self, child: Child, status: int) -> int | None:
        """A process died: the others are told, and a successor is planned."""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        hello = self._hellos.pop(child.name, None)
        if hello is not None:
            down = WorkerDown(worker=child.name, epoch=hello.epoch)
            for name in self._children:
                if name != child.name:
                    self._mailbox.send(name, down)
        if status == EXIT_CONFIG:
            _say(f"{child.name} cannot run with this configuration; see its message above")
            return EXIT_CONFIG
        if not self._ready and child.restarts + 1 >= GIVE_UP:
            _say(f"{child.name} died ({how}) {GIVE_UP} times before the engine was ready; giving up")
            return EXIT_FAILED
        pause = child.plan_restart()
        _say(f"{child.name} died ({how}); restart {child.restarts} in {pause:.1f} s")
        return None

    def _shut_down(self) -> None:
        """Stops everything: no new requests, then no workers, then nothing."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        began, limit = time.monotonic(), self.config.stop_s
        self._listener.close()
        router, *workers = self._children.values()
        for child in workers:
            child.next_start = None
        router.signal(signal.SIGTERM)
        _wait([router], began + ROUTERS_SHARE * limit)
        for child in workers:
            child.signal(signal.SIGTERM)
        _wait([router, *workers], began + limit)
        for child in (router, *workers):
            if child.running:
                _say(f"{child.name} did not stop in time and is killed")
                child.signal(signal.SIGKILL)
        _wait([router, *workers], time.monotonic() + 1.0)
        signal.set_wakeup_fd(-1)
        self._mailbox.close()
        self._lock.close()


def _wait(children: list[Child], deadline: float) -> None:
    """Waits until the processes have ended, or the deadline."""
    for child in children:
        if child.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            child.died()


def _say(text: str) -> None:
    # In one write, so that lines of other processes come before or after it.
    sys.stderr.write(f"engine: {text}\n")


def _make_directory(path: Path) -> Path:
    """The run directory, nobody's but ours: it holds keys, and sockets that anyone who reaches them may use."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise ConfigError(f"run_dir: {path} is not a directory of this user; choose another")
    path.chmod(0o700)
    return path


def _lock(directory: Path) -> IO[bytes]:
    """The lock of the run directory, held for as long as the file is open."""
    file = (directory / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InUseError(f"run_dir: another engine runs in {directory}; choose another, or stop that one") from error
    return file


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket. It is the supervisor's, so that connections wait while a router restarts."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host: {host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InUseError(f"port: {port} on {host} is in use; choose another, or 0 for any free one") from error
        raise ConfigError(f"host, port: {host}:{port} cannot be listened on: {error.strerror}") from error
    return listener


def _write_secret(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)
