"""Records out of an engine: give each record its place in the stream and send it to the guard.

An engine calls `configure` once a process (after any fork) and `Emitter.emit` for every operation on pages.
A record goes as a span (OTLP), through the ring in shared memory, or both ways. Nothing of OpenTelemetry or gRPC
is imported before `configure` is given somewhere to send to, the ring needs none of it, and an emitter that is off
returns at its first line.

What an engine may rely on: `emit` never raises and never waits for the guard, the network or a full queue; a
record that cannot be kept is counted and leaves a hole in ``kv.seq``, which the guard reports as a
``stream-gap``. What leaves is in the order of ``kv.seq``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from guard.records import Record, to_attributes

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from guard.native._core import RingWriter
    from hooks._processor import GuardSpanProcessor

__all__ = [
    "NULL",
    "EmitError",
    "Emitter",
    "GuardSpanProcessor",
    "configure",
    "context_from_traceparent",
    "traceparent_of",
]

SCOPE = "kv"
"""The instrumentation scope of every record."""

_LOST = "could not be emitted and is a hole in it; more of them are only counted"

_log = logging.getLogger(__name__)


class EmitError(ValueError):
    """Records could not reach the guard as configured; the message names the setting and the remedy."""


class Emitter:
    """One ordered stream of records. Thread-safe.

    Several emitters may share a tracer provider, each with a stream of its own. An emitter does not survive a
    fork: two processes that go on with the same sequence would look like lost telemetry, so in the child it
    is off, and the child configures a stream of its own.

    Attributes:
        stream: The stream's id, unique in the fleet.
        epoch: Changes whenever the emitter restarts.
        failed: Records that took a place in the stream and could not be made into a span or a row.
        sender: What sends the records to the guard as spans, for its counts; None where nothing does.
        ring: The lane of the ring that the records go to; None where there is none.
    """

    stream: str
    epoch: int
    failed: int
    sender: GuardSpanProcessor | None
    ring: RingWriter | None

    def __init__(
        self,
        stream: str,
        *,
        tracer_provider: TracerProvider | None = None,
        epoch: int | None = None,
        drop: Callable[[Record], bool] | None = None,
        sender: GuardSpanProcessor | None = None,
        ring: RingWriter | None = None,
    ) -> None:
        """Starts a stream at ``kv.seq`` 0.

        Args:
            stream: The stream's id.
            tracer_provider: Makes the spans; with neither it nor a ring the emitter is off. It has to record every
                span named like a record whatever the trace's sampling says, as the one made by `configure` does.
            epoch: The ring's, or the start time in milliseconds, when None.
            drop: Loses telemetry on purpose (the fault ``lost-telemetry``): a record for which it returns
                True takes its place in the stream and is never sent.
            sender: The provider's processor for the guard; kept for its counts.
            ring: A lane of its own, of the same stream and epoch, which nothing was written to yet.
        """
        self.stream = stream
        if epoch is None:
            epoch = new_epoch() if ring is None else ring.epoch
        self.epoch = epoch
        self.failed = 0
        self.sender = sender
        self.ring = ring
        self._drop = drop
        self._next = 0
        # Re-entrant, because a signal handler may emit while its thread holds the lock.
        self._lock = threading.RLock()
        self._tracer: Tracer | None = None
        if tracer_provider is not None:
            self._tracer = tracer_provider.get_tracer(SCOPE)
        elif ring is not None and drop is None:
            # The native method in place of this class's: no frame of Python is between an engine and the ring.
            self.emit = ring.send  # type: ignore[method-assign]
        if self.on:
            method = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (after := method()) and after())

    @property
    def on(self) -> bool:
        """Whether records go anywhere: what only serves to fill a record need not be computed otherwise."""
        return self._tracer is not None or self.ring is not None

    @property
    def counts(self) -> dict[str, int]:
        """How many records went to the guard and how many did not, for an engine's metrics: ``records_sent``,
        ``records_dropped`` (no room), ``records_failed`` (could not be made, or were refused). The latter two
        are holes in the stream. Of a record that goes both ways each copy counts."""
        counts = {"records_sent": 0, "records_dropped": 0, "records_failed": self.failed}
        for way in (self.sender, self.ring):
            if way is not None:
                counts["records_dropped"] += way.dropped
                counts["records_failed"] += way.failed
        if self.sender is not None:
            counts["records_sent"] += self.sender.sent
        if self.ring is not None:
            counts["records_sent"] += self.ring.written
        return counts

    def emit(self, record: Record, context: Context | None = None) -> int:
        """Sends a record: to the ring, and as a span of no duration, as configured.

        Args:
            record: Its stream, epoch and seq are filled in here, and its time where it has none.
            context: The request's trace context; the current one when None.

        Returns:
            The record's ``kv.seq``, or -1 when the emitter is off.
        """
        tracer, ring = self._tracer, self.ring
        if tracer is None:
            if ring is None:
                return -1
            return ring.skip() if self._drops(record) else ring.send(record)
        span: Span | None = None
        time_ns = record.time_ns or time.time_ns()
        if self._drops(record):
            ring = None
        else:
            try:
                attributes: dict[str, Any] = to_attributes(record)
                attributes["kv.stream.id"] = self.stream
                attributes["kv.stream.epoch"] = self.epoch
                span = tracer.start_span(record.NAME, context, attributes=attributes, start_time=time_ns)
            except Exception:
                self._fail(record)
        # The place in the stream is taken and the record handed on in one step, so that the order of sending is
        # the order of seq. The dear part, making the span, stays outside: a thread that loses the interpreter
        # while it holds the lock holds up every other thread of the stream.
        with self._lock:
            seq = self._next
            self._next = seq + 1
            if ring is not None:
                try:
                    ring.emit(record, seq, time_ns)
                except Exception:
                    self._fail(record)
            if span is not None:
                try:
                    span.set_attribute("kv.seq", seq)
                    span.end(time_ns)
                except Exception:
                    self._fail(record)
        return seq

    def _drops(self, record: Record) -> bool:
        if self._drop is None:
            return False
        try:
            return self._drop(record)
        except Exception:
            self._fail(record)
            return True

    def _fail(self, record: Record) -> None:
        with self._lock:
            self.failed += 1
            first = self.failed == 1
        if first:
            _log.exception("stream %s: a %s %s", self.stream, type(record).__name__, _LOST)

    def _after_fork(self) -> None:
        self._tracer = None
        self.ring = None
        self.__dict__.pop("emit", None)
        self._lock = threading.RLock()
        _log.warning("stream %s belongs to the parent process: its emitter is off in this one", self.stream)


NULL = Emitter("off", epoch=0)
"""An emitter that is off."""


def configure(
    stream: str,
    *,
    endpoint: str | None,
    queue: int = 65536,
    service_name: str = "kvguard-engine",
    otlp_endpoint: str | None = None,
    token: str | None = None,
    drop: Callable[[Record], bool] | None = None,
    ring: str | None = None,
) -> tuple[Emitter, SdkTracerProvider | None]:
    """Makes a process's emitter and the tracer provider for its spans; call it once a process, after forking.

    The engine makes its request spans (``gen_ai.*``) with the same provider: they go to ``otlp_endpoint`` as
    the trace's sampling says, never to the guard. Records go to the guard whatever the sampling says, and to
    ``otlp_endpoint`` with the trace they belong to. ``provider.shutdown()`` sends what waits; it also runs at
    the interpreter's exit.

    With a ring and no endpoint at all, records go through shared memory and nothing of OpenTelemetry is loaded.
    With a ring and the guard's endpoint each record goes both ways, and the guard sees, and counts, an exact
    duplicate.

    Args:
        stream: The stream's id, unique in the fleet.
        endpoint: The guard's OTLP/gRPC receiver, ``unix:PATH`` or ``HOST:PORT``.
        queue: Records kept at most while the guard does not take them.
        service_name: The resource's ``service.name``.
        otlp_endpoint: A second OTLP/gRPC receiver for records and request spans, as a URL (``http://HOST:PORT``,
            or ``https://`` for TLS; the ``OTEL_EXPORTER_OTLP_*`` variables apply) or ``unix:PATH``.
        token: What the guard's ``listen.token`` asks for.
        drop: See `Emitter`.
        ring: The guard's ring, a path in shared memory; made if there is none, so the guard need not run yet.

    Returns:
        The emitter, off where nothing to send to is given, and the provider, None where no endpoint is given.

    Raises:
        EmitError: An argument is not usable, the ring has no lane to give, or the environment switches the SDK off.
    """
    if endpoint is None and otlp_endpoint is None and ring is None:
        return Emitter(stream), None
    if not stream:
        raise EmitError("the stream id is empty: give each emitter a name that is unique in the fleet")
    if otlp_endpoint == "":
        raise EmitError("otlp_endpoint is empty: give a URL, or leave it out")
    lane = _lane_of(ring, stream) if ring is not None else None
    if endpoint is None and otlp_endpoint is None:
        return Emitter(stream, drop=drop, ring=lane), None
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise EmitError(
            "OTEL_SDK_DISABLED is true, so no record would reach the guard: unset it or configure no endpoint"
        )
    from hooks._provider import make_provider

    provider, sender = make_provider(stream, endpoint, queue, service_name, otlp_endpoint, token)
    return Emitter(stream, tracer_provider=provider, drop=drop, sender=sender, ring=lane), provider


def new_epoch() -> int:
    """The epoch of a stream that starts now."""
    return time.time_ns() // 1_000_000


def _lane_of(path: str, stream: str) -> RingWriter:
    try:
        from guard.native._core import RingWriter
    except ImportError as error:
        raise EmitError(f"ring {path}: the native core is not there ({error}): install kvguard's wheel") from error

    def tell(error: str) -> None:
        _log.error("stream %s: a record %s: %s", stream, _LOST, error)

    try:
        return RingWriter(path, stream, new_epoch(), tell=tell)
    except (RuntimeError, ValueError) as error:
        raise EmitError(str(error)) from error


def context_from_traceparent(traceparent: str | None) -> Context:
    """The trace context of a request; an empty one when the header is absent or no valid W3C traceparent."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if traceparent else {}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def traceparent_of(span_or_context: Span | Context) -> str | None:
    """The W3C traceparent to pass on to the next process; None where there is no valid span."""
    from opentelemetry.trace import Span, get_current_span

    span = span_or_context if isinstance(span_or_context, Span) else get_current_span(span_or_context)
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def __getattr__(name: str) -> Any:
    # Its base class is the SDK's, which this module must not import.
    if name == "GuardSpanProcessor":
        from hooks._processor import GuardSpanProcessor

        return GuardSpanProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
