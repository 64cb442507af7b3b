"""Real worker processes, with the test as their router and as the guard that gets their records."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc

from engine.config import EngineConfig, GuardConfig, PoolConfig, dump
from engine.mailbox import Mailbox
from engine.messages import (
    Abort,
    AnyMessage,
    Failed,
    Generate,
    Hello,
    Message,
    Prefill,
    Sampling,
    Stats,
    StatsRequest,
    Tokens,
    WorkerDown,
)
from guard.findings import Finding
from guard.ledger.ledger import Ledger
from guard.ledger.world import LedgerSettings
from guard.policy import Policy
from guard.receive.otlp import parse_protobuf
from guard.records import Outcome, Record, RecordError, Role

PATIENCE_S = 60.0
DECODE_PAGES = 240
PROCESS = Path(__file__).with_name("random_worker.py")
M = TypeVar("M", bound=Message)


class Guard:
    """Takes records over OTLP/gRPC and keeps them."""

    def __init__(self, address: str) -> None:
        self.records: list[Record] = []
        handler = grpc.method_handlers_generic_handler(
            "opentelemetry.proto.collector.trace.v1.TraceService",
            {"Export": grpc.unary_unary_rpc_method_handler(self._export)},
        )
        self._server = grpc.server(ThreadPoolExecutor(1))
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(address)
        self._server.start()

    def _export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        for item in parse_protobuf(data).items:
            assert not isinstance(item, RecordError), item
            self.records.append(item)
        return b""

    def stop(self) -> None:
        self._server.stop(None).wait()


class Rig:
    """Workers in a run directory of their own.

    Args:
        fields: Of the configuration.
        workers: Which to start.
        process: The program that is a worker.
    """

    def __init__(
        self, *, workers: tuple[str, ...] = ("prefill-0", "decode-0"), process: Path = PROCESS, **fields: Any
    ) -> None:
        self._process = process
        self.directory = Path(tempfile.mkdtemp(prefix="kvw"))
        self.guard = Guard(f"unix:{self.directory}/guard.sock")
        guard = fields.pop("guard", {})
        settings: dict[str, Any] = {
            "model": "tiny",
            "run_dir": str(self.directory),
            "digest_key": secrets.token_hex(32),
            "page_tokens": 8,
            "prefill": PoolConfig(pages=32, chunk_tokens=24, max_batch=4),
            "decode": PoolConfig(pages=DECODE_PAGES, max_batch=4),
            "guard": GuardConfig(endpoint=f"unix:{self.directory}/guard.sock", **guard),
            **fields,
        }
        self.config = EngineConfig(**settings)
        self._file = self.directory / "engine.yaml"
        self._file.write_bytes(dump(self.config))
        self._mailbox = Mailbox(self.directory, "router-0")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.hellos: dict[str, Hello] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, str] = {}
        self.failures: dict[str, Failed] = {}
        self.stats: dict[int, Stats] = {}
        self._replies = 0
        for name in workers:
            self.start(name)
        self.until(lambda: set(workers) <= self.hellos.keys())

    def start(self, name: str) -> None:
        role = name.partition("-")[0]
        command = [sys.executable, str(self._process), "--name", name, "--role", role, "--config", str(self._file)]
        self.processes[name] = subprocess.Popen(command, cwd=PROCESS.parent.parent)

    def kill(self, name: str) -> None:
        """Kills a worker and tells the others, as the supervisor does."""
        self.processes[name].kill()
        self.processes[name].wait()
        hello = self.hellos.pop(name)
        for other in self.hellos:
            self.send(other, WorkerDown(worker=name, epoch=hello.epoch))

    def send(self, to: str, message: Message) -> None:
        self._mailbox.send(to, message)

    def submit(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int = 8,
        tenant: str = "a",
        prefill: str = "prefill-0",
        to: tuple[Role, ...] = (Role.DECODE, Role.PREFILL),
        **sampling: Any,
    ) -> None:
        """Sends a request to both its workers, or to those named."""
        common: dict[str, Any] = {
            "request": request,
            "tenant": tenant,
            "prompt": prompt,
            "sampling": Sampling(max_tokens=max_tokens, **sampling),
        }
        decode, computing = self.hellos["decode-0"], self.hellos[prefill]
        if Role.DECODE in to:
            message = Generate(epoch=decode.epoch, prefill=prefill, prefill_epoch=computing.epoch, **common)
            self.send("decode-0", message)
        if Role.PREFILL in to:
            self.send(prefill, Prefill(epoch=computing.epoch, decode="decode-0", decode_epoch=decode.epoch, **common))

    def abort(self, request: str, outcome: Outcome = Outcome.ABORTED) -> None:
        for name, hello in self.hellos.items():
            self.send(name, Abort(request=request, epoch=hello.epoch, outcome=outcome))

    def until(self, done: Callable[[], bool]) -> None:
        """Takes messages until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "the workers did not get there"
            for name, process in self.processes.items():
                assert name not in self.hellos or process.poll() is None, f"{name} died"
            for message in self._mailbox.receive(20):
                self._take(message)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Hello():
                self.hellos[message.worker] = message
            case Tokens():
                assert message.request not in self.finish
                self.tokens[message.request] += message.tokens
                if message.finish is not None:
                    self.finish[message.request] = message.finish
            case Failed():
                self.failures[message.request] = message
            case Stats():
                self.stats[message.reply_id] = message

    def answer(self, request: str) -> list[int]:
        """Waits for the whole answer."""
        self.until(lambda: request in self.finish or request in self.failures)
        assert request not in self.failures, self.failures[request]
        return self.tokens[request]

    def failure(self, request: str) -> Failed:
        """Waits for the failure."""
        self.until(lambda: request in self.failures)
        return self.failures[request]

    def measure(self, name: str) -> Stats:
        """Asks a worker how it is."""
        self._replies += 1
        reply = self._replies
        self.send(name, StatsRequest(epoch=self.hellos[name].epoch, reply_id=reply))
        self.until(lambda: reply in self.stats)
        return self.stats[reply]

    def until_idle(self) -> None:
        """Waits until no worker has a page of a request, or a transfer, left."""

        def idle() -> bool:
            counts: Counter[str] = Counter()
            for name in self.hellos:
                counts.update(self.measure(name).gauges)
            left = ("pages_owned", "pages_deferred", "requests_running", "requests_waiting", "transfers")
            return not any(counts[gauge] for gauge in left)

        self.until(idle)

    def seen(self, kind: type[Record], request: str) -> list[Record]:
        """Records of a kind that a request has."""
        return [r for r in self.guard.records if isinstance(r, kind) and r.request == request]

    def until_seen(self, kind: type[Record], request: str) -> Record:
        """Waits for such a record."""
        self.until(lambda: bool(self.seen(kind, request)))
        return self.seen(kind, request)[0]

    def stop(self) -> list[Record]:
        """Stops the workers; returns all records."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self.processes.items():
            status = process.wait(PATIENCE_S)
            assert status == 0 or name not in self.hellos, (name, status)
        return self.guard.records

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for name in self.segments():  # of those that were killed
            Path("/dev/shm", name).unlink()
        self._mailbox.close()
        self.guard.stop()
        shutil.rmtree(self.directory)

    def segments(self) -> list[str]:
        """Pools in shared memory that belong to processes of this rig."""
        from engine.segment import segment_path

        stem = segment_path(self.directory, "x", 0).name.rpartition("-x-")[0]
        return [name for name in os.listdir("/dev/shm") if name.startswith(stem)]


def judge(records: list[Record], **policy: Any) -> list[Finding]:
    """What the guard concludes from a finished run."""
    found: dict[int, Finding] = {}
    ledger = Ledger(
        Policy(**policy),
        LedgerSettings(reorder_window_ms=None),
        on_finding=lambda finding, _new: found.__setitem__(id(finding), finding),
    )
    for record in records:
        ledger.feed(record, record.time_ns)
    ledger.finish()
    return list(found.values())


def findings(records: list[Record], **policy: Any) -> list[str]:
    """The same, a line each."""
    return [f"{f.kind} {f.request} {f.pool} {f.pages}" for f in judge(records, **policy)]
