"""Runs a step of the model over the page pool, and refuses pages that are not what their reader expects."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine import sampling
from engine.kernels.step import StepTables, refused_pages, step_attention
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

    def step(self, chunks: Seq[Chunk]) -> tuple[dict[Sequence, int], dict[Sequence, list[int]]]:
        """Computes the chunks and chooses the next token of every sequence that is at its end.

        Pages are compared with their tags before the first layer, so that nothing is written for a sequence whose
        pages are not its own any more, and again as they are read or behind the last layer, because a writer that
        should not be there may come in between.

        Returns:
            The next tokens; and for each sequence that was about to read, or has read, pages which are not what it
            expects, those pages in the order of its table, at least one: it has got no token.
        """
        refused = self._refused_before(chunks)
        chunks = [chunk for chunk in chunks if chunk.sequence not in refused]
        if not chunks:
            return {}, refused
        logits, late = self._forward(chunks)
        rows: list[tuple[Sequence, Tensor]] = []
        for chunk, row, pages in zip(chunks, logits, late, strict=True):
            if pages:
                refused[chunk.sequence] = pages
                continue
            chunk.sequence.computed = chunk.stop
            if not chunk.sequence.pending:
                rows.append((chunk.sequence, row))
        return _choose(rows), refused

    def _refused_before(self, chunks: Seq[Chunk]) -> dict[Sequence, list[int]]:
        """Of the pages that hold tokens already; those that the step is the first to write are nobody's yet."""
        if not self._check_tags:
            return {}
        found = refused_pages(
            self._pool.tags,
            [chunk.pages for chunk in chunks],
            [chunk.sequence.tags for chunk in chunks],
            [self._pool.pages_for(chunk.start) for chunk in chunks],
        )
        return {chunk.sequence: pages for chunk, pages in zip(chunks, found, strict=True) if pages}

    def _forward(self, chunks: Seq[Chunk]) -> tuple[Tensor, list[list[int]]]:
        """[chunks, vocab], the scores of the token after each chunk; and the pages refused meanwhile."""
        kv = self._pool.kv
        tables = StepTables(
            [chunk.pages for chunk in chunks],
            [chunk.sequence.tags for chunk in chunks],
            [chunk.stop for chunk in chunks],
            [chunk.count for chunk in chunks],
        )
        step = step_attention(kv, self._pool.tags, tables, guard=self._check_tags)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._between_layers()
            return step.attend(layer, q, k, v)

        tokens = [token for chunk in chunks for token in chunk.sequence.tokens(chunk.start, chunk.stop)]
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
