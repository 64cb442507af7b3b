"""One HTTP/1 connection: requests in, one after the other or pipelined, answers out in the same order.

Bytes are received straight to where they are decoded: a request's head, and a body that comes with it, into a small
buffer of the connection's; a longer body whose length is known into a buffer of that length. Only chunks are copied.
Decoding is done at once in the loop's thread unless it would hold up the others: then a worker does it, and the
connection is not read from meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from http import HTTPStatus

import grpc

from guard.receive.access import Tokens
from guard.receive.answer import BAD_TOKEN, FULL, refusal, success
from guard.receive.body import BodyError, Chunks, TooLargeError, inflate
from guard.receive.head import MAX_HEAD, Head, Refusal
from guard.receive.intake import FullError, Intake

_BUFFER = 64 << 10
_FIRST_BODY = 256 << 10
"""Of a longer body no more than this is made room for before it comes."""
_KEEP_BODY = 1 << 20
"""A connection that is in use keeps a body's buffer up to this size."""
_AT_ONCE = 1 << 20
_INFLATE_AT_ONCE = 128 << 10
_JSON_AT_ONCE = 16 << 10
_LINGER_S = 2.0
"""How long what a refused sender still sends is read, so that it sees the answer."""

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 404: grpc.StatusCode.UNIMPLEMENTED,
    405: grpc.StatusCode.UNIMPLEMENTED, 408: grpc.StatusCode.DEADLINE_EXCEEDED, 413: grpc.StatusCode.OUT_OF_RANGE,
    415: grpc.StatusCode.INVALID_ARGUMENT, 417: grpc.StatusCode.UNIMPLEMENTED, 431: grpc.StatusCode.OUT_OF_RANGE,
    503: grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip
_CLOSE = "connection: close\r\n"
_MORE = {401: "www-authenticate: Bearer\r\n", 405: "allow: POST\r\n", 503: "retry-after: 1\r\n"}
_NO_MEMORY = "too many bytes of unfinished requests; send the same records again"
_NO_CONNECTIONS = "too many connections; send the same records again"


@dataclass
class Terms:
    """What every connection of a receiver goes by, and what they share."""

    intake: Intake
    tokens: Tokens | None
    workers: Executor
    loop: asyncio.AbstractEventLoop
    max_message_bytes: int
    max_body_bytes: int
    """In the buffers of all connections together."""
    idle_timeout_s: float
    request_timeout_s: float
    connections: set[Connection] = field(default_factory=set)
    body_bytes: int = 0


