"""A message's way from its bytes into the sink: what every receiver does, whatever protocol it speaks.

When the sink is full a sender waits a little before it is refused: the ledger is busy for milliseconds, and who is
told to come back later comes when its records are taken for lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from guard.counters import ReceiverCounts
from guard.receive.decode import Decoded, decode_json, decode_protobuf
from guard.receive.sink import Sink

if TYPE_CHECKING:
    from guard.receive.forward import Forwarder

PATIENCE_S = 0.1
"""How long a message waits for room in the sink; less than the reorder window."""
POLL_S = 0.002


class FullError(Exception):
    """The sink had no room in time: nothing of the message was kept, and the sender should send it again."""


class Message(NamedTuple):
    """A message that was read, and is in no sink yet."""

    decoded: Decoded
    received_ns: int
    size: int
    forwarded: bytes | None
    """The message, if it is to be forwarded."""
    json: bool


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

    def read(
        self, data: bytes | bytearray | memoryview, *, json: bool = False, wire_bytes: int | None = None
    ) -> Message:
        """Reads a message.

        Args:
            data: The message, not compressed; may be used anew once this has returned.
            json: Whether it is OTLP/JSON instead of protobuf.
            wire_bytes: How long it was when it came, if not as long as it is now.

        Raises:
            ValueError: It is not an OTLP trace message.
        """
        received_ns = time.time_ns()
        decoded = decode_json(data) if json else decode_protobuf(data)
        forwarded = bytes(data) if self._forwarder is not None and decoded.ignored else None
        return Message(decoded, received_ns, len(data) if wire_bytes is None else wire_bytes, forwarded, json)

    def put(self, message: Message) -> bool:
        """Queues what was read, and counts it; False if the sink has no room now."""
        decoded = message.decoded
        # A message without records says nothing to the ledger.
        if len(decoded.rows) and not self._sink.put(decoded.rows, message.received_ns):
            return False
        self.counts.took(message.size, decoded.read, decoded.ignored, decoded.invalid)
        if self._forwarder is not None and message.forwarded is not None:
            self._forwarder.put(message.forwarded, decoded.ignored, json=message.json)
        return True

    def take(self, data: bytes) -> Decoded:
        """Reads and queues a message in protobuf; waits for room, so not for an event loop.

        Returns:
            What it held, for the answer.

        Raises:
            FullError: There was no room in time; counted.
            ValueError: It is not an OTLP trace message; counted.
        """
        try:
            message = self.read(data)
        except ValueError:
            self.counts.refuse("malformed")
            raise
        deadline = time.monotonic() + PATIENCE_S
        while not self.put(message):
            if time.monotonic() >= deadline:
                self.counts.refuse("full")
                raise FullError
            time.sleep(POLL_S)
        return message.decoded
