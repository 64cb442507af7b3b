"""The HTTP listener's protocol: uvicorn's, with bounds on how slow and how large a request's head may be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 * 1024
"""Request line and headers together."""
HEAD_TIMEOUT_S = 10.0
"""From the connection, or the first byte of a further request on it, to the end of the headers."""

_EXTENSION = "kvguard.drain"


async def _nothing() -> None:
    return


def drain_of(scope: Scope) -> Callable[[], Awaitable[None]]:
    """What to await until the client's connection takes bytes; nothing where the server does not tell."""
    extensions: dict[str, Any] = scope.get("extensions") or {}
    drain: Callable[[], Awaitable[None]] = extensions.get(_EXTENSION, {}).get("wait", _nothing)
    return drain


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._head_done()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Starts counting a request's head; lets the application await the connection."""
        super().on_message_begin()
        self._head_bytes = 0
        self.scope["extensions"] = {_EXTENSION: {"wait": self.flow.drain}}
        if self._head_timer is None:
            self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        """Counts."""
        if self._count(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts."""
        if self._count(len(name) + len(value)):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there: what follows is the application's to bound."""
        self._head_done()
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Body bytes of a request whose head was refused go nowhere."""
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See `on_body`."""
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_message_complete()

    def _count(self, size: int) -> bool:
        before, self._head_bytes = self._head_bytes, self._head_bytes + size
        if self._head_bytes <= MAX_HEAD_BYTES:
            return True
        if before <= MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()
        return False

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        self.transport.close()
