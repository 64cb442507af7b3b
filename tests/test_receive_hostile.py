"""What nobody who means well sends to the HTTP receiver. Whatever it is, the next sender is served."""

from __future__ import annotations

import gzip
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator

import httptools
import pytest
from guard_process import until
from hypothesis import given, settings
from hypothesis import strategies as st
from receiving import Client, RecordingSink, free, over_http, request

from guard.receive.body import BodyError, Chunks, TooLargeError, inflate
from guard.receive.head import MAX_HEAD

LINE = b"POST /v1/traces HTTP/1.1\r\nhost: guard\r\ncontent-type: application/x-protobuf\r\n"


@pytest.fixture
def http() -> Iterator[Client]:
    with over_http(RecordingSink(), max_message_bytes=1 << 20, request_timeout_s=20) as client:
        yield client
        assert client.post(request(free(0))).status_code == 200, "the next sender is served"
        until(lambda: client.receiver._open <= 1)


def connect(http: Client) -> socket.socket:
    return socket.create_connection((http.receiver.address.host, http.receiver.address.port), timeout=30)


def exchange(http: Client, data: bytes) -> bytes:
    """Sends it all and reads until the other side is done, or has gone."""
    answer = b""
    with connect(http) as raw:
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while piece := raw.recv(65536):
                answer += piece
        except ConnectionError:
            pass
    return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (LINE + b"content-length: 2147483648\r\n\r\n" + bytes(1000), 413),
        (LINE + b"content-length: 18446744073709551616\r\n\r\n", 400),
        (LINE + b"content-length: 99999999999999999999999\r\n\r\n", 400),
        (LINE + b"content-length: -1\r\n\r\n", 400),
        (LINE + b"content-length: +1\r\n\r\n0", 400),
        (LINE + b"content-length: 0x1\r\n\r\n0", 400),
        (LINE + b"content-length: 1_0\r\n\r\n0123456789", 400),
        (LINE + b"content-length: 1, 1\r\n\r\n0", 400),
        (LINE + b"content-length: 1\r\ncontent-length: 2\r\n\r\n00", 400),
        (LINE + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (LINE + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n", 400),
        (LINE + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (LINE + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (LINE + b"transfer-encoding: identity\r\n\r\n", 400),
        (LINE.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (LINE + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n", 400),
        (LINE + b"transfer-encoding: chunked\r\n\r\nfffffffff\r\n", 400),
        (LINE + b"transfer-encoding: chunked\r\n\r\n7fffffff\r\n", 413),
        (LINE + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 2000, 400),
        (LINE + b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n", 400),
        (LINE + b"transfer-encoding: chunked\r\n\r\n2\nab\n0\n\n", 400),
        (LINE + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 1000, 400),
        (LINE + b"content-type: application/json\r\n\r\n", 400),
        (LINE + b"x: y\r\n" * 10_000 + b"\r\n", 431),
        (LINE + b"x: " + b"y" * (1 << 20) + b"\r\n\r\n", 431),
        (b"POST /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n", 431),
        (LINE + b"x\x00y: z\r\n\r\n", 400),
        (LINE + b" folded: z\r\n\r\n", 400),
        (LINE + b"x : z\r\n\r\n", 400),
        (LINE.replace(b"1.1", b"2.0") + b"\r\n", 400),
        (LINE.replace(b"1.1", b"9.9") + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST /v1/traces\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\n\n\n\n\r\n\r\n", 400),
        (b"CONNECT guard:80 HTTP/1.1\r\nhost: guard\r\n\r\n", 404),
        (b"GET http://guard/v1/traces HTTP/1.1\r\nhost: guard\r\n\r\n", 404),
    ],
)
def test_it_is_refused_by_name(http: Client, data: bytes, status: int) -> None:
    answer = exchange(http, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing behind it is taken for a request"
    assert sum(http.counts.refused.values()) == 1


def test_an_upgrade_is_not_made(http: Client) -> None:
    wish = b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n"
    assert exchange(http, LINE + wish).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"P", LINE, LINE + b"\r", LINE + b"content-length: 100\r\n\r\n", LINE + b"content-length: 900000\r\n\r\n0",
        LINE + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
)  # fmt: skip
def test_half_a_request_is_none(http: Client, data: bytes) -> None:
    assert exchange(http, data) == b""
    with connect(http) as raw:
        raw.sendall(data)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
    until(lambda: http.receiver._open <= 1)
    assert not any(http.counts.refused.values())


def test_a_refused_sender_in_mid_request_sees_why(http: Client) -> None:
    with connect(http) as raw:
        raw.sendall(LINE + b"content-length: 1100000\r\n\r\n")
        sent = 0
        while sent < 1_100_000:
            sent += raw.send(bytes(100_000))
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_many_headers_of_one_byte_a_piece(http: Client) -> None:
    with connect(http) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in LINE + b"content-length: 0\r\n\r\n":
            raw.sendall(bytes([byte]))
        assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_noise(http: Client) -> None:
    rng = random.Random(7)
    for _ in range(60):
        data = bytearray(LINE + b"content-length: 300\r\n\r\n" + os.urandom(300) + LINE + b"\r\n")
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        exchange(http, bytes(data))


def chunked(pieces: list[bytes], rng: random.Random) -> bytes:
    body = b""
    for piece in pieces:
        size = rng.choice((f"{len(piece):x}", f"{len(piece):X}", f"{len(piece):08x}", f"{len(piece):x};name=value"))
        body += size.encode() + b"\r\n" + piece + b"\r\n"
    return body + b"0\r\n" + rng.choice((b"", b"trailer: x\r\n")) + b"\r\n"


def decode_chunks(data: bytes, rng: random.Random, limit: int = 1 << 20) -> tuple[bytes, bytes]:
    """What `Chunks` makes of it in pieces of any size: the body, and what is behind it."""
    chunks, buffer, at = Chunks(limit), bytearray(data), 0
    while at < len(buffer) and not chunks.done:
        stop = min(len(buffer), at + rng.randrange(1, 20))
        end = chunks.feed(buffer, at, stop)
        assert end == stop or chunks.done
        at = end
    if not chunks.done:
        raise BodyError("cut off")
    return bytes(chunks.body), data[at:]


class Oracle:
    """llhttp's view of a chunked body."""

    def __init__(self) -> None:
        self.body, self.messages = b"", 0

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1


def by_llhttp(data: bytes) -> bytes | None:
    oracle = Oracle()
    try:
        httptools.HttpRequestParser(oracle).feed_data(LINE + b"transfer-encoding: chunked\r\n\r\n" + data)
    except httptools.HttpParserError:
        return None
    return oracle.body if oracle.messages == 1 else None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.randoms(use_true_random=False))
def test_chunks_are_joined(pieces: list[bytes], rng: random.Random) -> None:
    data = chunked(pieces, rng)
    assert decode_chunks(data + b"POST", rng) == (b"".join(pieces), b"POST")
    assert by_llhttp(data) == b"".join(pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=8), max_size=4), st.randoms(use_true_random=False))
def test_what_is_taken_of_broken_chunks_llhttp_takes_too(pieces: list[bytes], rng: random.Random) -> None:
    data = bytearray(chunked(pieces, rng))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.choice(b"\r\n0123456789abcdef;\x00 -+x")
    try:
        body, rest = decode_chunks(bytes(data), rng)
    except BodyError:
        return
    if not rest:
        assert by_llhttp(bytes(data)) in (body, None), "where llhttp is stricter still, it refuses"


def test_a_chunked_body_is_bounded() -> None:
    rng = random.Random(1)
    assert decode_chunks(chunked([b"x" * 50] * 2, rng), rng, limit=100)[0] == b"x" * 100
    with pytest.raises(TooLargeError):
        decode_chunks(chunked([b"x" * 50, b"x" * 51], rng), rng, limit=100)


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: b"\x1f\x8b" * 50])
def test_what_is_not_whole_is_not_inflated(damage: Callable[[bytes], bytes]) -> None:
    whole = gzip.compress(b"x" * 1000)
    assert inflate(whole, 1000) == b"x" * 1000
    with pytest.raises(TooLargeError):
        inflate(whole, 999)
    with pytest.raises(BodyError):
        inflate(damage(whole), 1000)


def test_the_limit_on_headers_is_not_beside_the_point(http: Client) -> None:
    padding = MAX_HEAD - len(LINE) - len(b"x: \r\ncontent-length: 0\r\n\r\n")
    fits = LINE + b"x: " + b"y" * padding + b"\r\ncontent-length: 0\r\n\r\n"
    assert exchange(http, fits).startswith(b"HTTP/1.1 200 ")
    assert exchange(http, fits.replace(b"x: ", b"x: y")).startswith(b"HTTP/1.1 431 ")
