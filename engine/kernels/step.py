"""A step of the engine over its pool: which attention runs, and which pages it refused.

Where the pool lies on a GPU it is the guarded Triton kernel, which looks at every page as it reads it. Where it lies
on a CPU it is torch's own attention over the gathered pages (`engine.kernels.attention`), and the same rule is applied
to the block tables as a whole behind the last layer. On either, the tables are compared in front of the first layer too
(`TagCheck`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.attention import BatchMeta, paged_attention, positions_of, used_tables
from engine.kernels.backend import Backend, in_triton
from engine.kernels.guarded import GuardedBatch, guarded_attention
from engine.kernels.ownership import check_pages, refused_entries
from engine.kernels.pages import TokenWrites, write_tokens


@dataclass(frozen=True)
class StepTables:
    """What a step's sequences read and write."""

    tables: Sequence[Sequence[int]]
    """Each one's pages."""
    expected: Sequence[Tensor]
    """For each, [at least its pages, 3] int64: the tags that they must bear."""
    lengths: Sequence[int]
    """Each one's tokens after the step."""
    new_tokens: Sequence[int]
    """How many of those are this step's."""


class StepAttention(Protocol):
    """The attention of one step."""

    positions: Tensor
    """[n] int64: each new token's place in its sequence."""
    last: Tensor
    """[sequences] int64: the row of each one's last new token."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k and v and attends, see `engine.model.llama.Attention`; to be called layer by layer, from 0."""

    def refused(self) -> list[list[int]]:
        """Once all layers are done: for each sequence the pages that are, or were, not what is expected.

        A sequence that has one must be given no token: what was computed for it may hold somebody else's bytes.
        """


class TagCheck:
    """A step's block tables against the tags, by `engine.kernels.ownership`: built once, asked in front and behind.

    Args:
        tags: [pages, 3] int64.
        step: The sequences.
        page_tokens: Tokens a page.
    """

    def __init__(self, tags: Tensor, step: StepTables, page_tokens: int) -> None:
        used = [table[: -(-length // page_tokens)] for table, length in zip(step.tables, step.lengths, strict=True)]
        expected = [theirs[: len(table)] for theirs, table in zip(step.expected, used, strict=True)]
        self._tags = tags
        self._entries = list(chain.from_iterable(used))
        self._ends = [0, *accumulate(map(len, used))]
        self._pages = torch.tensor(self._entries, device=tags.device)
        self._expected = torch.cat(expected).to(tags.device)
        self._fresh: list[int] = []
        """Entries whose pages the step is the first to write: they are nobody's yet."""
        for start, table, length, new in zip(self._ends[:-1], used, step.lengths, step.new_tokens, strict=True):
            self._fresh += range(start + -(-(length - new) // page_tokens), start + len(table))

    def before(self) -> list[list[int]]:
        """In front of the first layer: for each sequence the pages refused of those that hold tokens already."""
        wrong = self._wrong()
        if self._fresh:
            wrong[self._fresh] = False
        return self._named(wrong)

    def behind(self) -> list[list[int]]:
        """Behind the last layer: for each sequence the pages refused, in the order of its table."""
        return self._named(self._wrong())

    def _wrong(self) -> Tensor:
        if in_triton(self._tags, "auto"):
            ends = torch.tensor(self._ends, device=self._tags.device)
            return check_pages(self._tags, self._pages, self._expected, indptr=ends).refused
        # Twice a step, where a step may take no millisecond: the rule without the counts.
        return refused_entries(self._tags, self._pages, self._expected)

    def _named(self, wrong: Tensor) -> list[list[int]]:
        if not bool(wrong.any()):
            return [[] for _ in self._ends[1:]]
        marks = wrong.tolist()
        return [[self._entries[i] for i in range(a, b) if marks[i]] for a, b in pairwise(self._ends)]


def step_attention(
    kv: Tensor, tags: Tensor, step: StepTables, check: TagCheck | None, *, backend: Backend = "auto"
) -> StepAttention:
    """The attention for a step over a pool: Triton's on a GPU, torch's on a CPU.

    Args:
        kv: [pages, layers, 2, page_tokens, kv_heads, head_dim], contiguous.
        tags: [pages, 3] int64 on the same device.
        step: The sequences; a page which the step is the first to write gets its tag behind layer 0's bytes.
        check: Of the same step; None: no tag is looked at.
        backend: See `engine.kernels.backend`.

    Raises:
        ValueError: The sequences do not fit their tables or the pool; names the sequence.
    """
    return (_TritonStep if in_triton(kv, backend) else _TorchStep)(kv, tags, step, check)


class _TorchStep:
    def __init__(self, kv: Tensor, tags: Tensor, step: StepTables, check: TagCheck | None) -> None:
        self._meta = BatchMeta.build(kv, step.tables, step.lengths, step.new_tokens)
        self.positions, self.last = self._meta.positions, self._meta.last
        self._kv, self._tags, self._step, self._check = kv, tags, step, check
        self._page_tokens = kv.shape[3]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = paged_attention(q, k, v, self._kv, layer, self._meta)
        if layer == 0:
            self._tag_fresh_pages()
        return mixed

    def refused(self) -> list[list[int]]:
        return [[] for _ in self._step.tables] if self._check is None else self._check.behind()

    def _tag_fresh_pages(self) -> None:
        step = self._step
        for table, expected, length, new in zip(step.tables, step.expected, step.lengths, step.new_tokens, strict=True):
            first, stop = -(-(length - new) // self._page_tokens), -(-length // self._page_tokens)
            if first < stop:
                self._tags[list(table[first:stop])] = expected[first:stop]


class _TritonStep:
    def __init__(self, kv: Tensor, tags: Tensor, step: StepTables, check: TagCheck | None) -> None:
        device = kv.device
        used_tables(step.tables, step.lengths, step.new_tokens, kv.shape[0], kv.shape[3])
        self.positions = positions_of(step.lengths, step.new_tokens).to(device)
        self.last = torch.tensor(list(accumulate(step.new_tokens)), device=device) - 1
        self._kv, self._tags, self._guard = kv, tags, check is not None
        self._writes = TokenWrites.build(step.tables, step.lengths, step.new_tokens, step.expected, kv.shape[3], device)
        starts = [0, *accumulate(step.new_tokens[:-1])]
        places = range(len(starts))
        # Apart, because a tile of a prompt's tokens is another kernel than a single token's.
        kinds = ([i for i in places if step.new_tokens[i] == 1], [i for i in places if step.new_tokens[i] > 1])
        self._batches = [
            (
                members,
                GuardedBatch.build(
                    [step.tables[i] for i in members],
                    [step.expected[i] for i in members],
                    [step.lengths[i] for i in members],
                    [step.new_tokens[i] for i in members],
                    device,
                    starts=[starts[i] for i in members],
                ),
            )
            for members in kinds
            if members
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pages, v_pages = self._kv[:, layer, 0], self._kv[:, layer, 1]
        write_tokens(k_pages, v_pages, self._tags, k, v, self._writes, tag=layer == 0, backend="triton")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for _, batch in self._batches:
            guarded_attention(q, k_pages, v_pages, self._tags, batch, out=out, guard=self._guard, backend="triton")
        return out

    def refused(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.last]
        for members, batch in self._batches:
            marks = batch.marks
            if not bool(marks.any()):
                continue
            for request, entry in marks.nonzero().tolist():
                found[members[request]].append(int(batch.tables[request, entry]))
        return found
