"""The receivers that a configuration asks for, put together and started as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard.counters import ReceiverCounts
from guard.receive.address import Address
from guard.receive.grpc import GrpcReceiver
from guard.receive.http import HttpReceiver
from guard.receive.intake import Intake
from guard.receive.sink import Sink
from guard.receive.target import Target

if TYPE_CHECKING:
    from guard.config import Listen
    from guard.receive.forward import Forwarder


class Receivers:
    """OTLP/gRPC and OTLP/HTTP in front of one sink, and what forwards the spans that are no records.

    Attributes:
        forwarder: What forwards them; None if they are ignored.
    """

    def __init__(self, listen: Listen, sink: Sink, counts: dict[str, ReceiverCounts]) -> None:
        """Makes them; `start` binds them.

        Args:
            listen: The configuration.
            sink: Where records go.
            counts: Counts by protocol, ``grpc`` and ``http``.

        Raises:
            ConfigError: A file of tokens or certificates cannot be used.
        """
        tokens, certificates = listen.tokens(), listen.certificates()
        self.forwarder: Forwarder | None = None
        if listen.forward_to is not None:
            from guard.receive.forward import Forwarder  # its HTTP client is a third of what a start takes

            self.forwarder = Forwarder(
                Target.parse(listen.forward_to),
                token=listen.forward_token_text(),
                queue_bytes=listen.forward_queue_mib << 20,
            )
        self._running: list[GrpcReceiver | HttpReceiver] = []
        self._grpc = self._http = None
        if listen.otlp_grpc is not None:
            self._grpc = GrpcReceiver(
                Address.parse(listen.otlp_grpc),
                Intake(sink, counts["grpc"], self.forwarder),
                tokens=tokens,
                certificates=certificates,
                max_message_bytes=listen.max_message_mib << 20,
                max_connections=listen.max_connections,
            )
        if listen.otlp_http is not None:
            self._http = HttpReceiver(
                Address.parse(listen.otlp_http),
                Intake(sink, counts["http"], self.forwarder),
                tokens=tokens,
                certificates=certificates,
                uids=listen.allowed_uids,
                max_message_bytes=listen.max_message_mib << 20,
                max_connections=listen.max_connections,
                idle_timeout_s=listen.idle_timeout_s,
                request_timeout_s=listen.request_timeout_s,
            )

    def start(self) -> dict[str, Address]:
        """Binds and serves.

        Returns:
            Where, by field of the configuration: ``otlp_grpc``, ``otlp_http``.

        Raises:
            BindError: An address is taken or cannot be had; nothing is served then.
        """
        addresses: dict[str, Address] = {}
        try:
            for name, receiver in (("otlp_grpc", self._grpc), ("otlp_http", self._http)):
                if receiver is not None:
                    addresses[name] = receiver.start()
                    self._running.append(receiver)
        except BaseException:
            self.stop(0)
            raise
        if self.forwarder is not None:
            self.forwarder.start()
        return addresses

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends what runs; requests under way have ``grace_s`` each."""
        while self._running:
            self._running.pop().stop(grace_s)
        if self.forwarder is not None:
            self.forwarder.stop(grace_s)
