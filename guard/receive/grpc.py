"""The OTLP/gRPC receiver: takes ``TraceService/Export``, queues its records for the ledger, answers.

A call is answered once its records are queued, not once they are judged: who has to know the verdict waits
for the watermark on the board. When the queue is full the call is refused with RESOURCE_EXHAUSTED and
RetryInfo, which is what OTLP calls retryable; nothing of a refused call is kept.

What is worked on at once is bounded by the handler threads, what waits by connections and by the streams of each:
HTTP/2 itself holds further calls back at the sender, so none of them is refused. A message that is over the limit,
compressed or not, gRPC refuses by itself and uncounted.

Python's gRPC does not tell who is at the other end of a Unix socket. Its file's mode 0600 lets this user's
processes and root connect, and no others.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from guard.receive.access import Certificates, Tokens
from guard.receive.address import Address, BindError, prepare_socket_path
from guard.receive.answer import BAD_TOKEN, FULL, refusal, success
from guard.receive.intake import FullError, Intake

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_STREAMS = 32
"""Calls under way on one connection; the sender's gRPC holds back the rest."""
_THREADS = 4
_RETRY = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)


class GrpcReceiver:
    """A gRPC server on one address. Handlers run in a small pool of threads and only decode and queue."""

    def __init__(
        self,
        address: Address,
        intake: Intake,
        *,
        tokens: Tokens | None = None,
        certificates: Certificates | None = None,
        max_message_bytes: int = 16 << 20,
        max_connections: int = 256,
    ) -> None:
        """Makes the server; `start` binds it.

        Args:
            address: Where to listen. A Unix socket is made with mode 0600.
            intake: Takes the messages.
            tokens: What clients must send as ``authorization: Bearer TOKEN``; None asks for nothing.
            certificates: For TLS on a TCP address; None speaks plain text. A Unix socket is always plain.
            max_message_bytes: Larger messages are refused by gRPC itself, before and after it inflates them.
            max_connections: Further ones are closed at once.
        """
        self.address = address
        self._intake = intake
        self._tokens = tokens
        self._certificates = certificates
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="otlp")
        self._server = grpc.server(
            self._pool,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", _STREAMS),
                # It counts calls that are answered already, and so refuses senders that keep to the limit.
                ("grpc.http.overload_protection", 0),
                ("grpc.max_allowed_incoming_connections", max_connections),
                # Two guards on one port would each get half of the records.
                ("grpc.so_reuseport", 0),
            ],
        )
        # No deserializer: the bytes go to the decoder as they came.
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE, {"Export": grpc.unary_unary_rpc_method_handler(self._export)}
                ),
            )
        )

    def start(self) -> Address:
        """Binds and serves.

        Returns:
            The address, with the port that was given where 0 was asked for.

        Raises:
            BindError: The address is taken or cannot be had.
        """
        if self.address.path:
            prepare_socket_path(self.address.path)
            before = os.umask(0o177)
            try:
                self._bind()
            finally:
                os.umask(before)
        else:
            self.address = self.address._replace(port=self._bind())
        self._server.start()
        return self.address

    def _bind(self) -> int:
        try:
            if self._certificates is None or self.address.path:
                port = int(self._server.add_insecure_port(str(self.address)))
            else:
                port = int(self._server.add_secure_port(str(self.address), _credentials(self._certificates)))
        except RuntimeError as error:
            raise BindError(f"{self.address}: cannot be bound; is another process listening there?") from error
        if not port:
            raise BindError(f"{self.address}: cannot be bound")
        return port

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, lets those under way end within ``grace_s``, and goes."""
        stopped: threading.Event = self._server.stop(grace_s)
        stopped.wait(grace_s + 1)
        self._pool.shutdown(wait=False)

    def _export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        if self._tokens is not None and not self._tokens.accept(_authorization(context)):
            self._intake.counts.refuse("unauthenticated")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, BAD_TOKEN)
        try:
            return success(self._intake.take(data))
        except FullError:
            context.set_trailing_metadata((("grpc-status-details-bin", _RETRY),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError  # abort raises


def _authorization(context: grpc.ServicerContext) -> bytes | None:
    for key, value in context.invocation_metadata():
        if key == "authorization":
            return value if isinstance(value, bytes) else value.encode()
    return None


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    given = certificates.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(given.key, given.certificate)], given.client_ca)

    def fetch() -> Any:
        # Asked before every handshake; None keeps the last ones.
        nonlocal given
        current = certificates.current()
        if current is given:
            return None
        given = current
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=certificates.client_ca_file is not None
    )
