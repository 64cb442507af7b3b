"""The response to a generating request: written as tokens come, or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from engine.api.errors import KILLED, ApiError
from engine.api.output import Output
from engine.api.protocol import drain_of
from engine.api.shapes import Shape, usage
from engine.api.trace import RequestSpan
from engine.live import Live
from engine.metrics import Metrics
from engine.router import Router
from guard.records import Outcome


class Answer:
    """An ASGI application that answers one request.

    Status and headers leave with the first output and not before, so that a request that fails or is killed
    until then gets the status it deserves. Before each piece of output the verdict board is looked at.

    Args:
        live: The request, under way.
        started: `time.perf_counter` when the request had arrived.
    """

    def __init__(
        self,
        router: Router,
        live: Live,
        *,
        stream: bool,
        output: Output,
        shape: Shape,
        span: RequestSpan,
        metrics: Metrics,
        headers: dict[str, str],
        started: float,
    ) -> None:
        self._router = router
        self._live = live
        self._streams = stream
        self._output = output
        self._shape = shape
        self._span = span
        self._metrics = metrics
        self._headers = headers
        self._started = started
        self._first: float | None = None
        self._finish: str | None = None
        self._begun = False
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, and closes the request whatever comes."""
        watcher = asyncio.create_task(self._watch(receive))
        status, code = 200, None
        try:
            await (self._write_stream(send, drain_of(scope)) if self._streams else self._write_whole(send))
            self._router.close(self._live, Outcome.FINISHED)
        except ApiError as error:
            status, code = error.status, error.code
            await self._fail(error, scope, receive, send)
        finally:
            watcher.cancel()
            # Does nothing if the request is closed: this is for what nobody foresaw.
            self._router.close(self._live, Outcome.ABORTED)
            self._account(status, code)

    async def _watch(self, receive: Receive) -> None:
        """The client's leaving is the only news after its body."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if not self._live.closed:
            self._router.abort(self._live)

    async def _write_whole(self, send: Send) -> None:
        text: list[str] = []
        while self._finish is None:
            text.append(await self._next())
        self._router.judge(self._live)
        body = self._shape.whole("".join(text), self._finish, self._usage)
        headers = {**self._headers, "content-type": "application/json", "content-length": str(len(body))}
        await self._start(send, headers)
        await send({"type": "http.response.body", "body": body})

    async def _write_stream(self, send: Send, drain: Callable[[], Awaitable[None]]) -> None:
        events = self._shape.opening()
        while True:
            text = await self._next()
            if text:
                events += self._shape.text(text)
            if self._finish is not None:
                events += self._shape.closing(self._finish, self._usage)
            # First wait until the client takes bytes, then look: what is handed over after the look leaves.
            await drain()
            self._router.judge(self._live)
            if not self._begun:
                await self._start(
                    send,
                    {
                        **self._headers,
                        "content-type": "text/event-stream; charset=utf-8",
                        "cache-control": "no-cache",
                        "x-accel-buffering": "no",
                        # The end of the connection is the end of the stream, for clients too that miss an error.
                        "connection": "close",
                    },
                )
            if events or self._finish is not None:
                await send(
                    {"type": "http.response.body", "body": events, "more_body": self._finish is None},
                )
            if self._finish is not None:
                return
            events = b""

    async def _next(self) -> str:
        """Text of the next tokens; sets the finish reason with the last."""
        live, output = self._live, self._output
        message = await live.next()
        if self._first is None:
            self._first = time.perf_counter()
        text = output.push(message.tokens)
        if message.finish is not None and not output.stopped:
            text += output.finish()
            self._finish = message.finish
        if output.stopped:
            self._finish = "stop"
            self._router.enough(live)
        return text

    @property
    def _usage(self) -> dict[str, int]:
        return usage(len(self._live.order.prompt), self._output.tokens)

    async def _start(self, send: Send, headers: dict[str, str]) -> None:
        self._begun = True
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tells the client, if it is there, and ends the request."""
        killed = error.code == KILLED
        if self._begun:
            if not self._gone:
                await send({"type": "http.response.body", "body": error.event(), "more_body": False})
            self._router.close(self._live, Outcome.ABORTED)
        else:
            # Of a killed request no response is recorded: it is not what its tenant asked for that is told here.
            refused = None if killed or self._gone else error.status
            if not self._gone:
                await error.response(self._headers)(scope, receive, send)
            self._router.close(self._live, Outcome.ABORTED, refused=refused)
        if killed:
            self._metrics.kills.labels("mid_stream" if self._begun else "before_first_byte").inc()
        elif self._gone or error.status == 499:
            self._metrics.aborts.labels("disconnect" if self._gone else "request").inc()

    def _account(self, status: int, code: str | None) -> None:
        """The request's numbers, for metrics and its span."""
        output = self._output.tokens
        self._metrics.output_tokens.inc(output)
        if code is not None:
            self._metrics.errors.labels(code).inc()
        if self._first is not None:
            self._metrics.ttft.observe(self._first - self._started)
            if output > 1:
                self._metrics.tpot.observe((time.perf_counter() - self._first) / (output - 1))
        self._span.end(
            200 if self._begun else status,
            error=code,
            prompt=len(self._live.order.prompt),
            output=output,
            finish=self._finish,
        )
