"""The routes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.trace import NoOpTracer, Tracer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.answer import Answer
from engine.api.body import read_body
from engine.api.errors import ApiError, is_incident
from engine.api.info import server_info
from engine.api.keys import KeyRing
from engine.api.output import Output
from engine.api.schema import (
    DEFAULT_MAX_TOKENS,
    AbortAsk,
    ChatAsk,
    CompletionAsk,
    check_tokens,
    invalid,
    parse,
)
from engine.api.shapes import Shape
from engine.api.trace import RequestSpan
from engine.live import Live, Order
from engine.metrics import CONTENT_TYPE, Metrics
from engine.model.config import ModelConfig
from engine.model.tokenizer import ChatError, Tokenizer
from engine.router import Router

INLINE_CHARACTERS = 16_384
"""Texts up to here are tokenized in the event loop; longer ones in a thread, so that others need not wait."""

GONE = 499
"""What is counted for a client that left before its answer."""


class Front:
    """What the routes share.

    Args:
        router: Computes requests.
        model: The model's shape and its tokenizer.
        tracer: Where request spans go; None: nowhere, and the client's trace is handed on.
    """

    def __init__(
        self,
        router: Router,
        model: tuple[ModelConfig, Tokenizer],
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.router = router
        self.model, self.tokenizer = model
        self.metrics = metrics
        self.keys = KeyRing(router.config.tenants, router.config.admin_key)
        self.tracer = tracer or NoOpTracer()
        self.created = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application; its lifespan is the router's."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.one_model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/abort_request", self.abort_request, methods=["POST"]),
            Route("/health", self.health),
            Route("/get_server_info", self.server_info),
            Route("/metrics", self.show_metrics),
        ]
        paths = frozenset(route.path for route in routes)
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _broken},
        )
        return _Counted(app, self.metrics, paths)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        await self.router.start()
        try:
            yield
        finally:
            await self.router.stop()

    # Generation

    async def completions(self, request: Request) -> ASGIApp:
        """``POST /v1/completions``."""
        return await self._generate(request, CompletionAsk)

    async def chat(self, request: Request) -> ASGIApp:
        """``POST /v1/chat/completions``."""
        return await self._generate(request, ChatAsk)

    async def _generate(self, request: Request, kind: type[ChatAsk | CompletionAsk]) -> ASGIApp:
        prefix = "chatcmpl" if kind is ChatAsk else "cmpl"
        headers = {"x-request-id": f"{prefix}-{secrets.token_hex(12)}"}
        try:
            tenant = self.keys.tenant(request)
            ask = parse(await read_body(request), kind)
            if ask.rid is not None:
                headers["x-request-id"] = ask.rid
            return await self._start(request, ask, tenant, headers)
        except ApiError as error:
            self.metrics.errors.labels(error.code).inc()
            return error.response(headers)
        except ClientDisconnect:
            return Response(status_code=GONE)

    async def _start(
        self, request: Request, ask: ChatAsk | CompletionAsk, tenant: str, headers: dict[str, str]
    ) -> ASGIApp:
        started = time.perf_counter()
        self._check_model(ask.model)
        chat = isinstance(ask, ChatAsk)
        rid = headers["x-request-id"]
        prompt = await self._tokenize(ask)
        span = RequestSpan(
            self.tracer,
            "chat" if chat else "text_completion",
            ask.model,
            request.headers.get("traceparent"),
            {
                "gen_ai.request.max_tokens": ask.limit,
                "gen_ai.request.temperature": ask.temperature,
                "gen_ai.request.top_p": ask.top_p,
                "gen_ai.request.seed": ask.seed,
                "gen_ai.response.id": rid,
                "gen_ai.response.model": ask.model,
            },
        )
        if span.traceparent is not None:
            headers["traceparent"] = span.traceparent
        try:
            live = self._submit(ask, rid, tenant, prompt, span)
        except ApiError as error:
            span.end(error.status, error=error.code, prompt=len(prompt), output=0, finish=None)
            raise
        self.metrics.prompt_tokens.inc(len(prompt))
        return Answer(
            self.router,
            live,
            stream=bool(ask.stream),
            output=Output(self.tokenizer.stream(), ask.stops, self.model.eos_ids),
            shape=Shape(rid, ask.model, chat=chat, wants_usage=ask.wants_usage),
            span=span,
            metrics=self.metrics,
            headers=headers,
            started=started,
        )

    def _submit(
        self, ask: ChatAsk | CompletionAsk, rid: str, tenant: str, prompt: list[int], span: RequestSpan
    ) -> Live:
        return self.router.submit(
            Order(
                request=rid,
                tenant=tenant,
                prompt=prompt,
                max_tokens=ask.limit,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                temperature=1.0 if ask.temperature is None else ask.temperature,
                top_p=1.0 if ask.top_p is None else ask.top_p,
                seed=ask.seed,
                context=span.context,
                traceparent=span.traceparent,
            )
        )

    async def _tokenize(self, ask: ChatAsk | CompletionAsk) -> list[int]:
        if isinstance(ask, ChatAsk):
            messages = [message.plain() for message in ask.messages]
            size = sum(len(message["content"]) for message in messages)
            try:
                if size <= INLINE_CHARACTERS:
                    return self.tokenizer.chat(messages)
                return await asyncio.to_thread(self.tokenizer.chat, messages)
            except ChatError as error:
                raise invalid("messages", f"{error}.") from None
        prompt = ask.single()
        if isinstance(prompt, list):
            check_tokens(prompt, self.model.vocab)
        elif len(prompt) <= INLINE_CHARACTERS:
            prompt = self.tokenizer.encode(prompt)
        else:
            prompt = await asyncio.to_thread(self.tokenizer.encode, prompt)
        if not prompt:
            raise invalid("prompt", "It is empty; at least one token is needed.")
        return prompt

    def _check_model(self, name: str) -> None:
        if name != self.model.name:
            message = f"There is no model of that name; this engine serves {self.model.name}."
            raise ApiError(404, "model_not_found", message, param="model")

    # What operators ask

    async def abort_request(self, request: Request) -> Response:
        """``POST /abort_request``: ends a request by its exact id."""
        caller = self.keys.caller(request)
        ask = parse(await read_body(request), AbortAsk)
        if ask.incident is not None:
            if not caller.is_admin:
                raise ApiError(403, "admin_key_required", "Only the admin key may name an incident.", param="incident")
            if not is_incident(ask.incident):
                raise invalid("incident", "1 to 24 characters of A-Z a-z 0-9 . _ : - are needed.")
        live = self.router.find(ask.rid)
        if live is not None:
            if not caller.is_admin and caller.tenant != live.order.tenant:
                raise ApiError(403, "not_your_request", "The request is another tenant's.", param="rid")
            self.router.abort(live, ask.incident)
        return JSONResponse({"aborted": live is not None})

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        self.keys.caller(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``."""
        self.keys.caller(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvguard",
            "max_model_len": self.router.context,
        }

    async def health(self, _request: Request) -> Response:
        """``GET /health``: 200 when every worker lives."""
        missing = self.router.fleet.missing
        if self.router.stopping:
            return JSONResponse({"status": "stopping", "missing": missing}, 503)
        if missing:
            return JSONResponse({"status": "unavailable", "missing": missing}, 503)
        return JSONResponse({"status": "ok", "missing": []})

    async def server_info(self, request: Request) -> Response:
        """``GET /get_server_info``: sizes and settings, no secrets; any known key."""
        self.keys.caller(request)
        return JSONResponse(server_info(self.router, self.model))

    async def show_metrics(self, _request: Request) -> Response:
        """``GET /metrics``."""
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})


class _Counted:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            path = scope["path"]
            route = path if path in self._paths else "/v1/models/" if path.startswith("/v1/models/") else "other"
            self._metrics.requests.labels(route, str(status)).inc()


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, code, f"{error.detail}.", headers=error.headers).response()


async def _broken(_request: Request, _error: Exception) -> Response:
    # The server's log has the traceback, which holds no values.
    return ApiError(500, "internal_error", "The engine's router has a fault; its log says more.").response()
