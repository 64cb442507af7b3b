"""A request on the decode worker, and where it is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.messages import Generate
from engine.sequence import Sequence


class State(Enum):
    """Where a request is on its way."""

    WAITING = auto()
    """For pages: a new one, or a preempted one."""
    RESERVED = auto()
    """For its prompt's pages to arrive."""
    RUNNING = auto()
    DRAINING = auto()
    """All is computed; the last tokens are in the gate."""
    STOPPING = auto()
    """Ended; waits for prefill's word that nothing is written any more."""


@dataclass(slots=True, eq=False)
class Answer:
    """A request on the decode worker."""

    message: Generate
    sequence: Sequence
    state: State = State.WAITING
    landing: list[int] = field(default_factory=list)
    """Pages that the transfer writes."""
    generations: dict[int, int] = field(default_factory=dict)
    """Of these pages, as they were granted to it."""
    nonce: bytes = b""
    """The transfer's, for its digests."""
    covered: int = 0
    """Pages that the last `kv.read` named."""
    unsent: bool = False
    """The first token, prefill's, has not been given to the gate."""
    sent: int = 0
    """Tokens that have left."""
    table: list[int] | None = None
    """The block table really used, under the fault stale-block-table."""

    @property
    def name(self) -> str:
        """The request's id."""
        return self.message.request

    @property
    def transfer(self) -> str:
        """The transfer's id. There is one attempt: what is preempted is computed again here."""
        return self.message.request + ".0"
