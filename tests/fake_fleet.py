"""A router that serves real HTTP, and fake workers whose every word a test says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvicorn
import uvloop
import zmq
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.api.app import Front
from engine.api.protocol import Protocol
from engine.config import EngineConfig, GuardConfig, PoolConfig
from engine.messages import Abort, Failed, Generate, Hello, Message, Prefill, Tokens, WorkerDown, decode, encode, inbox
from engine.metrics import Metrics
from engine.model.tokenizer import ByteTokenizer
from engine.model.weights import tiny_config
from engine.router import Router
from engine.verdicts import Verdicts
from guard.records import KINDS, Admit, Outcome, Record, RequestEnd, Respond, Role, from_attributes
from hooks.emit import Emitter

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-admin"
TENANTS = {ALICE: "alice-corp", BOB: "bob-corp"}
PATIENCE_S = 30.0

M = TypeVar("M", bound=Message)


class FakeFleet:
    """The front of an engine, and both its workers' mailboxes in the test's hands."""

    def __init__(self, run_dir: Path, **fields: Any) -> None:
        fields = {
            "model": "tiny",
            "run_dir": str(run_dir),
            "tenants": TENANTS,
            "admin_key": ADMIN,
            "prefill": PoolConfig(pages=16),
            "decode": PoolConfig(pages=16),
            **fields,
        }
        self.config = EngineConfig(**fields)
        self.model = tiny_config()
        self.tokenizer = ByteTokenizer()
        self.run_dir = run_dir
        self.exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inboxes = {}
        for name in ("prefill-0", "decode-0", "supervisor"):
            socket = self._inboxes[name] = self._zmq.socket(zmq.PULL)
            socket.bind(inbox(run_dir, name))
        self._router = self._zmq.socket(zmq.PUSH)
        self._router.connect(inbox(run_dir, "router-0"))
        self._pool = ThreadPoolExecutor(16)
        self.epochs = {"prefill-0": 100, "decode-0": 200}

    # The server

    def start(self) -> None:
        started = threading.Event()

        async def serve() -> None:
            emitter = Emitter("router-0", tracer_provider=self._provider)
            router = Router(
                self.config,
                self.config.context or 16 * self.config.page_tokens,
                emitter,
                Verdicts(self.config.guard.board),
            )
            metrics = Metrics()
            metrics.watch(router, emitter)
            front = Front(router, (self.model, self.tokenizer), metrics, self._provider.get_tracer("test"))
            config = uvicorn.Config(front.app(), port=0, http=Protocol, ws="none", lifespan="on", log_level="warning")
            self._server = server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve())
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            self.port = server.servers[0].sockets[0].getsockname()[1]
            self.router = router
            self._loop = asyncio.get_running_loop()
            started.set()
            await task

        self._thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE_S)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {ALICE}"})

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.router.fail_all)
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._pool.shutdown()
        self.http.close()
        self._zmq.destroy(0)
        assert not self._thread.is_alive()

    # What the workers say

    def hello(self, *workers: str) -> None:
        for name in workers or ("prefill-0", "decode-0"):
            role = Role(name.split("-")[0])
            self.say(
                Hello(
                    worker=name,
                    epoch=self.epochs[name],
                    role=role,
                    pages=16,
                    page_tokens=16,
                    page_bytes=4096,
                    address="fake",
                )
            )

    def wait_for_health(self, status: int = 200) -> None:
        """Until the router has read what was said."""
        deadline = time.monotonic() + PATIENCE_S
        while self.http.get("/health").status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def say(self, message: Message) -> None:
        self._router.send(encode(message))

    def say_text(self, request: str, text: str, finish: str | None = None) -> None:
        self.say(Tokens(request=request, tokens=list(text.encode()), finish=finish))

    def say_failed(self, request: str, status: int, code: str, **fields: Any) -> None:
        self.say(Failed(request=request, status=status, code=code, reason=f"because of {code}", **fields))

    def die(self, worker: str) -> None:
        self.say(WorkerDown(worker=worker, epoch=self.epochs[worker]))

    def hear(self, worker: str, kind: type[M]) -> M:
        """The next message for a worker, which must be of that kind."""
        assert self._inboxes[worker].poll(PATIENCE_S * 1000), f"{worker} got no {kind.__name__}"
        message = decode(self._inboxes[worker].recv())
        assert isinstance(message, kind), message
        return message

    def silent(self, worker: str) -> bool:
        """Whether there is no message for a worker."""
        return not self._inboxes[worker].poll(0)

    # What clients do

    def post(self, path: str, body: Any, key: str = ALICE, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.http.post(path, content=content, headers=headers)

    def later(self, body: dict[str, Any], path: str = "/v1/completions", key: str = ALICE, **headers: str) -> Any:
        """Posts in a thread; gives a future."""
        return self._pool.submit(self.post, path, {"model": "tiny", **body}, key, **headers)

    # What was recorded

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def records(self, request: str | None = None) -> list[Record]:
        records = [
            from_attributes(span.name, span.start_time or 0, dict(span.attributes or {}))
            for span in self.spans
            if span.name in KINDS
        ]
        return [record for record in records if request is None or record.request == request]


@contextlib.contextmanager
def fake_fleet(*, workers: bool = True, **fields: Any) -> Iterator[FakeFleet]:
    """A front with fake workers that have said hello."""
    run_dir = Path(tempfile.mkdtemp(prefix="kvg-"))
    fleet = FakeFleet(run_dir, **fields)
    try:
        fleet.start()
        try:
            if workers:
                fleet.hello()
                fleet.wait_for_health()
                for _ in range(3):
                    fleet.hear("supervisor", Hello)
            yield fleet
        finally:
            fleet.stop()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def answer(fleet: FakeFleet, text: str = "hello", finish: str = "stop") -> tuple[Generate, Prefill]:
    """Plays both workers for one request that was sent."""
    generate, prefill = fleet.hear("decode-0", Generate), fleet.hear("prefill-0", Prefill)
    for letter in text[:-1]:
        fleet.say_text(generate.request, letter)
    fleet.say_text(generate.request, text[-1:], finish)
    return generate, prefill


def error_of(response: Any, status: int, code: str) -> dict[str, Any]:
    """The error object of a response that has to be that error."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    assert {"message", "type", "param"} <= error.keys()
    return error


