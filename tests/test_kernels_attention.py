"""Guarded attention, in torch and in Triton's interpreter, against attention written out row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_world import CPU, World, fenced, untouched

from engine.kernels import GuardedBatch, guarded_attention
from engine.kernels.backend import Backend

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BACKENDS: tuple[Backend, ...] = ("torch", "triton")

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def attend(world: World, backend: Backend, batch: GuardedBatch | None = None, **options: Any) -> torch.Tensor:
    """With a redzone around the output."""
    batch = batch or world.batch()
    out, whole = fenced(*world.q.shape, dtype=world.q.dtype)
    guarded_attention(world.q, world.k, world.v, world.tags, batch, out=out, backend=backend, **options)
    assert untouched(whole)
    return out


def equal(world: World, out: torch.Tensor) -> None:
    assert torch.isfinite(out).all()
    bound = TOLERANCE[world.q.dtype]
    torch.testing.assert_close(out.double(), world.wanted(), rtol=bound, atol=bound)


@each_backend
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_tokens"),
    [(1, 1, 16, 4), (6, 2, 12, 5), (9, 3, 64, 16), (8, 1, 20, 3), (2, 2, 80, 1)],
)
def test_decode_of_ragged_sequences(
    backend: Backend, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_tokens: int
) -> None:
    world = World.make(
        [1, 37, 8], heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, dtype=dtype
    )
    batch = world.batch()
    equal(world, attend(world, backend, batch))
    assert batch.check().clean


@each_backend
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("new", [[20, 3, 1], [5, 1, 8], [1, 17, 2]])
def test_chunks_behind_a_cached_prefix_are_causal(backend: Backend, dtype: torch.dtype, new: list[int]) -> None:
    world = World.make([20, 23, 8], new, heads=6, kv_heads=2, head_dim=12, page_tokens=3, dtype=dtype)
    batch = world.batch()
    equal(world, attend(world, backend, batch))
    assert batch.check().clean


@pytest.mark.parametrize("splits", [1, 2, 5, 24])
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 1, 2]])
def test_however_far_the_work_is_split(splits: int, new: list[int]) -> None:
    world = World.make([150, 9, 64], new, page_tokens=5)
    world.poison(world.tables[0][0], world.tables[0][29], world.tables[2][4])
    batch = world.batch()
    equal(world, attend(world, "triton", batch, splits=splits))
    assert batch.check().counts.tolist() == [2, 0, 1]


@each_backend
def test_refused_pages_are_counted_named_and_never_reach_an_output(backend: Backend) -> None:
    world = World.make([19, 12, 30, 4], heads=4, kv_heads=2, page_tokens=4)
    world.poison(world.tables[0][3], world.tables[0][1], *world.tables[2][5:], world.tables[3][0])
    batch = world.batch()
    out = attend(world, backend, batch)
    equal(world, out)
    assert not out[3].any(), "no page of its own: zeros"
    check = batch.check()
    assert check.counts.tolist() == [2, 0, 3, 1]
    assert check.first.tolist() == [1, -1, 5, 0]
    assert check.page.tolist() == [world.tables[0][1], -1, world.tables[2][5], world.tables[3][0]]
    assert check.refused[0].nonzero()[:, 0].tolist() == [1, 3]


@each_backend
def test_refused_pages_of_a_cached_prefix(backend: Backend) -> None:
    world = World.make([21, 33], [7, 20], heads=6, kv_heads=2, page_tokens=4)
    world.poison(world.tables[0][2], world.tables[1][0], world.tables[1][8])
    batch = world.batch()
    equal(world, attend(world, backend, batch))
    assert batch.check().counts.tolist() == [1, 2]
    assert batch.check().first.tolist() == [2, 0]


@each_backend
def test_a_page_of_many_tokens_is_one_violation_whoever_looks(backend: Backend) -> None:
    world = World.make([200], [9], heads=4, kv_heads=4, page_tokens=96)
    world.poison(world.tables[0][1])
    batch = world.batch()
    for _ in range(2):  # marks only go up: a second layer counts nothing twice
        equal(world, attend(world, backend, batch))
    assert batch.check().counts.tolist() == [1]


@each_backend
@pytest.mark.parametrize("page", [-1, -(2**31), 10_000, 2**31 - 1])
def test_an_entry_outside_the_pool_is_a_violation(backend: Backend, page: int) -> None:
    world = World.make([9], page_tokens=4)
    expected = world.wanted()  # of the whole
    world.tables[0][1] = page
    batch = world.batch()
    out = attend(world, backend, batch)
    assert torch.isfinite(out).all()
    assert not torch.allclose(out.double(), expected)
    assert (batch.check().counts.tolist(), batch.check().page.tolist()) == ([1], [page])


@each_backend
def test_what_lies_behind_a_tables_end_is_not_looked_at(backend: Backend) -> None:
    world = World.make([6, 40], page_tokens=4)
    world.tables[0] += [99_999] * 3  # more pages than its length needs
    world.expected[0] = torch.cat((world.expected[0], torch.zeros(3, 3, dtype=torch.int64)))
    batch = world.batch()
    assert torch.isfinite(attend(world, backend, batch)).all()
    assert batch.check().clean


@each_backend
def test_a_shared_page_passes_for_all_who_expect_its_tag(backend: Backend) -> None:
    world = World.make([10, 7, 12], page_tokens=4)
    shared = world.tables[0][0]
    for place in (1, 2):
        world.tables[place][0] = shared
    world.expected[1] = world.tags[world.tables[1]]  # told of the sharing; the third is not
    batch = world.batch()
    equal(world, attend(world, backend, batch))
    assert batch.check().counts.tolist() == [0, 0, 1]


@each_backend
def test_who_expects_nobodys_tag_reads_nothing(backend: Backend) -> None:
    world = World.make([5], page_tokens=4)
    world.tags[world.tables[0][0]] = 0
    world.expected[0][0] = 0
    batch = world.batch()
    attend(world, backend, batch)
    assert batch.check().first.tolist() == [0]


@each_backend
@pytest.mark.parametrize("word", range(3))
def test_every_bit_of_a_tag_counts(backend: Backend, word: int) -> None:
    for bit in (0, 31, 32, 63):
        world = World.make([5], page_tokens=4)
        world.tags[world.tables[0][1], word] ^= 1 << bit if bit < 63 else -(2**63)
        batch = world.batch()
        attend(world, backend, batch)
        assert batch.check().first.tolist() == [1]


@pytest.mark.parametrize(("new", "splits"), [(1, 1), (1, 3), (6, 1)])
def test_a_tag_that_changes_after_it_was_read_is_caught(monkeypatch: pytest.MonkeyPatch, new: int, splits: int) -> None:
    from engine.kernels import guarded_triton

    world = World.make([40], [new], page_tokens=4)
    whole = world.wanted()
    stolen = world.tables[0][6]
    second_look = guarded_triton.look_again

    def somebody_comes_between(*arguments: Any) -> None:
        world.tags[stolen, 2] += 1
        second_look(*arguments)

    monkeypatch.setattr(guarded_triton, "look_again", somebody_comes_between)
    batch = world.batch()
    out = attend(world, "triton", batch, splits=splits)
    if splits == 1:
        torch.testing.assert_close(out[:1].double(), whole[:1], rtol=1e-5, atol=1e-5)  # read while it was its own
    assert batch.check().refused[0].nonzero()[:, 0].tolist() == [6]


def test_without_the_second_look_it_would_not_be() -> None:
    """What the test above rests on: nothing is marked before."""
    world = World.make([40], page_tokens=4)
    batch = world.batch()
    attend(world, "triton", batch)
    world.tags[world.tables[0][6], 2] += 1
    assert batch.check().clean


@pytest.mark.parametrize("new", [1, 6])
def test_a_tag_that_was_foreign_at_the_read_stays_marked_when_it_is_mended(
    monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    from engine.kernels import guarded_triton

    world = World.make([40], [new], page_tokens=4)
    right = world.tags.clone()
    world.poison(world.tables[0][6])
    expected = world.wanted()
    second_look = guarded_triton.look_again

    def somebody_comes_between(*arguments: Any) -> None:
        world.tags.copy_(right)
        second_look(*arguments)

    monkeypatch.setattr(guarded_triton, "look_again", somebody_comes_between)
    batch = world.batch()
    out = attend(world, "triton", batch, splits=1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert batch.check().refused[0].nonzero()[:, 0].tolist() == [6]


@each_backend
def test_without_the_guard_nothing_is_looked_at(backend: Backend) -> None:
    world = World.make([10, 3], page_tokens=4)
    whole = world.wanted()
    world.tags += 1
    batch = world.batch()
    out = attend(world, backend, batch, guard=False)
    torch.testing.assert_close(out.double(), whole, rtol=1e-5, atol=1e-5)
    assert batch.check().clean


def pools(world: World) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same k and v in the layouts of several engines."""
    both = torch.stack((world.k, world.v))
    ours = torch.full((len(world.k), 3, 2, *world.k.shape[1:]), float("nan"))
    ours[:, 1] = both.transpose(0, 1)
    heads_first = both.transpose(2, 3).contiguous().transpose(2, 3)
    dims_first = both.permute(0, 4, 3, 2, 1).contiguous().permute(0, 4, 3, 2, 1)
    return {
        "ours": (ours[:, 1, 0], ours[:, 1, 1]),
        "a tensor a layer": (both[0], both[1]),
        "k and v inside a page": tuple(both.transpose(0, 1).contiguous().unbind(1)),  # type: ignore[dict-item]
        "heads before tokens": (heads_first[0], heads_first[1]),
        "nothing in a row": (dims_first[0], dims_first[1]),
    }


