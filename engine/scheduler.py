"""What the next step computes: continuous batching with chunked prefill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Chunk:
    """A sequence's part of a step."""

    sequence: Sequence
    count: int
    """Tokens computed, from `Sequence.computed` on."""
    table: list[int] | None = None
    """The block table that attention uses, where it is not the sequence's own (fault stale-block-table)."""

    @property
    def start(self) -> int:
        """Tokens before it."""
        return self.sequence.computed

    @property
    def stop(self) -> int:
        """Tokens after it."""
        return self.sequence.computed + self.count

    @property
    def last(self) -> bool:
        """Whether the next token can be chosen after it."""
        return self.count == self.sequence.pending

    @property
    def pages(self) -> list[int]:
        """The block table that attention uses."""
        return self.sequence.pages if self.table is None else self.table


def plan(sequences: Iterable[Sequence], max_batch: int, chunk_tokens: int) -> list[Chunk]:
    """The next step's batch.

    Sequences that only need one token computed always get it, so that a long prompt does not hold up those that
    are being answered; the other tokens of the step go to the sequences in order.

    Args:
        sequences: Those that have pages for what is to be computed, oldest first.
        max_batch: Sequences a step.
        chunk_tokens: Tokens a step that are not single ones.
    """
    chunks: list[Chunk] = []
    budget = chunk_tokens
    for sequence in sequences:
        if len(chunks) == max_batch:
            break
        count = sequence.pending
        if count > 1:
            count = min(count, budget)
            budget -= count
        if count:
            chunks.append(Chunk(sequence, count))
    return chunks
