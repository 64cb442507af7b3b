"""The tracer provider of a process that emits records: what is sampled, what is cut, who gets which span."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from guard.records import KINDS
from hooks._processor import GuardSpanProcessor

COLLECTOR_SHUTDOWN_S = 1.0
"""How long a shutdown tries a second endpoint that does not answer."""


def make_provider(
    stream: str, endpoint: str | None, queue: int, service_name: str, otlp_endpoint: str | None, token: str | None
) -> tuple[TracerProvider, GuardSpanProcessor | None]:
    """The provider, and its way to the guard where there is one; see `hooks.emit.configure`."""
    guard = GuardSpanProcessor(endpoint, queue_size=queue, token=token) if endpoint is not None else None
    collector: SpanProcessor | None = None
    if otlp_endpoint is not None:
        # Of the addresses that the exporter takes, it does not see by itself that a socket needs no TLS.
        insecure = True if otlp_endpoint.startswith("unix:") else None
        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure)
        collector = CollectorSpanProcessor(exporter)
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name, "service.instance.id": stream}),
        # The environment's limits are meant for what people look at; a record cut short is a wrong record.
        span_limits=SpanLimits(
            max_attributes=SpanLimits.UNSET,
            max_span_attributes=SpanLimits.UNSET,
            max_attribute_length=SpanLimits.UNSET,
            max_span_attribute_length=SpanLimits.UNSET,
        ),
    )
    # The provider's own sampler is the environment's (OTEL_TRACES_SAMPLER): it decides for all other spans.
    provider.sampler = RecordSampler(provider.sampler)
    # The guard's comes first, so that the other one's work does not delay a record.
    for processor in (guard, collector):
        if processor is not None:
            provider.add_span_processor(processor)
    return provider, guard


class CollectorSpanProcessor(BatchSpanProcessor):
    """The stock batch processor with a shutdown that an engine can wait for.

    The stock one tries a collector that is away for half a minute. The thread that cuts this short is made
    beforehand because none can be made any more while the interpreter exits.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        self._closing = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._cut, name="kvguard-emit-cut", daemon=True).start()

    def shutdown(self) -> None:
        """Exports what waits, for about `COLLECTOR_SHUTDOWN_S` at most."""
        self._closing.set()
        super().shutdown()  # type: ignore[no-untyped-call]
        self._closed.set()

    def _cut(self) -> None:
        self._closing.wait()
        if not self._closed.wait(COLLECTOR_SHUTDOWN_S):
            self.span_exporter.shutdown()


class RecordSampler(Sampler):
    """Records every record, and leaves all other spans to another sampler.

    A record in a trace that is not sampled is recorded without the sampled flag: the guard's processor gets
    it, and a stock exporter, which goes by the flag, keeps to what was decided for the trace.
    """

    def __init__(self, others: Sampler) -> None:
        self._others = others

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decides for a span that is about to start."""
        if name not in KINDS:
            return self._others.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        parent = get_current_span(parent_context).get_span_context()
        sampled = not parent.is_valid or parent.trace_flags.sampled
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes, parent.trace_state)

    def get_description(self) -> str:
        """The sampler's name, as the SDK shows it."""
        return f"RecordSampler{{{self._others.get_description()}}}"
