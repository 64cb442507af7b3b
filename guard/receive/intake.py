"""A message's way from its bytes into the sink: what every receiver does, whatever protocol it speaks."""

from __future__ import annotations

import time

from guard.counters import ReceiverCounts
from guard.receive.decode import Decoded, decode_json, decode_protobuf
from guard.receive.forward import Forwarder
from guard.receive.sink import Sink


class FullError(Exception):
    """The sink has no room: nothing of the message was kept, and the sender should send it again."""


class Intake:
    """Decodes, queues, counts. Any thread may use it.

    Attributes:
        counts: What came by this way.
    """

    def __init__(self, sink: Sink, counts: ReceiverCounts, forwarder: Forwarder | None = None) -> None:
        """Args:
        sink: Where records go.
        counts: Counts them.
        forwarder: Gets the messages that hold spans which are no records; None ignores these.
        """
        self.counts = counts
        self._sink = sink
        self._forwarder = forwarder

    def take(
        self, data: bytes | bytearray | memoryview, *, json: bool = False, wire_bytes: int | None = None
    ) -> Decoded:
        """Takes one message.

        Args:
            data: The message, not compressed; may be used anew once this has returned.
            json: Whether it is OTLP/JSON instead of protobuf.
            wire_bytes: How long it was when it came, if not as long as it is now.

        Returns:
            What it held, for the answer.

        Raises:
            FullError: The sink is full; counted.
            ValueError: It is not an OTLP trace message; counted.
        """
        received_ns = time.time_ns()
        if self._sink.full():
            self.counts.refuse("full")
            raise FullError
        try:
            decoded = decode_json(data) if json else decode_protobuf(data)
        except ValueError:
            self.counts.refuse("malformed")
            raise
        # A message without records says nothing to the ledger.
        if len(decoded.rows) and not self._sink.put(decoded.rows, received_ns):
            self.counts.refuse("full")
            raise FullError
        self.counts.took(
            len(data) if wire_bytes is None else wire_bytes, decoded.read, decoded.ignored, decoded.invalid
        )
        if self._forwarder is not None and decoded.ignored:
            self._forwarder.put(bytes(data), decoded.ignored, json=json)
        return decoded
