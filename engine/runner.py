"""Runs steps of the model over the page pool, and refuses pages that are not what their reader expects."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine import sampling
from engine.kernels.step import StepTables, TagCheck, step_attention
from engine.model.llama import Model
from engine.pool import PagePool
from engine.scheduler import Chunk
from engine.sequence import Sequence


class Runner:
    """The model on one pool.

    Args:
        model: Any.
        pool: Of the model's page shape.
        check_tags: False switches the check of owner tags off, as the engines had none that a fault is taken from.
        between_layers: Called before each layer's attention: what must not wait for a whole step.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        check_tags: bool = True,
        between_layers: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._check_tags = check_tags
        self._between_layers = between_layers

    def begin(self, chunks: Seq[Chunk]) -> Step:
        """Compares the pages that the chunks are about to read with their tags; nothing is read or written yet."""
        step = self._begin(chunks, {})
        found = step.check.before() if step.check is not None else []
        if not any(found):
            return step
        refused = {chunk.sequence: pages for chunk, pages in zip(chunks, found, strict=True) if pages}
        return self._begin([chunk for chunk in chunks if chunk.sequence not in refused], refused)

    def _begin(self, chunks: Seq[Chunk], refused: dict[Sequence, list[int]]) -> Step:
        tables = StepTables(
            [chunk.pages for chunk in chunks],
            [chunk.sequence.tags for chunk in chunks],
            [chunk.stop for chunk in chunks],
            [chunk.count for chunk in chunks],
        )
        check = TagCheck(self._pool.tags, tables, self._pool.page_tokens) if self._check_tags and chunks else None
        return Step(self._model, self._pool, chunks, refused, tables, check, self._between_layers)


class Step:
    """A step that `Runner.begin` has looked at.

    Attributes:
        chunks: Those that can be computed.
        refused: For each sequence whose pages were not what it expects, those pages in the order of its table, at
            least one. It is not among the chunks.
        check: Of the chunks; None: tags are not looked at.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        chunks: Seq[Chunk],
        refused: dict[Sequence, list[int]],
        tables: StepTables,
        check: TagCheck | None,
        between_layers: Callable[[], None],
    ) -> None:
        self.chunks = chunks
        self.refused = refused
        self.check = check
        self._model = model
        self._pool = pool
        self._tables = tables
        self._between_layers = between_layers

    def compute(self) -> tuple[dict[Sequence, int], dict[Sequence, list[int]]]:
        """Computes the chunks and chooses the next token of every sequence that is at its end.

        Pages are compared with their tags once more, as they are read or behind the last layer, because a writer that
        should not be there may have come in between.

        Returns:
            The next tokens; and what is refused only now, as in `refused`: it was read, and has got no token.
        """
        if not self.chunks:
            return {}, {}
        logits, late = self._forward()
        refused: dict[Sequence, list[int]] = {}
        rows: list[tuple[Sequence, Tensor]] = []
        for chunk, row, pages in zip(self.chunks, logits, late, strict=True):
            if pages:
                refused[chunk.sequence] = pages
                continue
            chunk.sequence.computed = chunk.stop
            if not chunk.sequence.pending:
                rows.append((chunk.sequence, row))
        return _choose(rows), refused

    def _forward(self) -> tuple[Tensor, list[list[int]]]:
        """[chunks, vocab], the scores of the token after each chunk; and the pages refused meanwhile."""
        kv = self._pool.kv
        step = step_attention(kv, self._pool.tags, self._tables, self.check)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._between_layers()
            return step.attend(layer, q, k, v)

        tokens = [token for chunk in self.chunks for token in chunk.sequence.tokens(chunk.start, chunk.stop)]
        hidden = self._model.forward(torch.tensor(tokens, device=kv.device), step.positions, attention)
        logits = self._model.logits(hidden[step.last])
        return logits, step.refused()


def _choose(rows: list[tuple[Sequence, Tensor]]) -> dict[Sequence, int]:
    chosen: dict[Sequence, int] = {}
    greedy = [(sequence, row) for sequence, row in rows if not sequence.sampling.temperature]
    if greedy:
        tokens = sampling.greedy(torch.stack([row for _, row in greedy]))
        chosen = {sequence: token for (sequence, _), token in zip(greedy, tokens, strict=True)}
    for sequence, row in rows:
        if sequence not in chosen:
            s = sequence.sampling
            chosen[sequence] = sampling.sample(row, s.temperature, s.top_p, sequence.seed, len(sequence.output))
    return chosen
