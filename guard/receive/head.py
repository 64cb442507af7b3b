"""The head of an HTTP request: what of it the receiver looks at, and what is wrong with it."""

from __future__ import annotations

from typing import NamedTuple

import httptools

MAX_HEAD = 16 << 10
"""Bytes of a request's line and headers."""
PATH = b"/v1/traces"
_KNOWN = frozenset(
    (
        b"authorization", b"connection", b"content-encoding", b"content-length", b"content-type", b"expect",
        b"transfer-encoding",
    )
)  # fmt: skip
_PROTOBUF, _JSON = b"application/x-protobuf", b"application/json"


class Refusal(Exception):
    """A request that is answered with an error, and why."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """Args:
        status: HTTP's.
        reason: One of `guard.counters.REFUSALS`.
        message: For the sender.
        """
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class Head(NamedTuple):
    """A request's line and headers, read."""

    method: bytes
    path: bytes
    keep_alive: bool
    length: int
    """Bytes of the body; 0 if it is chunked."""
    chunked: bool
    json: bool
    compressed: bool
    expects_continue: bool
    authorization: bytes | None
    unsupported: str
    """Why the body cannot be read, whatever is in it; empty if it can."""

    @classmethod
    def read(cls, data: memoryview) -> Head:
        """Reads a request up to and with the empty line.

        Raises:
            Refusal: It is no HTTP/1 request, or its body's length is in doubt.
        """
        found = _Found()
        parser = httptools.HttpRequestParser(found)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # nothing here can be upgraded to, and a server may ignore the wish
        except httptools.HttpParserError as error:
            raise _bad(str(error)) from None
        if not found.complete or found.twice:
            raise _bad(f"{found.twice.decode()} is given twice" if found.twice else "the headers end too early")
        headers, version = found.headers, parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _bad(f"HTTP/{version} is not spoken here")
        length, chunked = _framing(headers, version)
        json, unsupported = _content(headers)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"gzip", b"deflate", b"identity", b""):
            unsupported = unsupported or f"content-encoding {encoding.decode('latin-1'):.40} is none of gzip, deflate"
        expect = headers.get(b"expect", b"").strip().lower()
        if expect not in (b"", b"100-continue"):
            raise Refusal(417, "unsupported", "expect: only 100-continue can be met")
        connection = [token.strip().lower() for token in headers.get(b"connection", b"").split(b",")]
        return cls(
            method=parser.get_method(),
            path=found.url.partition(b"?")[0],
            keep_alive=version == "1.1" and b"close" not in connection,
            length=length,
            chunked=chunked,
            json=json,
            compressed=encoding in (b"gzip", b"deflate"),
            expects_continue=expect != b"",
            authorization=headers.get(b"authorization"),
            unsupported=unsupported,
        )

    def check(self, max_bytes: int) -> None:
        """Refuses what is no export of traces, or larger than ``max_bytes``.

        Raises:
            Refusal: With the status to answer.
        """
        if self.path != PATH:
            raise Refusal(404, "unsupported", f"there is only {PATH.decode()}")
        if self.method != b"POST":
            raise Refusal(405, "unsupported", f"{PATH.decode()} takes POST only")
        if self.unsupported:
            raise Refusal(415, "unsupported", self.unsupported)
        if self.length > max_bytes:
            raise Refusal(413, "too-large", f"a message of {self.length} bytes is more than {max_bytes}")


class _Found:
    """What httptools calls."""

    __slots__ = ("complete", "headers", "twice", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.twice = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KNOWN:
            if name in self.headers and name != b"connection":
                self.twice = name
            self.headers[name] = self.headers[name] + b"," + value if name in self.headers else value

    def on_headers_complete(self) -> None:
        self.complete = True

    def on_body(self, _body: bytes) -> None:
        # The headers ended before the empty line that they were cut at.
        self.complete = False


def _framing(headers: dict[bytes, bytes], version: str) -> tuple[int, bool]:
    # A proxy in front may see the end of the body elsewhere than we do: then requests could be smuggled.
    coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
    if coding is not None:
        if coding.strip().lower() != b"chunked" or length is not None or version != "1.1":
            raise _bad("transfer-encoding: only chunked, without content-length, in HTTP/1.1")
        return 0, True
    if length is None:
        return 0, False
    if not length.isdigit() or len(length) > 19:
        raise _bad(f"content-length {length.decode('latin-1'):.40} is no length")
    return int(length), False


def _content(headers: dict[bytes, bytes]) -> tuple[bool, str]:
    kind, _, parameters = headers.get(b"content-type", b"").lower().partition(b";")
    if kind.strip() == _PROTOBUF:
        return False, ""
    if kind.strip() != _JSON:
        wanted = f"{_PROTOBUF.decode()} or {_JSON.decode()}"
        return True, f"content-type {kind.decode('latin-1').strip():.60} is not {wanted}"
    charset = parameters.strip().removeprefix(b"charset=").strip(b'"')
    return True, "" if charset in (b"", b"utf-8") else "JSON is read as UTF-8 only"


def _bad(message: str) -> Refusal:
    return Refusal(400, "malformed", message)
