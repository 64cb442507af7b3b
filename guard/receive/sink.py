"""What receivers put records into: the queue in front of the ledger, as they see it."""

from __future__ import annotations

from typing import Protocol

from guard.receive.decode import Rows


class Sink(Protocol):
    """A bounded queue. Any thread may call it; none waits in it."""

    def put(self, rows: Rows, received_ns: int) -> bool:
        """Queues the records of one message, all or none.

        Args:
            rows: The records; who gave them must not touch them afterwards.
            received_ns: When the message came, in nanoseconds since the Unix epoch.

        Returns:
            False if there is no room, or never will be; the records may then be given again.
        """
