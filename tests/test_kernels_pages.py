"""Writes with tags, and scrubbing, in torch and in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_world import CPU, fenced, untouched
from torch import Tensor

from engine.kernels import TokenWrites, scrub_pages, write_pages, write_tokens
from engine.kernels.backend import Backend

BACKENDS: tuple[Backend, ...] = ("torch", "triton")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
PAGES = 6


@pytest.fixture(params=[8, 13, 36, 20_000], ids=lambda width: f"{width} bytes")
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[Tensor, Tensor]]:
    """Pages and tags with something around them, and whatever in them."""
    data, around = fenced(PAGES, request.param, dtype=torch.uint8)
    tags, around_tags = fenced(PAGES, 3, dtype=torch.int64)
    data[:] = 9
    tags[:] = torch.arange(1, 1 + PAGES * 3).view(PAGES, 3)
    yield data, tags
    assert untouched(around)
    assert untouched(around_tags)


@each_backend
@pytest.mark.parametrize("pages", [[], [2], [5, 0, 3]])
def test_pages_are_written_and_tagged_and_no_others(
    pool: tuple[Tensor, Tensor], backend: Backend, pages: list[int]
) -> None:
    data, tags = pool
    source = torch.randint(0, 256, (len(pages), data.shape[1]), dtype=torch.uint8)
    new = torch.randint(-(2**62), 2**62, (len(pages), 3))
    wanted, wanted_tags = data.clone(), tags.clone()
    for place, page in enumerate(pages):
        wanted[page], wanted_tags[page] = source[place], new[place]
    write_pages(data, tags, pages, source, new, backend=backend)
    assert torch.equal(data, wanted)
    assert torch.equal(tags, wanted_tags)


@each_backend
@pytest.mark.parametrize("pages", [[], [2], [5, 0, 3]])
def test_scrubbed_pages_are_zeros_and_nobodys(pool: tuple[Tensor, Tensor], backend: Backend, pages: list[int]) -> None:
    data, tags = pool
    wanted, wanted_tags = data.clone(), tags.clone()
    for page in pages:
        wanted[page], wanted_tags[page] = 0, 0
    scrub_pages(data, tags, pages, backend=backend)
    assert torch.equal(data, wanted)
    assert torch.equal(tags, wanted_tags)


class Tape:
    """What a kernel does to tags and bytes, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: Tensor, tags: Tensor) -> None:
        from engine.kernels import pages_triton

        self.seen: list[tuple[str, list[int], int]] = []
        self._data, self._tags = data, tags
        for name in ("_clear_tag", "_set_tag"):
            monkeypatch.setattr(pages_triton, name, self._taped(name, getattr(pages_triton, name)))

    def _taped(self, name: str, real: Any) -> Any:
        def call(*arguments: Any) -> None:
            before = int((self._data != 9).sum())
            real(*arguments)
            self.seen.append((name, self._tags.any(dim=1).int().tolist(), before))

        return call


