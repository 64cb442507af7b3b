"""Engine and guard as processes of their own, on loopback and Unix sockets, in a directory of their own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from guard.demo.client import TENANTS

START_S = 120.0
"""How long the engine may take to load its model."""


class StandError(RuntimeError):
    """A process did not come up; the message ends with what it said last."""


class Stand:
    """One engine, with or without the guard.

    Args:
        folder: Where its files go; made if absent.
        engine: Fields of the engine's configuration.
        faults: Bugs to switch on.
        guarded: Whether a guard stands beside it, in ``enforce``, with the engine's gate in ``sync``.
        guard: Fields of the guard's configuration.
    """

    def __init__(
        self,
        folder: Path,
        engine: dict[str, Any],
        faults: tuple[str, ...] = (),
        *,
        guarded: bool = False,
        guard: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.admin_key = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._guarded = guarded
        self._processes: list[subprocess.Popen[str]] = []
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.incidents = folder / "incidents.db"
        sock, board = f"unix:{folder}/otlp.sock", str(folder / "board")
        # YAML takes JSON as it is.
        self._engine_file = self._write(
            "engine.yaml",
            {
                "run_dir": str(folder / "run"),
                "port": int(self.url.rpartition(":")[2]),
                "tenants": {tenant.key: tenant.name for tenant in TENANTS},
                "admin_key": self.admin_key,
                "faults": list(faults),
                **({"guard": _engine_side(sock, board)} if guarded else {}),
                **engine,
            },
        )
        self._guard_file = self._write(
            "guard.yaml",
            {
                "mode": "enforce",
                "listen": {"otlp_grpc": sock, "otlp_http": None, "http": f"127.0.0.1:{_free_port()}"},
                "ring": {"enabled": False},
                "board": {"path": board},
                "incidents": {"path": str(self.incidents)},
                "engine": {"abort_url": f"{self.url}/abort_request", "admin_key": self.admin_key},
                **(guard or {}),
            },
        )

    def __enter__(self) -> Stand:
        try:
            if self._guarded:
                self._start("guardd", [sys.executable, "-m", "guard.daemon", "--config", str(self._guard_file)])
            self._start("engine", [sys.executable, "-m", "engine", "--config", str(self._engine_file)])
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops what runs, the engine first."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()

    def _write(self, name: str, content: dict[str, Any]) -> Path:
        path = self.folder / name
        with suppress(FileNotFoundError):
            path.unlink()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file, indent=1)
        return path

    def _start(self, name: str, command: list[str]) -> None:
        log = self.folder / f"{name}.log"
        with log.open("w") as err:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        started = time.monotonic()
        # Either prints one line when it is ready, and nothing before; a process that dies closes the pipe.
        line = process.stdout.readline()
        if "ready" not in line or time.monotonic() - started > START_S:
            process.wait(timeout=15)
            said = log.read_text().strip().splitlines()[-3:]
            raise StandError(f"{name} did not start (exit {process.poll()}): {' | '.join(said) or 'it said nothing'}")


def _engine_side(sock: str, board: str) -> dict[str, Any]:
    return {"endpoint": sock, "board": board, "gate": "sync", "wait_ms": 2000, "on_timeout": "closed"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