def eventually(condition: Any) -> None:
    """Waits for what the server's thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def dispatched(fleet: FakeFleet) -> str:
    """The id of the request that both workers got."""
    request = fleet.hear("decode-0", Generate).request
    assert fleet.hear("prefill-0", Prefill).request == request
    return request


def both_hear_abort(fleet: FakeFleet, request: str, incident: str | None = None) -> None:
    """Decode first, then prefill; the order between them is the router's."""
    for worker in ("decode-0", "prefill-0"):
        abort = fleet.hear(worker, Abort)
        assert (abort.request, abort.epoch) == (request, fleet.epochs[worker])
        assert (abort.outcome, abort.incident) == (Outcome.ABORTED, incident)


def outcomes(fleet: FakeFleet, request: str) -> list[Any]:
    """The request's records, shortened; waits for the last one."""
    eventually(lambda: any(isinstance(record, RequestEnd) for record in fleet.records(request)))
    return [
        record.outcome if isinstance(record, RequestEnd) else record.status if isinstance(record, Respond) else "admit"
        for record in fleet.records(request)
        if isinstance(record, Admit | Respond | RequestEnd)
    ]


class Stream:
    """A streaming client of which every line is read by hand."""

    def __init__(self, fleet: FakeFleet, **body: Any) -> None:
        self._client = httpx.Client(timeout=PATIENCE_S)
        body = {"model": "tiny", "prompt": "x", "stream": True, **body}
        request = self._client.build_request(
            "POST", fleet.url + "/v1/completions", json=body, headers={"authorization": f"Bearer {ALICE}"}
        )
        self._future = fleet._pool.submit(self._client.send, request, stream=True)

    @property
    def response(self) -> httpx.Response:
        """Waits for the status."""
        return self._future.result(PATIENCE_S)

    @functools.cached_property
    def lines(self) -> Iterator[str]:
        return self.response.iter_lines()

    @property
    def has_status(self) -> bool:
        return self._future.done()

    def text(self, letters: int) -> str:
        """Reads until so much text came."""
        text = ""
        while len(text) < letters:
            line = next(self.lines)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
        return text

    def rest(self) -> str:
        return "\n".join(self.lines)

    def leave(self) -> None:
        self.response.close()
        self._client.close()


def guarded(board: Path) -> GuardConfig:
    """A guard configuration that only has a board."""
    return GuardConfig(board=str(board))