def test_the_tag_goes_before_the_first_byte_and_comes_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the several programs that a page of 160 kB takes."""
    width = 160_000
    data, tags = torch.full((2, width), 9, dtype=torch.uint8), torch.ones((2, 3), dtype=torch.int64)
    tape = Tape(monkeypatch, data, tags)
    write_pages(
        data, tags, [1], torch.zeros((1, width), dtype=torch.uint8), torch.tensor([[4, 5, 6]]), backend="triton"
    )
    names = [name for name, _, _ in tape.seen]
    assert names == ["_clear_tag"] * 3 + ["_set_tag"]
    assert tape.seen[0] == ("_clear_tag", [1, 0], 0), "cleared while no byte has moved"
    assert all(bearing == [1, 0] for _, bearing, _ in tape.seen[:-1]), "nobody's while they move"
    assert tape.seen[-1] == ("_set_tag", [1, 1], width), "set when all have"
    assert tags.tolist() == [[1, 1, 1], [4, 5, 6]]


def test_scrubbing_clears_the_tag_before_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    data, tags = torch.full((1, 64), 9, dtype=torch.uint8), torch.ones((1, 3), dtype=torch.int64)
    tape = Tape(monkeypatch, data, tags)
    scrub_pages(data, tags, [0], backend="triton")
    assert tape.seen == [("_clear_tag", [0], 0)]


def writes(page_tokens: int) -> tuple[TokenWrites, list[list[int]], list[Tensor]]:
    """Three sequences: one goes on in a page and into two more, one begins, one adds a token."""
    tables = [[4, 0, 3], [5, 1], [2]]
    expected = [torch.randint(1, 2**62, (len(table), 3)) for table in tables]
    lengths, new = [2 * page_tokens + 1, page_tokens + 1, page_tokens], [page_tokens + 2, page_tokens + 1, 1]
    return TokenWrites.build(tables, lengths, new, expected, page_tokens, CPU), tables, expected


@each_backend
@pytest.mark.parametrize("tag", [True, False])
@pytest.mark.parametrize(("page_tokens", "kv_heads", "head_dim"), [(4, 2, 8), (5, 3, 6), (16, 1, 70)])
def test_tokens_are_written_where_they_belong(
    backend: Backend, tag: bool, page_tokens: int, kv_heads: int, head_dim: int
) -> None:
    plan, tables, expected = writes(page_tokens)
    pool, around = fenced(6, 2, 2, page_tokens, kv_heads, head_dim, dtype=torch.float32)
    tags, around_tags = fenced(6, 3, dtype=torch.int64)
    pool[:], tags[:] = 9, 8
    rows = 2 * page_tokens + 4
    k, v = torch.randn((rows, kv_heads, 2 * head_dim)).chunk(2, dim=2)  # not in one piece
    wanted, wanted_tags = pool.clone(), tags.clone()
    row = 0
    for table, theirs, start, stop in zip(
        tables,
        expected,
        (page_tokens - 1, 0, page_tokens - 1),
        (2 * page_tokens + 1, page_tokens + 1, page_tokens),
        strict=True,
    ):
        for t in range(start, stop):
            page, place = table[t // page_tokens], t % page_tokens
            wanted[page, 1, 0, place], wanted[page, 1, 1, place] = k[row], v[row]
            if tag and not place:
                wanted_tags[page] = theirs[t // page_tokens]
            row += 1
    assert row == rows
    write_tokens(pool[:, 1, 0], pool[:, 1, 1], tags, k, v, plan, tag=tag, backend=backend)
    assert torch.equal(pool, wanted)
    assert torch.equal(tags, wanted_tags)
    assert untouched(around)
    assert untouched(around_tags)


def test_the_tag_of_a_fresh_page_comes_behind_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, _ = writes(4)
    pool, tags = torch.full((6, 1, 2, 4, 1, 2), 9.0), torch.zeros((6, 3), dtype=torch.int64)
    tape = Tape(monkeypatch, pool, tags)
    k = torch.zeros((12, 1, 2))
    write_tokens(pool[:, 0, 0], pool[:, 0, 1], tags, k, k, plan, backend="triton")
    assert [name for name, _, _ in tape.seen] == ["_clear_tag", "_set_tag"] * 4, "two pages are not fresh"
    for (_, bearing, before), (_, _, after), tokens in zip(tape.seen[::2], tape.seen[1::2], (4, 1, 4, 1), strict=True):
        assert after - before == tokens * 4, "k and v, of two elements each"
        assert len(bearing) == 6
    assert tags.any(dim=1).tolist() == [True, True, False, True, False, True]


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written() -> None:
    data, tags = torch.full((2, 8), 9, dtype=torch.uint8), torch.ones((2, 3), dtype=torch.int64)
    source, new = torch.zeros((1, 8), dtype=torch.uint8), torch.zeros((1, 3), dtype=torch.int64)
    for named, pages in (("must lie in 0..1", [2]), ("must lie in 0..1", [-1]), ("names one twice", [1, 1])):
        with pytest.raises(ValueError, match=named):
            write_pages(data, tags, pages, source.expand(len(pages), -1), new.expand(len(pages), -1))
        with pytest.raises(ValueError, match=named):
            scrub_pages(data, tags, pages)
    for named, arguments in (
        ("pool: ", (data.int(), tags, [0], source, new)),
        ("pool: ", (data[:1], tags, [0], source, new)),
        ("tags: ", (data, tags[:, :2], [0], source, new)),
        ("data: ", (data, tags, [0], source[:, :7], new)),
        ("data: ", (data, tags, [0], source.int(), new)),
        ("new_tags: ", (data, tags, [0], source, new[0])),
    ):
        with pytest.raises(ValueError, match=named):
            write_pages(*arguments)
    assert data.eq(9).all()
    assert tags.eq(1).all()
