"""The router: gives each request to a prefill and a decode worker and follows it to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict

import msgspec
import zmq
import zmq.asyncio
from opentelemetry.context import Context

from engine.api.errors import KILLED, ApiError
from engine.config import EngineConfig
from engine.fleet import ROUTER, SUPERVISOR, Fleet, Worker, names
from engine.live import Live, Order
from engine.messages import (
    Abort,
    AnyMessage,
    Failed,
    Generate,
    Hello,
    Prefill,
    Sampling,
    Stats,
    Tokens,
    WorkerDown,
    decode,
    encode,
    inbox,
)
from engine.resolve import run_dir
from engine.verdicts import Verdicts
from guard.records import Admit, Outcome, Pool, Record, RequestEnd, Respond, Role
from hooks.emit import Emitter

log = logging.getLogger(__name__)

REMEMBERED = 65_536
"""Ids of requests that are over and may not be used again: the guard knows a request by its id."""


class Router:
    """Dispatches requests and keeps the workers' table.

    Args:
        config: The engine's.
        context: The advertised context in tokens.
        emitter: Of the stream `router-0`.
        verdicts: The guard's board, as the router looks at it.
    """

    def __init__(self, config: EngineConfig, context: int, emitter: Emitter, verdicts: Verdicts) -> None:
        self.config = config
        self.context = context
        self.epoch = emitter.epoch or time.time_ns() // 1_000_000
        self._emitter = emitter
        self._verdicts = verdicts
        self._live: dict[str, Live] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = run_dir(config)
        addresses = {name: inbox(self._directory, name) for name, _role in names(config)}
        self.fleet = Fleet(config, addresses, self._zmq)
        self._supervisor = self._zmq.socket(zmq.PUSH)
        self._supervisor.setsockopt(zmq.LINGER, 0)
        self._reader: asyncio.Task[None] | None = None
        self.stopping = False

    # Life

    async def start(self) -> None:
        """Opens the inbox and says what the router is."""
        socket = zmq.asyncio.Context.shadow(self._zmq).socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(inbox(self._directory, ROUTER))
        self._supervisor.connect(inbox(self._directory, SUPERVISOR))
        page_tokens = self.config.page_tokens
        self._emit(Pool(pages=0, page_tokens=page_tokens, page_bytes=0, role=Role.ROUTER, context_limit=self.context))
        self._tell_supervisor(
            Hello(
                worker=ROUTER,
                epoch=self.epoch,
                role=Role.ROUTER,
                pages=0,
                page_tokens=page_tokens,
                page_bytes=0,
                address="",
            )
        )
        self._reader = asyncio.create_task(self._read(socket))

    async def stop(self) -> None:
        """Closes the inbox."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self.fleet.close()
        self._supervisor.close(0)
        self._zmq.destroy(0)

    def fail_all(self) -> None:
        """The engine stops: no request goes on, and none is taken any more."""
        self.stopping = True
        for live in list(self._live.values()):
            self._give_up(live, 503, "shutting_down", "The engine is being stopped.")

    # Requests

    @property
    def in_flight(self) -> int:
        """Requests that are not over."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests that have given no output yet."""
        return sum(not live.begun for live in self._live.values())

    def find(self, request: str) -> Live | None:
        """A request that is not over."""
        return self._live.get(request)

    def submit(self, order: Order) -> Live:
        """Starts a request.

        Raises:
            ApiError: 400 it does not fit the context, 409 its id is taken, 429 too many wait, 503 a worker is
                missing or the engine stops.
        """
        if order.request in self._live or order.request in self._over:
            # Not a record of it: on the stream this id is the other request's.
            raise ApiError(409, "duplicate_request_id", f"rid: {order.request} was used already.", param="rid")
        self._emit(
            Admit(
                request=order.request,
                tenant=order.tenant,
                tokens=len(order.prompt),
                max_tokens=order.max_tokens,
            ),
            order.context,
        )
        try:
            sampling = self._fit(order)
            self._make_room()
            prefill, decode = self._workers()
        except ApiError as refusal:
            self._end(order, Outcome.REJECTED, refusal.status)
            raise
        live = Live(order, prefill, decode)
        self._live[order.request] = live
        common = {
            "request": order.request,
            "tenant": order.tenant,
            "prompt": order.prompt,
            "sampling": sampling,
            "traceparent": order.traceparent,
        }
        generate = Generate(epoch=decode.epoch, prefill=prefill.name, prefill_epoch=prefill.epoch, **common)  # type: ignore[arg-type]
        compute = Prefill(epoch=prefill.epoch, decode=decode.name, decode_epoch=decode.epoch, **common)  # type: ignore[arg-type]
        for worker, message in ((decode, generate), (prefill, compute)):
            worker.requests.add(order.request)
            if not worker.send(message):
                self._give_up(live, 503, "worker_unavailable", f"{worker.name} takes no messages.")
                break
        return live

    def abort(self, live: Live, incident: str | None = None, *, killed: bool = False) -> None:
        """Somebody stops the request: its client sees that it was aborted, or killed by the guard."""
        if killed or incident:
            self._give_up(live, 503, KILLED, "Killed by the guard.", incident)
        else:
            self._give_up(live, 499, "request_aborted", "The request was aborted.")

    def enough(self, live: Live) -> None:
        """A stop string came: decode need not go on."""
        self._release(live)
        if not live.complete:
            live.decode.send(Abort(request=live.id, epoch=live.decode.epoch, outcome=Outcome.FINISHED))

    def judge(self, live: Live) -> None:
        """Looks at the verdict board, and at what has become of the request, before bytes leave.

        Raises:
            ApiError: The request was killed or has failed.
        """
        incident = self._verdicts.killed(live.id)
        if incident is not None:
            self.abort(live, incident, killed=True)
        live.check()

    def close(self, live: Live, outcome: Outcome, *, refused: int | None = None) -> None:
        """The client has its answer, or has gone: the request is over. Closing twice does nothing.

        Args:
            live: The request.
            outcome: `finished` or `aborted`.
            refused: The status of an answer that is an error and was sent whole.
        """
        if live.closed:
            return
        live.closed = True
        if not live.complete and outcome is not Outcome.FINISHED and live.failure is None:
            self._give_up(live, 499, "request_aborted", "The client has gone.")
        self._release(live)
        self._live.pop(live.id, None)
        self._end(live.order, outcome, refused)

    def _fit(self, order: Order) -> Sampling:
        """How the request is to be sampled, if prompt and output fit the context."""
        prompt, room = len(order.prompt), self.context - len(order.prompt)
        limit = order.max_tokens
        if room < (limit or 1):
            wants = f" and {limit} output tokens ({prompt + limit} together)" if limit is not None else ""
            raise ApiError(
                400,
                "context_length_exceeded",
                f"The prompt has {prompt} tokens{wants}; the context is {self.context} tokens, "
                "and at least one is for the output. Shorten the prompt or lower max_tokens.",
                param="max_tokens" if room >= 1 else "prompt",
            )
        return Sampling(
            max_tokens=min(room, order.default_max_tokens) if limit is None else limit,
            temperature=order.temperature,
            top_p=order.top_p,
            seed=order.seed,
        )

    def _make_room(self) -> None:
        if self.stopping:
            raise ApiError(503, "shutting_down", "The engine is being stopped.", headers={"retry-after": "5"})
        if self.waiting >= self.config.max_waiting:
            raise ApiError(
                429,
                "no_capacity",
                f"{self.waiting} requests wait already, the most that may. Try again later.",
                headers={"retry-after": "1"},
            )

    def _workers(self) -> tuple[Worker, Worker]:
        prefill, decode = (self.fleet.least_loaded(role) for role in (Role.PREFILL, Role.DECODE))
        if prefill is None or decode is None:
            missing = ", ".join(self.fleet.missing)
            raise ApiError(
                503,
                "worker_unavailable",
                f"No worker can take the request: {missing} is not up. It is being restarted.",
                headers={"retry-after": "1"},
            )
        return prefill, decode

    def _give_up(self, live: Live, status: int, code: str, reason: str, incident: str | None = None) -> None:
        """Ends the request's computing from this side: decode first, as its output is what leaves."""
        if live.failure is None:
            live.fail(Failed(request=live.id, status=status, code=code, reason=reason, incident=incident))
        self._abort_workers(live, incident)

    def _abort_workers(self, live: Live, incident: str | None = None) -> None:
        self._release(live)
        for worker in (live.decode, live.prefill):
            if self.fleet.get(worker.name, worker.epoch) is worker:
                worker.send(Abort(request=live.id, epoch=worker.epoch, incident=incident))

    @staticmethod
    def _release(live: Live) -> None:
        live.decode.requests.discard(live.id)
        live.prefill.requests.discard(live.id)

    def _end(self, order: Order, outcome: Outcome, refused: int | None) -> None:
        """The last records of a request on this stream: an error response, then the end."""
        if refused is not None:
            self._emit(Respond(request=order.request, tenant=order.tenant, status=refused, final=True), order.context)
        self._emit(RequestEnd(request=order.request, tenant=order.tenant, outcome=outcome), order.context)
        self._remember(order.request)

    def _remember(self, request: str) -> None:
        self._over[request] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _emit(self, record: Record, context: Context | None = None) -> None:
        self._emitter.emit(record, context)

    # Messages

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                data = await socket.recv()
                try:
                    self._take(decode(data))
                except msgspec.DecodeError as error:
                    log.error("a message that cannot be read was passed over: %s", error)
        finally:
            socket.close(0)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Tokens():
                self._take_tokens(message)
            case Failed():
                self._take_failure(message)
            case Stats():
                self.fleet.measure(message)
            case Hello():
                replaced = self.fleet.join(message)
                if replaced is not None:
                    self._bury(replaced)
                self._tell_supervisor(message)
            case WorkerDown(worker=name, epoch=epoch):
                worker = self.fleet.get(name, epoch)
                if worker is not None:
                    self.fleet.leave(worker)
                    self._bury(worker)
            case _:
                log.error("a %s is no message for the router", type(message).__name__)

    def _take_tokens(self, message: Tokens) -> None:
        live = self._live.get(message.request)
        if live is None:
            self._disown(message.request)
        elif live.failure is None and not live.complete:
            live.prefill.requests.discard(live.id)
            live.put(message)
            if live.complete:
                self._release(live)

    def _disown(self, request: str) -> None:
        """Output of a request that an earlier life of this router took: nobody waits for it."""
        if request in self._over:
            return
        self._remember(request)
        for worker in self.fleet:
            worker.send(Abort(request=request, epoch=worker.epoch))

    def _take_failure(self, message: Failed) -> None:
        live = self._live.get(message.request)
        if live is not None and live.failure is None and not live.complete:
            live.fail(message)
            # Whichever worker it came from: the other one may still hold pages for it.
            self._abort_workers(live, message.incident)

    def _bury(self, worker: Worker) -> None:
        """A worker died: what was on it cannot go on."""
        log.warning("%s (epoch %d) died with %d requests", worker.name, worker.epoch, len(worker.requests))
        for request in list(worker.requests):
            live = self._live.get(request)
            if live is not None:
                self._give_up(live, 503, "worker_failed", f"{worker.name} died while it had the request.")

    def _tell_supervisor(self, hello: Hello) -> None:
        with contextlib.suppress(zmq.Again):
            self._supervisor.send(encode(hello), zmq.NOBLOCK)
