"""Runs a step of the model over the page pool, and refuses pages that are not what their reader expects."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine import sampling
from engine.kernels.attention import BatchMeta, paged_attention
from engine.kernels.tags import mismatched
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

        Pages are compared with their tags before the first layer and after the last, because a writer that
        should not be there may come in between.

        Returns:
            The next tokens, and the sequences that got none because pages are not what they expect, with those
            pages in the block table's order.
        """
        for chunk in chunks:
            self._tag_new_pages(chunk)
        refused = self._refused(chunks)
        chunks = [chunk for chunk in chunks if chunk.sequence not in refused]
        if not chunks:
            return {}, refused
        logits = self._forward(chunks)
        late = self._refused(chunks)
        rows = [(chunk, row) for chunk, row in zip(chunks, logits, strict=True) if chunk.sequence not in late]
        for chunk, _ in rows:
            chunk.sequence.computed = chunk.stop
        chosen = _choose([(chunk.sequence, row) for chunk, row in rows if not chunk.sequence.pending])
        return chosen, refused | late

    def _tag_new_pages(self, chunk: Chunk) -> None:
        """Pages that this chunk is the first to write become the sequence's."""
        page_tokens = self._pool.page_tokens
        first, stop = -(-chunk.start // page_tokens), -(-chunk.stop // page_tokens)
        if first < stop:
            self._pool.tags[chunk.pages[first:stop]] = chunk.sequence.tags[first:stop]

    def _refused(self, chunks: Seq[Chunk]) -> dict[Sequence, list[int]]:
        if not self._check_tags:
            return {}
        counts = [self._pool.pages_for(chunk.stop) for chunk in chunks]
        tables = torch.tensor(
            [page for chunk, count in zip(chunks, counts, strict=True) for page in chunk.pages[:count]]
        )
        expected = torch.cat([chunk.sequence.tags[:count] for chunk, count in zip(chunks, counts, strict=True)])
        wrong = mismatched(self._pool.tags, tables, expected)
        if not bool(wrong.any()):
            return {}
        parts = zip(chunks, torch.split(tables, counts), torch.split(wrong, counts), strict=True)
        return {chunk.sequence: table[part].tolist() for chunk, table, part in parts if bool(part.any())}

    def _forward(self, chunks: Seq[Chunk]) -> Tensor:
        """[chunks, vocab]: scores of the token after each chunk."""
        pool = self._pool.kv
        meta = BatchMeta.build(
            pool,
            [chunk.pages for chunk in chunks],
            [chunk.stop for chunk in chunks],
            [chunk.count for chunk in chunks],
        )

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._between_layers()
            return paged_attention(q, k, v, pool, layer, meta)

        tokens = [token for chunk in chunks for token in chunk.sequence.tokens(chunk.start, chunk.stop)]
        hidden = self._model.forward(torch.tensor(tokens), meta.positions, attention)
        return self._model.logits(hidden[meta.last])


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
