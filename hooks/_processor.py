"""The span processor that sends records to the guard at once.

The SDK's batch processor is no use here: it waits for a batch or a delay, so it cannot gate a first token,
and it throws away the oldest spans when its queue is full, which for lineage are those that count most.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref

import grpc
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from guard.records import KINDS
from hooks._otlp import METHOD, Pending, encode_request, is_retryable, rejected_spans, retry_hint
from hooks.emit import EmitError

BATCH = 512
"""Spans in one request, at most."""

MAX_REQUEST_BYTES = 2 << 20
"""A larger request is cut in two: gRPC servers take 4 MiB unless told otherwise, and digests can be long."""

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 0.1
"""Well within the guard's reorder window (200 ms): of a guard that has come back, one stream must not be so much
later than another that its records are taken for lost."""
MAX_HINT_S = 30.0
"""A receiver that asks for a longer pause than this is asked again after this."""

CALL_TIMEOUT_S = 5.0
"""After this a call is given up and made again: a guard that hangs must not look like one that is slow."""

AWAY_S = 0.5
"""How long a shutdown waits for a guard that is away: an engine has more to stop than this."""

WARN_EVERY_S = 10.0

_CHANNEL_OPTIONS = (
    # gRPC's own pauses between attempts to connect grow to two minutes; a restarted guard is wanted sooner.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 100),
    # One processor's failures must not delay another's attempts to connect.
    ("grpc.use_local_subchannel_pool", 1),
    # Records go to the guard beside the engine, never by way of the machine's HTTP proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
)

_DROPS = "%d records for %s have been dropped so far"

_log = logging.getLogger(__name__)


class GuardSpanProcessor(SpanProcessor):
    """Sends the spans of records over OTLP/gRPC as soon as they end, in order, from one thread.

    All that wait go together in one call, and the next call is made when that one is answered. While the
    guard cannot be reached the records stay in the queue and the call is tried again; when the queue is full
    the newest record is dropped. Every record is in the end counted once, as sent, dropped or failed. A call
    that timed out or broke may have been taken all the same: the guard can see a record twice.

    Spans that are not records are let pass. It does not survive a fork: in the child it drops everything.

    Attributes:
        sent: Records that the guard took.
        dropped: Records that found the queue full, or that could not be sent before the shutdown's timeout.
        failed: Records that the guard refused or that OTLP cannot express.
    """

    sent: int
    dropped: int
    failed: int

    def __init__(self, endpoint: str, *, queue_size: int = 65536, token: str | None = None) -> None:
        """Starts the sender; it connects when there is something to send.

        Args:
            endpoint: ``unix:PATH`` or ``HOST:PORT``.
            queue_size: Records kept at most, those in the call that is under way included (about 1 kB each).
            token: What the guard's ``listen.token`` asks for.

        Raises:
            EmitError: The endpoint is neither, or the queue holds nothing.
        """
        if queue_size < 1:
            raise EmitError(f"the queue is to hold {queue_size} records: give it room for at least one")
        self.sent = self.dropped = self.failed = 0
        self._endpoint = endpoint
        self._size = queue_size
        self._waiting = 0
        self._closed = False
        # Re-entrant, because a signal handler may emit while its thread holds the lock.
        self._lock = threading.RLock()
        # An Event in the queue is set once all before it has been dealt with; the last one ends the sender.
        self._queue: queue.SimpleQueue[Pending | threading.Event] = queue.SimpleQueue()
        self._end = threading.Event()
        self._give_up = threading.Event()
        self._reachable = True
        self._drops_told = 0
        self._told: dict[str, float] = {}
        self._channel = grpc.insecure_channel(_target(endpoint), options=_CHANNEL_OPTIONS)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._export = self._channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        self._thread = threading.Thread(target=self._run, name="kvguard-emit", daemon=True)
        self._thread.start()
        method = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (after := method()) and after())

    @property
    def queued(self) -> int:
        """Records that have ended and have not been dealt with."""
        return self._waiting

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a record; called by the SDK in the engine's thread."""
        if span.name not in KINDS:
            return
        pending = Pending.of(span)
        with self._lock:
            if self._closed or self._waiting >= self._size:
                self.dropped += 1
                return
            self._waiting += 1
            self._queue.put(pending)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Waits until every record that has ended so far is dealt with.

        Returns:
            False when that took longer than the timeout.
        """
        with self._lock:
            if self._closed:
                return self._waiting == 0
            marker = threading.Event()
            self._queue.put(marker)
        return marker.wait(timeout_millis / 1000)

    def shutdown(self, timeout_millis: int = 2_000) -> None:
        """Sends what waits for as long as the timeout allows, and stops; what is left counts as dropped.

        A guard that cannot be reached is waited for `AWAY_S` at most.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(self._end)
        timeout_s = timeout_millis / 1000
        at_first = min(timeout_s, AWAY_S)
        if not self._end.wait(at_first) and not (self._reachable and self._end.wait(timeout_s - at_first)):
            self._give_up.set()
        # Ends a call that is under way, upon which the sender drops the rest without any waiting.
        self._channel.close()
        self._thread.join(1.0)
        if self.dropped > self._drops_told:
            _log.warning(_DROPS, self.dropped, self._endpoint)

    def _after_fork(self) -> None:
        # The child has a copy of the queue without the thread that empties it: the records are the parent's.
        self._lock = threading.RLock()
        self._closed = True
        self._waiting = 0

    def _run(self) -> None:
        marker: threading.Event | None = None
        while marker is not self._end:
            batch, marker = self._take()
            self._deliver(batch)
            self._tell_drops()
            if marker is not None:
                marker.set()

    def _take(self) -> tuple[list[Pending], threading.Event | None]:
        """Waits for something and takes all that is there, up to a batch or a marker."""
        batch: list[Pending] = []
        item = self._queue.get()
        while not isinstance(item, threading.Event):
            batch.append(item)
            if len(batch) == BATCH:
                return batch, None
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, item

    def _deliver(self, batch: list[Pending]) -> None:
        sent = failed = 0
        try:
            sent, failed = self._send(batch)
        except Exception:
            # A sender that died would lose everything from now on. A channel closed under it is no fault.
            if not self._give_up.is_set():
                failed = len(batch)
                _log.exception("%d records for %s are lost", failed, self._endpoint)
        with self._lock:
            self._waiting -= len(batch)
            self.sent += sent
            self.failed += failed
            self.dropped += len(batch) - sent - failed

    def _send(self, batch: list[Pending]) -> tuple[int, int]:
        """Sends a batch, in as many requests as its size asks for.

        Returns:
            How many were sent and how many failed; the shutdown came before the rest.
        """
        if not batch:
            return 0, 0
        data, unfit = encode_request(batch)
        if len(data) > MAX_REQUEST_BYTES and len(batch) > 1:
            middle = len(batch) // 2
            sent, failed = self._send(batch[:middle])
            sent_after, failed_after = self._send(batch[middle:])
            return sent + sent_after, failed + failed_after
        if unfit:
            self._tell("unfit", "%d records hold what OTLP cannot express and are lost", unfit)
        count = len(batch) - unfit
        refused = self._call(data, count) if count else 0
        return (0, unfit) if refused is None else (count - refused, unfit + refused)

    def _call(self, data: bytes, count: int) -> int | None:
        """Sends a request until it is answered for good.

        Returns:
            How many of the `count` spans were refused, or None when the shutdown came first.
        """
        pause = FIRST_PAUSE_S
        while not self._give_up.is_set():
            try:
                reply = self._export(data, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
            except grpc.RpcError as error:
                code, hint = error.code(), retry_hint(error)
                if not is_retryable(code, hint):
                    self._tell("refused", "%s refused %d records: %s", self._endpoint, count, _reason(error))
                    return count
                if self._reachable:
                    self._reachable = False
                    _log.warning("%s takes no records (%s); they wait", self._endpoint, _reason(error))
                self._tell_drops()
                # Never without a pause at all, whatever the receiver says.
                self._give_up.wait(pause if hint is None else min(max(hint, 0.001), MAX_HINT_S))
                pause = min(2 * pause, LAST_PAUSE_S)
                continue
            if not self._reachable:
                self._reachable = True
                _log.info("%s takes records again", self._endpoint)
            return self._refused(reply, count)
        return None

    def _refused(self, reply: bytes, count: int) -> int:
        if not reply:
            return 0
        try:
            rejected, message = rejected_spans(reply)
        except ValueError:
            self._tell("reply", "%s gave an answer that is not OTLP's to %d records", self._endpoint, count)
            return count
        rejected = min(max(rejected, 0), count)
        if rejected or message:
            self._tell("partial", "%s refused %d of %d records: %.200r", self._endpoint, rejected, count, message)
        return rejected

    def _tell_drops(self) -> None:
        dropped = self.dropped
        # At a shutdown that gave up the number is still growing.
        if dropped > self._drops_told and not self._give_up.is_set():
            told = self._tell("dropped", _DROPS, dropped, self._endpoint)
            self._drops_told = dropped if told else self._drops_told

    def _tell(self, what: str, message: str, *args: object) -> bool:
        """Warns, once in a while of each thing, so that trouble with the guard does not fill the log."""
        now = time.monotonic()
        if now < self._told.get(what, 0.0):
            return False
        self._told[what] = now + WARN_EVERY_S
        _log.warning(message, *args)
        return True


def _target(endpoint: str) -> str:
    """The gRPC target of an endpoint; EmitError for what is neither ``unix:PATH`` nor ``HOST:PORT``."""
    remedy = "give unix:PATH, or HOST:PORT without a scheme (an IPv6 address in brackets)"
    if endpoint.startswith("unix:"):
        path = endpoint.removeprefix("unix:")
        if not path.strip("/") or "\0" in path:
            raise EmitError(f"endpoint {endpoint!r} names no socket: {remedy}")
        if len(os.fsencode(path)) > 107:
            raise EmitError(f"endpoint {endpoint!r}: a socket's path has at most 107 bytes: choose a shorter one")
        return endpoint
    host, _, port = endpoint.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or "/" in host or (":" in host and not bracketed):
        raise EmitError(f"endpoint {endpoint!r} is no address: {remedy}")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise EmitError(f"endpoint {endpoint!r} has no port from 1 to 65535: {remedy}")
    return endpoint


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details() or ''}"[:300]
