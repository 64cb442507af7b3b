"""A whole engine, started as its users start it, for everybody's integration tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from engine.config import EngineConfig, dump, load

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-admin"
TENANTS = {ALICE: "alice-corp", BOB: "bob-corp"}
START_S = 120.0
STOP_S = 15.0
"""What an engine gets to stop on a machine that is busy; less than any wait that hangs."""


class RunningEngine:
    """An engine that runs.

    Attributes:
        url: Where it listens.
        run_dir: Its run directory.
        process: The supervisor.
        stderr: What it said so far, a line each.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, environment: dict[str, str]) -> None:
        self.run_dir = run_dir
        self.stderr: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_err)]
        for reader in self._readers:
            reader.start()
        if not self._ready.wait(START_S) or not self.url:
            self.stop()
            raise RuntimeError("the engine did not get ready:\n" + "\n".join(self.stderr))

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready "):
                self.url = line.split()[1]
                self._ready.set()
        self._ready.set()

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self.stderr.extend(line.rstrip("\n") for line in self.process.stderr)

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration, secrets included."""
        return load(self.run_dir / "engine.yaml")

    def http(self, key: str = ALICE, **options: Any) -> httpx.Client:
        """A client with a tenant's key."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def openai(self, key: str = ALICE, **options: Any) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def complete(self, prompt: str | list[int], key: str = ALICE, **fields: Any) -> httpx.Response:
        """One greedy completion."""
        body = {"model": self.config.model, "prompt": prompt, "temperature": 0, **fields}
        with self.http(key) as client:
            return client.post("/v1/completions", json=body)

    def pids(self) -> dict[str, int]:
        """Process id by name of the router and the workers."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if parent == self.process.pid:
                    name = words[words.index(b"--name") + 1].decode() if b"--name" in words else "router-0"
                    found[name] = int(entry.name)
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stops it; gives its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(2 * STOP_S)
        except subprocess.TimeoutExpired:
            # The children go with it.
            self.process.kill()
            self.process.wait()
            raise
        for reader in self._readers:
            reader.join(STOP_S)
        return status


@contextlib.contextmanager
def running_engine(
    *options: str,
    command: Sequence[str] = ("-m", "engine"),
    environment: dict[str, str] | None = None,
    **fields: Any,
) -> Iterator[RunningEngine]:
    """Starts an engine with the tiny model on a free port, and stops it.

    Args:
        options: Further words of the command line, for example ``--fault early-free``.
        command: What the interpreter runs.
        environment: Further environment variables.
        fields: Fields of the configuration; the run directory is a fresh one unless it is given.
    """
    # Not pytest's tmp_path: the path of a socket has to be short.
    fresh = Path(tempfile.mkdtemp(prefix="kvg-"))
    try:
        fields = {
            "model": "tiny",
            "port": 0,
            "run_dir": str(fresh / "run"),
            "tenants": TENANTS,
            "admin_key": ADMIN,
            "stop_s": STOP_S,
            **fields,
        }
        config = fresh / "config.yaml"
        config.write_bytes(dump(EngineConfig(**fields)))
        arguments = [sys.executable, *command, "--config", str(config), *options]
        engine = RunningEngine(arguments, Path(fields["run_dir"]), environment or {})
        try:
            yield engine
        finally:
            engine.stop()
            # pytest shows it beside a failure.
            print("\n".join(engine.stderr), file=sys.stderr)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
