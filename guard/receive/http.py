"""The OTLP/HTTP receiver: ``POST /v1/traces`` in protobuf or JSON, gzip or not, in a thread of its own.

Refusals are a ``google.rpc.Status`` in the request's own encoding. When the queue is full it is 503 with
``retry-after``, and nothing of the message was kept. Every buffer, time and number of connections is bounded.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import uvloop

from guard.log import log
from guard.receive.access import Certificates, Tokens
from guard.receive.address import Address, bind
from guard.receive.connection import NO_ROOM, Connection, Terms
from guard.receive.intake import Intake

_BODIES = 4
"""Bodies of full length that the buffers of all connections together may hold."""
_HANDSHAKE_S = 10.0
_CREDENTIALS = struct.Struct("3i")


class HttpReceiver:
    """An HTTP/1.1 server on one address."""

    def __init__(
        self,
        address: Address,
        intake: Intake,
        *,
        tokens: Tokens | None = None,
        certificates: Certificates | None = None,
        uids: Collection[int] | None = None,
        max_message_bytes: int = 16 << 20,
        max_connections: int = 256,
        idle_timeout_s: float = 60.0,
        request_timeout_s: float = 30.0,
    ) -> None:
        """Makes the server; `start` binds it.

        Args:
            address: Where to listen.
            intake: Takes the messages.
            tokens: What clients must send as ``authorization: Bearer TOKEN``; None asks for nothing.
            certificates: For TLS on a TCP address; None speaks plain text. A Unix socket is always plain.
            uids: Whose processes may connect to a Unix socket, beside root's; None: this user's. For others than
                this user the socket gets mode 0666, and the directory it is in decides who comes as far as that.
            max_message_bytes: Of a message, as it is sent and inflated.
            max_connections: Further ones are told to come back.
            idle_timeout_s: A connection that asks nothing is closed after this.
            request_timeout_s: A request must have come, and an answer have been read, within this.
        """
        self.address = address
        self._intake = intake
        self._tokens = tokens
        self._certificates = None if address.path else certificates
        self._uids = {0, *({os.geteuid()} if uids is None else uids)}
        self._max_message_bytes = max_message_bytes
        self._max_connections = max_connections
        self._idle_timeout_s, self._request_timeout_s = idle_timeout_s, request_timeout_s
        self._open = 0
        """Connections, those in their TLS handshake included."""
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="otlp-http-worker")
        self._stopping = asyncio.Event()
        self._grace_s = 1.0
        self._thread = threading.Thread(target=self._run, name="otlp-http", daemon=True)

    def start(self) -> Address:
        """Binds and serves.

        Returns:
            The address, with the port that was given where 0 was asked for.

        Raises:
            BindError: The address is taken or cannot be had.
        """
        self._listener = bind(self.address, shared=not self._uids <= {0, os.geteuid()})
        if not self.address.path:
            self.address = self.address._replace(port=self._listener.getsockname()[1])
        self._loop = uvloop.new_event_loop()
        self._thread.start()
        return self.address

    def stop(self, grace_s: float = 1.0) -> None:
        """Accepts no more, lets requests under way end within ``grace_s``, and goes."""
        if not self._thread.is_alive():
            return
        self._grace_s = grace_s
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(grace_s + 5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_failed)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            if self.address.path:
                with suppress(OSError):
                    os.unlink(self.address.path)
            self._listener.close()
            self._workers.shutdown(wait=False, cancel_futures=True)
            self._loop.close()

    async def _serve(self) -> None:
        terms = Terms(
            self._intake, self._tokens, self._workers, self._loop, self._max_message_bytes,
            _BODIES * self._max_message_bytes, self._idle_timeout_s, self._request_timeout_s,
        )  # fmt: skip
        jobs = {self._loop.create_task(self._accept(terms)), self._loop.create_task(_keep_time(terms))}
        await self._stopping.wait()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for connection in list(terms.connections):
            connection.finish()
        deadline = self._loop.time() + self._grace_s
        while terms.connections and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(terms.connections):
            connection.abort()
        await asyncio.sleep(0)  # they are told of their end

    async def _accept(self, terms: Terms) -> None:
        handshakes: set[asyncio.Task[None]] = set()
        while True:
            try:
                peer, _ = await self._loop.sock_accept(self._listener)
                admitted = self._admit(peer)
            except OSError as error:  # out of descriptors, or gone before it was accepted
                log("warning", "a connection could not be accepted", error=error.strerror)
                await asyncio.sleep(0.05)
                continue
            if admitted:
                task = self._loop.create_task(self._adopt(terms, peer))
                handshakes.add(task)
                task.add_done_callback(handshakes.discard)

    def _admit(self, peer: socket.socket) -> bool:
        if self.address.path:
            _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid not in self._uids:
                self._intake.counts.refuse("uid")
                peer.close()
                return False
        if self._open >= self._max_connections:
            self._intake.counts.refuse("connections")
            if self._certificates is None:
                with suppress(OSError):
                    peer.send(NO_ROOM, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            peer.close()
            return False
        return True

    async def _adopt(self, terms: Terms, peer: socket.socket) -> None:
        self._open += 1
        connection = Connection(terms, self._lost)
        try:
            if not self.address.path:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context: ssl.SSLContext | None = None
            options: dict[str, Any] = {}
            if self._certificates is not None:
                context = self._certificates.current().context
                options["ssl_handshake_timeout"] = _HANDSHAKE_S
            await self._loop.connect_accepted_socket(lambda: connection, peer, ssl=context, **options)
        except OSError:  # ssl's and the handshake's timeout are among them
            if self._certificates is not None:
                self._intake.counts.refuse("tls")
            peer.close()
        finally:
            if not connection.made:
                self._open -= 1

    def _lost(self) -> None:
        self._open -= 1


async def _keep_time(terms: Terms) -> None:
    while True:
        await asyncio.sleep(min(1.0, terms.idle_timeout_s / 4, terms.request_timeout_s / 4))
        now = terms.loop.time()
        for connection in list(terms.connections):
            connection.check_time(now)


def _failed(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Clients that go away in mid-handshake are told here too; they are counted already.
    error = context.get("exception")
    if not isinstance(error, OSError):
        log("error", "a connection failed", error=type(error).__name__, message=str(context.get("message"))[:200])
