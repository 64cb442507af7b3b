"""The body of an HTTP request: chunks joined, compression undone, never beyond a limit."""

from __future__ import annotations

import re
import zlib

_MAX_LINE = 1024
"""Bytes of a chunk's size and extensions, and of all trailers together."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n", re.DOTALL)


class BodyError(ValueError):
    """A body that is not what its headers say."""


class TooLargeError(BodyError):
    """A body that is over the limit."""


class Chunks:
    """A chunked body (RFC 9112, section 7.1), taken apart as it comes.

    Attributes:
        body: What the chunks held so far.
        done: Whether the last chunk and the trailers have come.
    """

    __slots__ = ("_left", "_limit", "_line", "_place", "_trailers", "body", "done")

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.done = False
        self._limit = limit
        self._place = "size"
        self._left = 0
        self._line = b""
        self._trailers = 0

    def feed(self, data: bytearray, start: int, stop: int) -> int:
        """Takes what came.

        Args:
            data: Holds it from ``start`` to ``stop``.

        Returns:
            Where what is no part of this body begins; ``stop`` if all of it is.

        Raises:
            TooLargeError: The chunks hold more than the limit.
            BodyError: It is not chunked.
        """
        while start < stop and not self.done:
            if self._left:
                taken = min(self._left, stop - start)
                self.body += memoryview(data)[start : start + taken]
                self._left -= taken
                start += taken
                continue
            newline = data.find(b"\n", start, stop)
            end = stop if newline < 0 else newline + 1
            if len(self._line) + end - start > _MAX_LINE:
                raise BodyError("a line of the chunked body is too long")
            self._line += data[start:end]
            start = end
            if newline >= 0:
                line, self._line = self._line, b""
                self._next(line)
        return start

    def _next(self, line: bytes) -> None:
        if self._place == "size":
            size = _SIZE.fullmatch(line)
            if size is None:
                raise BodyError(f"{line[:20]!r} is no chunk's size")
            self._left = int(size[1], 16)
            if self._left > self._limit - len(self.body):
                raise TooLargeError(f"the body is more than {self._limit} bytes")
            self._place = "after" if self._left else "trailers"
        elif self._place == "after":
            if line != b"\r\n":
                raise BodyError("a chunk is longer than it says")
            self._place = "size"
        elif line == b"\r\n":
            self.done = True
        else:
            self._trailers += len(line)
            if self._trailers > _MAX_LINE or not line.endswith(b"\r\n"):
                raise BodyError("the chunked body's trailers are too long, or are none")


def inflate(data: bytes | bytearray | memoryview, limit: int) -> bytes:
    """Undoes gzip or zlib (HTTP's ``deflate``), whichever it is.

    Never holds more than ``limit`` bytes and one, however much the data would become.

    Raises:
        TooLargeError: It would become more than ``limit`` bytes.
        BodyError: It is neither, is cut off, or something follows it.
    """
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        inflated = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise BodyError(f"the body cannot be inflated: {error}") from None
    if len(inflated) > limit:
        raise TooLargeError(f"the body inflates to more than {limit} bytes")
    if not inflater.eof or inflater.unused_data:
        raise BodyError("the compressed body is cut off, or something follows it")
    return inflated
