"""A request's span: GenAI semantic conventions, and never a prompt or an output."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from hooks.emit import context_from_traceparent, traceparent_of


class RequestSpan:
    """The server span of one generating request; the request's records hang under it.

    Args:
        tracer: Where spans go; a no-op tracer hands the client's own trace on.
        operation: ``chat`` or ``text_completion``.
        traceparent: The W3C header that came with the request.
        attributes: What is known at the start, by `gen_ai` name; None is left out.
    """

    def __init__(
        self, tracer: Tracer, operation: str, model: str, traceparent: str | None, attributes: dict[str, Any]
    ) -> None:
        known = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvguard",
            "gen_ai.request.model": model,
            **{name: value for name, value in attributes.items() if value is not None},
        }
        self._span = tracer.start_span(
            f"{operation} {model}",
            context=context_from_traceparent(traceparent),
            kind=SpanKind.SERVER,
            attributes=known,
        )
        self.context: Context = trace.set_span_in_context(self._span)
        self.traceparent: str | None = traceparent_of(self.context)

    def end(self, status: int, *, error: str | None, prompt: int | None, output: int, finish: str | None) -> None:
        """Ends the span.

        Args:
            status: What the client got, or would have got.
            error: The error's code.
            prompt: Tokens in.
            output: Tokens out.
            finish: ``stop`` or ``length``.
        """
        span = self._span
        span.set_attribute("http.response.status_code", status)
        if prompt is not None:
            span.set_attribute("gen_ai.usage.input_tokens", prompt)
            span.set_attribute("gen_ai.usage.output_tokens", output)
        if finish is not None:
            span.set_attribute("gen_ai.response.finish_reasons", (finish,))
        if error is not None:
            span.set_attribute("error.type", error)
            if status >= 500:  # The convention: a client's mistake does not make a server span an error.
                span.set_status(Status(StatusCode.ERROR))
        span.end()
