from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.attention import BatchMeta, paged_attention


def naive(q: Tensor, ks: Tensor, vs: Tensor, first: int) -> Tensor:
    """Attention of one sequence, row by row: q [n, heads, d] from position `first` on, ks, vs [length, kv_heads, d]."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // ks.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen = first + row + 1
            k, v = ks[:seen, head // group].double(), vs[:seen, head // group].double()
            scores = (k @ q[row, head].double()) / math.sqrt(q.shape[2])
            out[row, head] = torch.softmax(scores, 0) @ v
    return out


class World:
    """A pool full of NaN and some sequences whose k and v are known."""

    def __init__(self, seed: int, *, pages: int, layers: int, page_tokens: int, kv_heads: int, width: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = torch.full((pages, layers, 2, page_tokens, kv_heads, width), float("nan"))
        self.free = list(range(pages))
        random.Random(seed).shuffle(self.free)
        self.tables: list[list[int]] = []
        self.kept: list[list[tuple[Tensor, Tensor]]] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def sequence(self, room: int) -> int:
        _pages, layers, _, page_tokens, kv_heads, width = self.pool.shape
        self.tables.append([self.free.pop() for _ in range(-(-room // page_tokens))])
        empty = torch.empty(0, kv_heads, width)
        self.kept.append([(empty, empty)] * layers)
        return len(self.tables) - 1

    def step(self, new: dict[int, int], heads: int) -> None:
        """Feeds so many new tokens of each sequence and checks every layer against the naive loop."""
        _, layers, _, _, kv_heads, width = self.pool.shape
        members = list(new)
        starts = [len(self.kept[i][0][0]) for i in members]
        lengths = [start + new[i] for start, i in zip(starts, members, strict=True)]
        meta = BatchMeta.build(self.pool, [self.tables[i] for i in members], lengths, list(new.values()))
        total = sum(new.values())
        for layer in range(layers):
            q = self.randn(total, heads, width)
            k, v = self.randn(total, kv_heads, width), self.randn(total, kv_heads, width)
            out = paged_attention(q, k, v, self.pool, layer, meta)
            at = 0
            for i, start in zip(members, starts, strict=True):
                here = slice(at, at + new[i])
                ks, vs = (torch.cat((old, x[here])) for old, x in zip(self.kept[i][layer], (k, v), strict=True))
                self.kept[i][layer] = (ks, vs)
                expected = naive(q[here], ks, vs, start).float()
                torch.testing.assert_close(out[here], expected, rtol=1e-4, atol=1e-5)
                at += new[i]
        positions = [p for i, s in zip(members, starts, strict=True) for p in range(s, s + new[i])]
        assert meta.positions.tolist() == positions


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_equals_the_naive_loop(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    world = World(
        data.draw(st.integers(0, 2**32)),
        pages=80,
        layers=2,
        page_tokens=data.draw(st.sampled_from([1, 2, 3, 4, 16])),
        kv_heads=kv_heads,
        width=2 * data.draw(st.integers(1, 9)),
    )
    for _ in range(data.draw(st.integers(1, 5))):
        world.sequence(room=16)
    for _ in range(data.draw(st.integers(1, 4))):
        new = {
            i: n
            for i in range(len(world.tables))
            if (n := min(data.draw(st.sampled_from([0, 1, 1, 2, 5])), 16 - len(world.kept[i][0][0])))
        }
        if new:
            world.step(new, kv_heads * group)


def test_lengths_far_apart_in_one_batch() -> None:
    world = World(3, pages=80, layers=1, page_tokens=4, kv_heads=2, width=8)
    lengths = [1, 2, 60, 58, 17, 130]
    for length in lengths:
        world.sequence(room=length + 1)
    world.step(dict(enumerate(lengths)), heads=4)
    world.step(dict.fromkeys(range(len(lengths)), 1), heads=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("new", [[1], [1, 1], [3, 1], [4, 2]])
def test_what_lies_behind_the_end_never_reaches_the_output(dtype: torch.dtype, new: list[int]) -> None:
    tables, lengths = [[2, 0], [1, 3]], [6, 5]
    tables, lengths = tables[: len(new)], lengths[: len(new)]
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn((5, 1, 2, 4, 2, 8), generator=generator).to(dtype)
    dirty = clean.clone()
    dirty[4] = float("nan")
    for table, length in zip(tables, lengths, strict=True):
        dirty[table[1], :, :, length - 4 :] = float("nan")
    q, k, v = (torch.randn((sum(new), h, 8), generator=generator).to(dtype) for h in (4, 2, 2))
    outs = [paged_attention(q, k, v, pool, 0, BatchMeta.build(pool, tables, lengths, new)) for pool in (clean, dirty)]
    assert outs[0].dtype == dtype
    assert torch.isfinite(outs[1]).all()
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)


def test_writes_only_the_new_tokens_slots() -> None:
    pool = torch.zeros((4, 3, 2, 4, 1, 2))
    k, v = torch.ones((2, 1, 2)), 2 * torch.ones((2, 1, 2))
    paged_attention(k, k, v, pool, 1, BatchMeta.build(pool, [[3, 1]], [5], [2]))
    expected = torch.zeros_like(pool)
    for page, place in ((3, 3), (1, 0)):
        expected[page, 1, 0, place], expected[page, 1, 1, place] = 1, 2
    assert torch.equal(pool, expected)


def test_last_names_each_sequences_last_row() -> None:
    pool = torch.zeros((8, 1, 2, 4, 1, 2))
    meta = BatchMeta.build(pool, [[0, 1], [2], [3, 4]], [5, 1, 8], [3, 1, 8])
    assert meta.last.tolist() == [2, 3, 11]


@pytest.mark.parametrize(
    ("tables", "lengths", "new", "named"),
    [
        ([], [], [], "at least one"),
        ([[0]], [1, 2], [1], "as many tables"),
        ([[0]], [4], [0], "sequence 0: 0 new tokens of 4"),
        ([[0]], [2], [3], "sequence 0: 3 new tokens of 2"),
        ([[0], [1]], [4, 5], [1, 1], "sequence 1: 5 tokens need 2 pages"),
        ([[0, 8]], [5], [1], r"sequence 0: .* outside 0\.\.7"),
        ([[-1]], [1], [1], r"sequence 0: .* outside 0\.\.7"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    tables: list[list[int]], lengths: list[int], new: list[int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        BatchMeta.build(torch.zeros((8, 1, 2, 4, 1, 2)), tables, lengths, new)


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros((8, 1, 4, 1, 2)),
        torch.zeros((8, 1, 3, 4, 1, 2)),
        torch.zeros((2, 8, 2, 4, 1, 2)).transpose(0, 1),
    ],
)
def test_a_pool_of_another_shape_is_refused(pool: Tensor) -> None:
    with pytest.raises(ValueError, match="pool: contiguous"):
        BatchMeta.build(pool, [[0]], [1], [1])
