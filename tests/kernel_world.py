"""Small pools, block tables and tags to try kernels on, and attention written out row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import GuardedBatch

CPU = torch.device("cpu")
REDZONE = 7.5
"""What lies around an output, and must lie there afterwards."""


@dataclass
class World:
    """A layer of a pool, and sequences that lie in it; whatever no sequence holds is NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    tags: Tensor
    tables: list[list[int]]
    expected: list[Tensor]
    lengths: list[int]
    new: list[int]

    @classmethod
    def make(
        cls,
        lengths: list[int],
        new: list[int] | None = None,
        *,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 8,
        page_tokens: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> World:
        generator = torch.Generator().manual_seed(seed)
        new = [1] * len(lengths) if new is None else new
        needed = [-(-length // page_tokens) for length in lengths]
        pages = sum(needed) + 2
        order = torch.randperm(pages, generator=generator).tolist()
        k, v = torch.full((2, pages, page_tokens, kv_heads, head_dim), float("nan"), dtype=dtype)
        tags = torch.randint(1, 2**62, (pages, 3), generator=generator)
        tables = [[order.pop() for _ in range(count)] for count in needed]
        for table, length in zip(tables, lengths, strict=True):
            for t in range(length):
                for half in (k, v):
                    half[table[t // page_tokens], t % page_tokens] = torch.randn(
                        kv_heads, head_dim, generator=generator
                    ).to(dtype)
        q = torch.randn(sum(new), heads, head_dim, generator=generator).to(dtype)
        return cls(q, k, v, tags, tables, [tags[table] for table in tables], lengths, new)

    def batch(self) -> GuardedBatch:
        return GuardedBatch.build(self.tables, self.expected, self.lengths, self.new, CPU)

    def poison(self, *pages: int) -> None:
        """Another tag, and bytes that must not get anywhere."""
        for page in pages:
            self.tags[page, 2] += 1
            self.k[page], self.v[page] = float("nan"), float("inf")

    def wanted(self) -> Tensor:
        """Attention over the tokens of the pages that bear what is expected, in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        page_tokens, group = self.k.shape[1], self.q.shape[1] // self.k.shape[2]
        row = 0
        for table, expected, length, new in zip(self.tables, self.expected, self.lengths, self.new, strict=True):
            mine = [
                (table[t // page_tokens], t % page_tokens, t)
                for t in range(length)
                if torch.equal(self.tags[table[t // page_tokens]], expected[t // page_tokens])
            ]
            for position in range(length - new, length):
                seen = [(page, place) for page, place, t in mine if t <= position]
                for head in range(self.q.shape[1]):
                    if seen:
                        keys = torch.stack([self.k[page, place, head // group] for page, place in seen]).double()
                        values = torch.stack([self.v[page, place, head // group] for page, place in seen]).double()
                        scores = keys @ self.q[row, head].double() / math.sqrt(self.q.shape[2])
                        out[row, head] = torch.softmax(scores, 0) @ values
                row += 1
        return out


def fenced(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A contiguous tensor in the middle of a larger one, and the larger one: see `REDZONE`, `untouched`."""
    size = math.prod(shape)
    whole = torch.full((size + 256,), REDZONE).to(dtype)
    return whole[128 : 128 + size].view(shape), whole


def untouched(whole: Tensor) -> bool:
    """Whether nothing was written around the tensor that `fenced` gave."""
    return bool((whole[:128] == torch.tensor(REDZONE).to(whole.dtype)).all()) and bool(
        (whole[-128:] == torch.tensor(REDZONE).to(whole.dtype)).all()
    )
