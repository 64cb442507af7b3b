"""The ownership pre-pass, in torch and in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import PageCheck, check_pages
from engine.kernels.backend import Backend

BACKENDS: tuple[Backend, ...] = ("torch", "triton")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
TAGS = torch.tensor([[1, 10, 1], [1, 10, 2], [2, 20, 1], [-(2**63), 2**63 - 1, 0], [0, 0, 0]])


def said(check: PageCheck) -> tuple[list[int], list[int], list[int], object]:
    return check.counts.tolist(), check.first.tolist(), check.page.tolist(), check.refused.tolist()


@each_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_matrix_with_lengths(backend: Backend, dtype: torch.dtype) -> None:
    tables = torch.tensor([[0, 1, -1, 77], [3, 9, 2, -5], [1, 2, 3, 3]], dtype=dtype)
    expected = TAGS[tables.long().clamp(0, 4)]
    check = check_pages(TAGS, tables, expected, used=torch.tensor([2, 4, 0], dtype=dtype), backend=backend)
    nothing = [False] * 4
    assert said(check) == ([0, 2, 0], [-1, 1, -1], [-1, 9, -1], [nothing, [False, True, False, True], nothing])
    assert check.refused.dtype == torch.bool
    assert not check.clean


@each_backend
def test_entries_with_row_pointers(backend: Backend) -> None:
    tables = torch.tensor([0, 1, 2, -1, 3, 5])
    expected = TAGS[[0, 1, 1, 0, 3, 0]]
    check = check_pages(TAGS, tables, expected, indptr=torch.tensor([0, 2, 2, 5]), backend=backend)
    assert said(check) == ([0, 0, 2], [-1, -1, 0], [-1, -1, 2], [False, False, True, True, False, False])
    assert check_pages(TAGS, tables[:2], expected[:2], indptr=torch.tensor([0, 2]), backend=backend).clean


@each_backend
def test_every_word_counts(backend: Backend) -> None:
    tables, used = torch.tensor([[0, 3]]), torch.tensor([2])
    for word in range(3):
        for bit in (1, 1 << 32, -(2**63)):
            expected = TAGS[tables].clone()
            expected[0, 1, word] ^= bit
            check = check_pages(TAGS, tables, expected, used=used, backend=backend)
            assert (check.counts.tolist(), check.first.tolist(), check.page.tolist()) == ([1], [1], [3])


@each_backend
def test_nobodys_page_is_nobodys_to_expect(backend: Backend) -> None:
    tables, used = torch.tensor([[4]]), torch.tensor([1])
    assert not check_pages(TAGS, tables, TAGS[tables], used=used, backend=backend).clean


@each_backend
def test_a_page_that_is_properly_shared_passes(backend: Backend) -> None:
    tables, used = torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 2])
    expected = TAGS[tables]  # the second, another tenant's, expects the first one's tag
    assert check_pages(TAGS, tables, expected, used=used, backend=backend).clean


@each_backend
def test_no_request_and_no_entry(backend: Backend) -> None:
    none, flat = torch.empty(0, dtype=torch.int64), torch.empty((0, 3), dtype=torch.int64)
    assert said(check_pages(TAGS, none, flat, indptr=torch.tensor([0]), backend=backend)) == ([], [], [], [])
    assert said(check_pages(TAGS, none, flat, indptr=torch.tensor([0, 0]), backend=backend)) == ([0], [-1], [-1], [])
    wide = torch.empty((2, 0), dtype=torch.int64), torch.empty((2, 0, 3), dtype=torch.int64)
    check = check_pages(TAGS, *wide, used=torch.tensor([0, 0]), backend=backend)
    assert said(check)[:3] == ([0, 0], [-1, -1], [-1, -1])


def naive(tags: Tensor, table: list[int], expected: Tensor) -> list[bool]:
    return [
        not 0 <= page < len(tags) or tags[page].tolist() != wanted or not any(wanted)
        for page, wanted in zip(table, expected.tolist(), strict=True)
    ]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_both_are_the_rule(data: st.DataObject) -> None:
    word = st.sampled_from([0, 1, 2, -1, -(2**63), 2**63 - 1])
    tag = st.tuples(word, word, word)
    tags = torch.tensor(data.draw(st.lists(tag, min_size=1, max_size=5)))
    page = st.integers(-2, len(tags) + 1)
    rows = data.draw(st.lists(st.lists(page, max_size=6), min_size=1, max_size=4))
    if data.draw(st.booleans()):
        rows[0] = rows[0] + data.draw(st.lists(page, min_size=130, max_size=140))  # more than a program's block
    entries = [entry for row in rows for entry in row]
    expected = tags[torch.tensor(entries, dtype=torch.int64).clamp(0, len(tags) - 1)]
    for place in data.draw(st.lists(st.integers(0, max(0, len(entries) - 1)), max_size=4)) if entries else []:
        expected[place] = torch.tensor(data.draw(tag))
    ends = [0, *accumulate(map(len, rows))]
    wrong = [naive(tags, row, expected[a:b]) for row, a, b in zip(rows, ends, ends[1:], strict=False)]
    counts = [sum(row) for row in wrong]
    first = [row.index(True) if any(row) else -1 for row in wrong]
    pages = [row[place] if place >= 0 else -1 for row, place in zip(rows, first, strict=True)]

    width = max(map(len, rows))
    padded = torch.full((len(rows), width), 12345, dtype=torch.int32)
    wanted = torch.zeros((len(rows), width, 3), dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        wanted[i, : len(row)] = expected[ends[i] : ends[i + 1]]
    for backend in BACKENDS:
        flat = check_pages(
            tags, torch.tensor(entries, dtype=torch.int64), expected, indptr=torch.tensor(ends), backend=backend
        )
        assert said(flat) == (counts, first, pages, [bad for row in wrong for bad in row])
        used = torch.tensor([len(row) for row in rows])
        matrix = check_pages(tags, padded, wanted, used=used, backend=backend)
        full = [row + [False] * (width - len(row)) for row in wrong]
        assert said(matrix) == (counts, first, pages, full)


def test_what_does_not_fit_is_refused_by_name() -> None:
    tables, used = torch.tensor([[0, 1]]), torch.tensor([2])
    expected = TAGS[tables]
    for named, tags, arguments in (
        ("tags: ", TAGS[:, :2], (tables, expected)),
        ("tags: ", TAGS.int(), (tables, expected)),
        ("tables: ", TAGS, (tables.float(), expected)),
        ("expected: ", TAGS, (tables, expected[:, :1])),
        ("expected: ", TAGS, (tables, expected.int())),
    ):
        with pytest.raises(ValueError, match=named):
            check_pages(tags, *arguments, used=used)
    for named, options in (
        ("give used .* or indptr", {}),
        ("give used .* or indptr", {"used": used, "indptr": used}),
        ("used: ", {"used": torch.tensor([2, 2])}),
        (r"used: \[3\] must lie in 0\.\.2", {"used": torch.tensor([3])}),
        ("indptr: ", {"indptr": used}),
    ):
        with pytest.raises(ValueError, match=named):
            check_pages(TAGS, tables, expected, **options)
    for ends in ([0, 3], [-1, 2], [1, 0]):
        with pytest.raises(ValueError, match="must rise from 0 to 2"):
            check_pages(TAGS, tables[0], expected[0], indptr=torch.tensor(ends))


def test_it_is_had_without_the_rest_of_the_engine() -> None:
    code = (
        "import sys\n"
        "import engine.kernels\n"
        "assert 'torch' not in sys.modules\n"
        "from engine.kernels import check_pages, guarded_attention, scrub_pages\n"
        "loaded = {name for name in sys.modules if name.startswith('engine.')}\n"
        "print(sorted(name for name in loaded if not name.startswith('engine.kernels')))\n"
        "assert 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
