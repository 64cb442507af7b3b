"""The reference engine and the guard side by side, as processes, with the tiny model: for tests of both together."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from engine_fixtures import ADMIN, ALICE, BOB, TENANTS, RunningEngine, running_engine
from google.protobuf import json_format
from guard_process import Guardd, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from record_sink import RecordSink

from engine.config import GuardConfig
from guard.act.board import BoardReader
from guard.incidents.store import Incident, Store

CAROL, DAVE = "key-of-carol", "key-of-dave"
KEYS = (ALICE, BOB, CAROL, DAVE)
STREAMS = ("router-0", "prefill-0", "decode-0")
WAIT_MS = 20_000.0
"""For gates that are not meant to give up, however slow the machine is."""
COMPLETIONS = "/v1/completions"


class TraceSink(RecordSink):
    """A collector: keeps every message as it came."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        super().__init__()

    def _export(self, request: bytes, context: Any) -> bytes:
        with self._lock:
            self._messages.append(request)
        return super()._export(request, context)

    @property
    def url(self) -> str:
        return f"http://{self.endpoint}"

    def messages(self) -> list[ExportTraceServiceRequest]:
        with self._lock:
            return [ExportTraceServiceRequest.FromString(data) for data in self._messages]

    def spans(self) -> list[tuple[str, Span]]:
        """Every span, with the instance that it comes from."""
        found = []
        for resource in (resource for message in self.messages() for resource in message.resource_spans):
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            for scope in resource.scope_spans:
                found += [(names["service.instance.id"], span) for span in scope.spans]
        return found

    def write(self, path: Path) -> None:
        """All of it as the Collector's file exporter writes it: OTLP/JSON, a message a line."""
        with path.open("w") as file:
            for message in self.messages():
                body = json_format.MessageToDict(message)
                for resource in body["resourceSpans"]:
                    for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                        _hex_ids(span)
                file.write(json.dumps(body) + "\n")


def _hex_ids(span: dict[str, Any]) -> None:
    """OTLP/JSON has ids in hexadecimal, unlike protobuf's own JSON."""
    for name in ("traceId", "spanId", "parentSpanId"):
        if name in span:
            span[name] = base64.b64decode(span[name]).hex()


class Guarded:
    """An engine, and the guard beside it while there is one.

    Attributes:
        engine: The engine.
        sink: Its second OTLP endpoint.
    """

    def __init__(self, engine: RunningEngine, directory: Path, guard: dict[str, Any], sink: TraceSink | None) -> None:
        self.engine = engine
        self._sink = sink
        self._directory = directory
        self._config = {
            **guard,
            "engine": {"abort_url": f"{engine.url}/abort_request", "admin_key": ADMIN},
        }
        self._guard: Guardd | None = None

    @property
    def guard(self) -> Guardd:
        assert self._guard is not None
        return self._guard

    @property
    def sink(self) -> TraceSink:
        assert self._sink is not None
        return self._sink

    @property
    def incidents_path(self) -> Path:
        return self.guard.incidents_path

    def start_guard(self) -> None:
        """Starts a guard, or a successor to one that is gone, and waits until it follows the engine's streams."""
        self._guard = Guardd(self._directory, **self._config)
        epochs, board = self.epochs(), self.board()
        until(lambda: all(board.watermark(stream, epoch) >= 0 for stream, epoch in epochs.items()))
        board.close()

    def stop_guard(self, number: int = signal.SIGTERM) -> int:
        """Stops the guard and gives its exit status."""
        status = self.guard.stop(number)
        said = self.guard.stderr()
        # pytest shows it beside a failure.
        print(said, file=sys.stderr)
        assert "Traceback" not in said
        return status

    def close(self) -> None:
        """Ends the guard, if there is one."""
        if self._guard is not None and self._guard.process.returncode is None:
            self.stop_guard(signal.SIGKILL)
        if self._guard is not None and self._guard.process.stdout is not None:
            self._guard.process.stdout.close()

    def board(self) -> BoardReader:
        return self.guard.board()

    def epochs(self) -> dict[str, int]:
        """Epoch by stream, as of now."""
        with self.engine.http(ADMIN) as client:
            info = client.get("/get_server_info").json()
        found = {worker["name"]: worker["epoch"] for worker in info["workers"] if worker["live"]}
        return {**found, info["name"]: info["epoch"]}

    def until_judged(self) -> None:
        """Waits until the guard has judged every record that the second endpoint got."""
        last: dict[str, tuple[int, int]] = {}
        for record in self.sink.records():
            place = (record.epoch, record.seq)
            last[record.stream] = max(place, last.get(record.stream, place))
        board = self.board()
        until(lambda: all(board.watermark(stream, epoch) >= seq for stream, (epoch, seq) in last.items()))
        board.close()

    def incidents(self, **which: Any) -> list[Incident]:
        """What the guard has written down."""
        with contextlib.closing(Store.open(self.incidents_path, read_only=True)) as store:
            return store.list(1000, **which)

    def incident(self, request: str, kind: str | None = None) -> Incident:
        """The request's incident with its records, once it is written, with the finding that is waited for."""

        def find() -> Incident | None:
            with contextlib.closing(Store.open(self.incidents_path, read_only=True)) as store:
                for incident in store.list(1000, kind=kind):
                    if incident.request == request:
                        return store.get(incident.id)
            return None

        found = until(find)
        assert isinstance(found, Incident)
        return found

    def findings(self) -> dict[tuple[str, str | None, str | None], dict[str, Any]]:
        """What was found so far, each once."""
        found = [finding for incident in self.incidents() for finding in incident.findings]
        return {(finding["kind"], finding["request"], finding["pool"]): finding for finding in found}

    def kinds(self) -> set[str]:
        return {kind for kind, _request, _pool in self.findings()}

    # Asking the engine

    def client(self, key: str = ALICE) -> httpx.Client:
        return self.engine.http(key)

    def complete(self, prompt: str | list[int], key: str = ALICE, **fields: Any) -> httpx.Response:
        return self.engine.complete(prompt, key, **fields)

    @contextlib.contextmanager
    def stream(self, prompt: str | list[int], key: str = ALICE, **fields: Any) -> Iterator[httpx.Response]:
        """A streamed greedy completion."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "stream": True, **fields}
        with self.client(key) as client, client.stream("POST", COMPLETIONS, json=body) as response:
            yield response

    def metrics(self) -> dict[str, float]:
        """The engine's: sample with its labels → value. What workers count is up to a second old."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def counted(self, name: str, worker: str = "decode-0") -> float:
        """What a worker has counted by now; asks for a token to know that the count is a new one."""
        before = self.metrics().get(counter("tokens"), 0.0)
        assert self.complete("count", max_tokens=1).status_code == 200
        until(lambda: self.metrics().get(counter("tokens"), 0.0) > before)
        return self.metrics().get(counter(name, worker), 0.0)


