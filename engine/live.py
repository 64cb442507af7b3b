"""A request as the router and the one who answers its client see it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from opentelemetry.context import Context

from engine.api.errors import KILLED, ApiError
from engine.fleet import Worker
from engine.messages import Failed, Tokens


@dataclass(frozen=True, kw_only=True)
class Order:
    """A request that is fit to be computed."""

    request: str
    tenant: str
    prompt: list[int]
    max_tokens: int | None
    """None: as many as the context has room for, at most `default_max_tokens`."""
    default_max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    context: Context
    """The trace that the records hang under."""
    traceparent: str | None


class Live:
    """A request that workers are busy with, as the one who answers the client sees it."""

    def __init__(self, order: Order, prefill: Worker, decode: Worker) -> None:
        self.order = order
        self.prefill = prefill
        self.decode = decode
        self.begun = False
        """Whether output has come."""
        self.complete = False
        """Whether all output has come."""
        self.failure: Failed | None = None
        self.closed = False
        self._tokens: deque[Tokens] = deque()
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        """The request's id."""
        return self.order.request

    def put(self, message: Tokens) -> None:
        """Takes output from decode."""
        self.begun = True
        self.complete = message.finish is not None
        self._tokens.append(message)
        self._news.set()

    def fail(self, failure: Failed) -> None:
        """Ends the output; the first reason stays."""
        if self.failure is None:
            self.failure = failure
        self._news.set()

    async def next(self) -> Tokens:
        """The next tokens.

        Raises:
            ApiError: The request failed. Output that came before and was not taken yet is not given any more:
                after a kill not one byte may leave.
        """
        while self.failure is None and not self._tokens:
            self._news.clear()
            await self._news.wait()
        self.check()
        return self._tokens.popleft()

    def check(self) -> None:
        """Raises the request's failure, if it has failed.

        Raises:
            ApiError: It has.
        """
        failure = self.failure
        if failure is None:
            return
        if failure.code == KILLED:
            raise ApiError.killed(failure.incident)
        raise ApiError(failure.status, failure.code, failure.reason, incident=failure.incident)
