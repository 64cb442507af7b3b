"""A real guardd, its configuration in a directory of the test's, and the means to talk to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import yaml
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from guard.act.board import BoardReader
from guard.incidents.store import Store

CASES = Path(__file__).parent / "data" / "cases"
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def case(name: str) -> list[bytes]:
    """The case's messages in protobuf, one span each."""
    lines = (CASES / f"{name}.jsonl").read_bytes().splitlines()
    return [
        json_format.Parse(line, ExportTraceServiceRequest(), ignore_unknown_fields=True).SerializeToString()
        for line in lines
    ]


def until(predicate: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Waits for what another process does; its last word is returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
    return value


class Guardd:
    """One guardd process, started in `directory`."""

    def __init__(self, directory: Path, *, ready: bool = True, **config: Any) -> None:
        self.board_path = directory / "run" / "board"
        self.incidents_path = directory / "incidents.db"
        self.socket = f"unix:{directory}/run/otlp.sock"
        values: dict[str, Any] = {
            "mode": "enforce",
            "listen": {"otlp_grpc": self.socket, "otlp_http": "127.0.0.1:0", "http": "127.0.0.1:0"},
            "ring": {"path": f"{directory}/run/ring", "rows": 4096},
            "board": {"path": str(self.board_path)},
            "incidents": {"path": str(self.incidents_path)},
        }
        for key, value in config.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        path = directory / "guard.yaml"
        path.write_text(yaml.safe_dump(values))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "guard.daemon", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self.otlp_http = ""
        self._errors: list[str] = []
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()
        if ready:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line.startswith("guardd ready"), self.stderr()
            fields = dict(field.split("=", 1) for field in line.split()[2:])
            self.url, self.socket = fields["http"], fields["otlp_grpc"]
            self.otlp_http = fields["otlp_http"]

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    def stderr(self) -> str:
        """All that it said, once it is gone."""
        self.process.wait(30)
        self._reading.join(30)
        return "".join(self._errors)

    def send(self, *messages: bytes, metadata: Any = ()) -> list[ExportTraceServiceResponse]:
        """Exports each message in a call of its own."""
        with grpc.insecure_channel(self.socket) as channel:
            call = channel.unary_unary(EXPORT, response_deserializer=ExportTraceServiceResponse.FromString)
            return [call(m, timeout=30, metadata=metadata, wait_for_ready=True) for m in messages]

    def board(self) -> BoardReader:
        """A reader of its board."""
        return BoardReader.open(self.board_path)

    def incidents(self) -> Store:
        """Its incidents."""
        return Store.open(self.incidents_path, read_only=True)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """A page of its HTTP listener."""
        return httpx.get(self.url + path, headers=headers, timeout=30, trust_env=False)

    def metrics(self) -> dict[str, float]:
        """Sample with its labels → value."""
        lines = [line for line in self.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stops it and gives its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


class FakeEngine:
    """Takes abort calls and answers with the next of `statuses`, the last one again and again."""

    def __init__(self, *statuses: int, port: int = 0) -> None:
        self.calls: list[tuple[str | None, bytes]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                engine.calls.append((self.headers["authorization"], body))
                self.send_response(statuses[min(len(engine.calls), len(statuses)) - 1])
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/abort_request"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def guards(tmp_path: Path) -> Iterator[Callable[..., Guardd]]:
    """The body of a fixture: starts guards in `tmp_path`, and ends what is left of them."""
    started: list[Guardd] = []

    def start(**config: Any) -> Guardd:
        guard = Guardd(tmp_path, **config)
        started.append(guard)
        return guard

    yield start
    for guard in started:
        guard.stop(signal.SIGKILL)
        guard.stderr()
        assert guard.process.stdout is not None
        guard.process.stdout.close()