def counter(name: str, worker: str = "decode-0") -> str:
    """The sample that shows what a worker counts."""
    return f'kvguard_engine_worker_{name}_total{{worker="{worker}"}}'


@contextlib.contextmanager
def guarded_engine(
    *options: str,
    mode: str = "enforce",
    gate: str = "sync",
    on_timeout: str = "closed",
    wait_ms: float = WAIT_MS,
    guard: dict[str, Any] | None = None,
    start_guard: bool = True,
    collect: bool = False,
    carrier: str = "otlp",
    **fields: Any,
) -> Iterator[Guarded]:
    """Starts an engine, and a guard beside it, and stops both.

    The engine goes first: the guard has to know its port, and the engine keeps its records for the guard until then.

    Args:
        options: Further words of the engine's command line.
        mode: The guard's.
        gate: The engine's.
        on_timeout: The engine's.
        wait_ms: The engine's.
        guard: Further fields of the guard's configuration.
        start_guard: Whether there is a guard from the start.
        collect: Whether there is a second OTLP endpoint.
        carrier: What takes the records to the guard: ``otlp``, ``ring`` or ``both``.
        fields: Of the engine's configuration.
    """
    with contextlib.ExitStack() as stack:
        # Not pytest's tmp_path: the path of a socket has to be short.
        directory = Path(tempfile.mkdtemp(prefix="kvg-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        sink = stack.enter_context(TraceSink()) if collect else None
        # The guard outlives the engine, which has the last records for it.
        pairs = stack.enter_context(contextlib.ExitStack())
        engine = stack.enter_context(
            running_engine(
                *options,
                # The stock processor waits five seconds for more and keeps only 2048.
                environment={"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_BSP_MAX_QUEUE_SIZE": "65536"},
                tenants={**TENANTS, CAROL: "carol-corp", DAVE: "dave-corp"},
                guard=GuardConfig(
                    endpoint=None if carrier == "ring" else f"unix:{directory}/run/otlp.sock",
                    ring=None if carrier == "otlp" else f"{directory}/run/ring",
                    board=f"{directory}/run/board",
                    gate=gate,  # type: ignore[arg-type]
                    wait_ms=wait_ms,
                    on_timeout=on_timeout,  # type: ignore[arg-type]
                ),
                otlp_endpoint=sink and sink.url,
                **fields,
            )
        )
        pair = Guarded(engine, directory, {"mode": mode, **(guard or {})}, sink)
        pairs.callback(pair.close)
        if start_guard:
            pair.start_guard()
        yield pair


def guardctl(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line, as its users run it."""
    command = [sys.executable, "-c", "from guard.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