class Connection(asyncio.BufferedProtocol):
    """The protocol of one accepted connection."""

    def __init__(self, terms: Terms, on_lost: Callable[[], None]) -> None:
        """Args:
        terms: The receiver's.
        on_lost: Called once it is gone.
        """
        self.made = False
        """Whether there ever was a connection: no handshake fails any more."""
        self._terms = terms
        self._on_lost = on_lost
        self._buffer = bytearray(_BUFFER)
        self._start = self._end = 0
        """What of the buffer has come and is not dealt with."""
        self._body = bytearray()
        self._have = 0
        """Bytes of the body that have come."""
        self._chunks: Chunks | None = None
        self._held = 0
        """Bytes of bodies that are accounted for in `Terms.body_bytes`."""
        self._head: Head | None = None
        """Of the request whose body comes or is worked on."""
        self._into_body = self._working = self._full = self._lingering = self._closing = self._last = False
        self._lingered = 0
        self._partial = False
        """Whether some of a request has come and not all of it."""
        self._used = False
        """Whether a request was answered since the last look at the time."""
        self._deadline = terms.loop.time() + terms.idle_timeout_s

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self.made = True
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._terms.connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """Ends."""
        self._closing = True
        self._chunks, self._body = None, bytearray()
        self._hold(0)
        self._terms.connections.discard(self)
        self._on_lost()

    def get_buffer(self, _size: int) -> memoryview:
        """Where the next bytes go."""
        if self._into_body:
            assert self._head is not None
            return memoryview(self._body)[self._have : self._head.length]
        return memoryview(self._buffer)[0 if self._lingering else self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """They have come."""
        if self._lingering or self._closing:
            self._lingered += nbytes
            if self._lingered > 2 * self._terms.max_message_bytes:
                self._transport.abort()
            return
        if not self._into_body:
            self._end += nbytes
            self._advance()
            return
        assert self._head is not None
        self._have += nbytes
        if self._have == self._head.length:
            self._into_body = False
            self._take(memoryview(self._body)[: self._have])
            self._advance()
        elif self._have == len(self._body):
            try:
                self._make_room(min(self._head.length, 2 * self._have))
            except Refusal as refused:
                self._refuse(refused)

    def pause_writing(self) -> None:
        """The sender does not read its answers: nothing more of it is dealt with until it does."""
        self._full = True
        self._deadline = self._terms.loop.time() + self._terms.request_timeout_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It does again."""
        self._full = False
        if not self._working and not self._closing:
            self._transport.resume_reading()
            self._advance()

    # What the receiver calls.

    def check_time(self, now: float) -> None:
        """Ends it if it has had its time."""
        if not (self._used or self._partial or self._working):
            self._body = bytearray()
            self._hold(0)
        self._used = False
        if now < self._deadline or self._working:
            return
        if self._full:
            self._terms.intake.counts.refuse("timeout")
        if self._full or self._lingering or self._closing:
            self._transport.abort()
        elif self._partial:
            self._refuse(Refusal(408, "timeout", "the request did not come in time"))
        else:
            self._close()

    def abort(self) -> None:
        """Ends it at once."""
        self._transport.abort()

    def finish(self) -> None:
        """Ends it once what has begun is answered, or soon."""
        self._last = True
        self._deadline = min(self._deadline, self._terms.loop.time() + _LINGER_S)
        if not self._partial and not self._working:
            self._close()

    # The work.

    def _advance(self) -> None:
        """Goes on with what is in the buffer as far as that leads."""
        try:
            while not (self._into_body or self._working or self._full or self._lingering or self._closing):
                if not (self._next_request() if self._head is None else self._next_chunks()):
                    break
        except Refusal as refused:
            self._refuse(refused)
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER:
            waiting = self._buffer[self._start : self._end]
            self._buffer[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        self._set_deadline()

    def _set_deadline(self) -> None:
        """A request has its time from its first byte on, whatever of it comes when."""
        if self._lingering or self._full or self._closing or self._last:
            return
        partial = self._head is not None or self._start != self._end
        if not partial:
            self._deadline = self._terms.loop.time() + self._terms.idle_timeout_s
        elif not self._partial:
            self._deadline = self._terms.loop.time() + self._terms.request_timeout_s
        self._partial = partial

    def _next_request(self) -> bool:
        """Reads a request's head; False if it has not come."""
        terms = self._terms
        stop = self._buffer.find(b"\r\n\r\n", self._start, min(self._end, self._start + MAX_HEAD)) + 4
        if stop == 3:
            if self._end - self._start >= MAX_HEAD:
                raise Refusal(431, "too-large", f"the request's headers are more than {MAX_HEAD} bytes")
            return False
        head = self._head = Head.read(memoryview(self._buffer)[self._start : stop])
        head.check(terms.max_message_bytes)
        if terms.tokens is not None and not terms.tokens.accept(head.authorization):
            raise Refusal(401, "unauthenticated", BAD_TOKEN)
        self._start = stop
        if head.expects_continue and self._start == self._end:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            self._chunks = Chunks(terms.max_message_bytes)
        elif head.length <= self._end - stop:
            self._start += head.length
            self._take(memoryview(self._buffer)[stop : self._start])
        else:
            self._begin_body(head)
        return True

    def _begin_body(self, head: Head) -> None:
        """What follows goes into the body's own buffer, behind what of it is already here."""
        here = self._end - self._start
        self._have = 0
        size = min(head.length, _FIRST_BODY)
        if len(self._body) < size:
            self._make_room(size)
        self._body[:here] = memoryview(self._buffer)[self._start : self._end]
        self._start = self._end = 0
        self._have, self._into_body = here, True

    def _make_room(self, size: int) -> None:
        self._hold(size)
        body = bytearray(size)  # not the old one made longer: the loop still holds on to that
        body[: self._have] = memoryview(self._body)[: self._have]
        self._body = body

    def _next_chunks(self) -> bool:
        """Takes what has come of a chunked body; False if that was not all."""
        chunks = self._chunks
        assert chunks is not None
        try:
            self._start = chunks.feed(self._buffer, self._start, self._end)
        except TooLargeError as error:
            raise Refusal(413, "too-large", str(error)) from None
        except BodyError as error:
            raise Refusal(400, "malformed", str(error)) from None
        self._hold(len(self._body) + len(chunks.body))
        if chunks.done:
            self._take(memoryview(chunks.body))
        return chunks.done

    def _hold(self, size: int) -> None:
        """Accounts for the bytes of bodies that this connection holds."""
        terms = self._terms
        if size > self._held and terms.body_bytes + size - self._held > terms.max_body_bytes:
            raise Refusal(503, "memory", _NO_MEMORY)
        terms.body_bytes += size - self._held
        self._held = size

    def _take(self, data: memoryview) -> None:
        """Deals with a request that has come whole."""
        head, terms = self._head, self._terms
        assert head is not None
        at_once = _JSON_AT_ONCE if head.json else _INFLATE_AT_ONCE if head.compressed else _AT_ONCE
        if len(data) <= at_once:
            self._answer(answer(terms, head, data))
            return
        self._working = True
        self._transport.pause_reading()
        # What waits behind it in the connection's buffer is moved about meanwhile.
        body = bytes(data) if data.obj is self._buffer else data
        terms.loop.run_in_executor(terms.workers, answer, terms, head, body).add_done_callback(self._worked)

    def _worked(self, future: asyncio.Future[bytes]) -> None:
        self._working = False
        if self._closing or future.cancelled():
            return
        if not self._full:
            self._transport.resume_reading()
        self._answer(future.result())
        self._advance()

    def _answer(self, response: bytes) -> None:
        assert self._head is not None
        self._transport.write(response)
        if not self._head.keep_alive or self._last:
            self._close()
        self._head = self._chunks = None
        self._used, self._partial = True, False
        if len(self._body) > _KEEP_BODY:
            self._body = bytearray()
        if self._held != len(self._body):
            self._hold(len(self._body))

    def _refuse(self, refused: Refusal) -> None:
        """Answers, and reads on for a while so that a sender in mid-request sees it, and no reset."""
        self._terms.intake.counts.refuse(refused.reason)
        head = self._head
        as_json = head is None or head.json
        body = refusal(_CODES[refused.status], str(refused), as_json=as_json)
        self._transport.write(_response(refused.status, body, as_json=as_json, keep_alive=False, head=head))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._lingering, self._into_body, self._partial = True, False, False
        self._start = self._end = 0
        self._head, self._chunks, self._body = None, None, bytearray()
        self._hold(0)
        self._deadline = self._terms.loop.time() + _LINGER_S

    def _close(self) -> None:
        self._closing = True
        self._deadline = self._terms.loop.time() + _LINGER_S
        self._transport.close()


def answer(terms: Terms, head: Head, data: bytes | memoryview) -> bytes:
    """Takes a request's body; in any thread.

    Returns:
        The response.
    """
    counts, as_json = terms.intake.counts, head.json
    try:
        if head.compressed:
            decoded = terms.intake.take(inflate(data, terms.max_message_bytes), json=as_json, wire_bytes=len(data))
        else:
            decoded = terms.intake.take(data, json=as_json)
    except FullError:
        status, message = 503, FULL
    except TooLargeError as error:
        counts.refuse("too-large")
        status, message = 413, str(error)
    except BodyError as error:
        counts.refuse("malformed")
        status, message = 400, str(error)
    except ValueError as error:
        status, message = 400, str(error)
    else:
        if not decoded.invalid and not as_json and head.keep_alive:
            return _OK
        return _response(200, success(decoded, as_json=as_json), as_json=as_json, keep_alive=head.keep_alive)
    body = refusal(_CODES[status], message, as_json=as_json)
    return _response(status, body, as_json=as_json, keep_alive=head.keep_alive)


def _response(status: int, body: bytes, *, as_json: bool, keep_alive: bool, head: Head | None = None) -> bytes:
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"content-type: {'application/json' if as_json else 'application/x-protobuf'}\r\n"
        f"content-length: {len(body)}\r\n"
        f"{_MORE.get(status, '')}{'' if keep_alive else _CLOSE}\r\n"
    )
    return lines.encode() + (b"" if head is not None and head.method == b"HEAD" else body)


_OK = _response(200, b"", as_json=False, keep_alive=True)
NO_ROOM = _response(503, refusal(_CODES[503], _NO_CONNECTIONS, as_json=True), as_json=True, keep_alive=False)
"""What a connection too many is told."""
