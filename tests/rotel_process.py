"""rotel, an independent OTLP collector in Rust, as a process between a sender and a receiver."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Rotel(NamedTuple):
    """Where it takes traces."""

    grpc: str
    http: str
    process: subprocess.Popen[bytes]


def agent() -> str:
    """The program in rotel's wheel."""
    spec = importlib.util.find_spec("rotel")
    assert spec is not None, "rotel is in the extra named dev"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "rotel-agent")


@contextmanager
def rotel(directory: Path, *options: str, prefix: tuple[str, ...] = ()) -> Iterator[Rotel]:
    """Runs it.

    Args:
        directory: For its files.
        options: Of ``rotel start``, the exporter's.
        prefix: A command to run it under.
    """
    grpc, http = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROTEL_", "OTEL_"))}
    with open(directory / "rotel.log", "wb") as log:
        process = subprocess.Popen(
            [
                *prefix, agent(), "start", "--otlp-grpc-endpoint", grpc, "--otlp-http-endpoint", http,
                "--otlp-grpc-max-recv-msg-size-mib", "64", "--pid-file", str(directory / "rotel.pid"),
                "--log-file", str(directory / "rotel.out"), *options,
            ],
            stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    try:
        for address in (grpc, http):
            _wait_for(address, process, directory / "rotel.log")
        yield Rotel(grpc, http, process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "rotel does not listen"
            time.sleep(0.02)