@pytest.mark.parametrize("layout", list(pools(World.make([1]))))
def test_any_layout_of_the_pool(layout: str) -> None:
    world = World.make([17, 6], [3, 1], heads=4, kv_heads=2, page_tokens=5)
    expected = world.wanted().float()
    k, v = pools(world)[layout]
    for q in (world.q, world.q.repeat(1, 2, 1)[:, :4], world.q.transpose(1, 2).contiguous().transpose(1, 2)):
        out = guarded_attention(q, k, v, world.tags, world.batch(), backend="triton")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_triton_equals_torch_to_the_mark(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    kv_heads = data.draw(st.integers(1, 2))
    world = World.make(
        lengths,
        [data.draw(st.integers(1, min(length, 6))) for length in lengths],
        heads=kv_heads * data.draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=data.draw(st.integers(1, 20)),
        page_tokens=data.draw(st.integers(1, 18)),
        seed=data.draw(st.integers(0, 2**32)),
    )
    owned = [page for table in world.tables for page in table]
    world.poison(*data.draw(st.lists(st.sampled_from(owned), unique=True, max_size=4)))
    batches = {backend: world.batch() for backend in BACKENDS}
    splits = data.draw(st.integers(1, 4))
    for backend, batch in batches.items():
        equal(world, attend(world, backend, batch, splits=splits))
    assert torch.equal(batches["torch"].marks, batches["triton"].marks)


def test_what_does_not_fit_is_refused_by_name() -> None:
    world = World.make([6], heads=2)
    batch = world.batch()
    q, k, v, tags = world.q, world.k, world.v, world.tags
    for named, arguments in {
        "q: float32": (q.double(), k, v, tags),
        "v_pages: ": (q, k, v[:-1], tags),
        "k_pages: ": (q, k.half(), v, tags),
        "tags: ": (q, k, v, tags.int()),
        "q: 3 heads": (q.new_zeros(1, 3, 8), k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), tags),
        "do not fit": (q, k[:, :1], v[:, :1], tags),
    }.items():
        with pytest.raises(ValueError, match=named):
            guarded_attention(*arguments, batch)
    with pytest.raises(ValueError, match="out: "):
        guarded_attention(q, k, v, tags, batch, out=torch.empty(1, 2, 9))
    with pytest.raises(ValueError, match="use auto, torch or triton"):
        guarded_attention(q, k, v, tags, batch, backend="cuda")  # type: ignore[arg-type]
    for named, lengths, new in (("at least one", [], []), ("sequence 0: 7 new", [6], [7]), ("sequence 0: 0", [6], [0])):
        with pytest.raises(ValueError, match=named):
            GuardedBatch.build(world.tables[: len(lengths)], world.expected[: len(lengths)], lengths, new, CPU)
    with pytest.raises(ValueError, match="tags are expected of 1 only"):
        GuardedBatch.build(world.tables, [world.expected[0][:1]], [6], [1], CPU)
