"""The check of `engine.kernels.ownership` in Triton, and its rule, `bears`, which every guarded kernel uses."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
"""Entries of a request that a program looks at in one go."""
_NONE = tl.constexpr(0x7FFFFFFF)
"""Behind every place in a table."""


@triton.jit
def bears(expected, tags, pages, entry, page, live, AGAIN: tl.constexpr):
    """Whether pages bear what their entries expect: [n] bool, False where not `live`.

    What lies outside the pool bears nothing, and nobody's tag, all zeros, is nobody's to expect. The tags come from
    the memory that all share (L2), not from the cache beside the cores: somebody else may have written them since.

    Args:
        expected: Pointer to the table row's [width, 3] int64.
        tags: Pointer to [pages, 3] int64.
        pages: In the pool.
        entry: [n], places in the row.
        page: [n], what the row has there.
        live: [n] bool.
        AGAIN: It is the second look: neither the compiler nor a cache may answer from the first.
    """
    known = live & (page >= 0) & (page < pages)
    # A row of the tile is a tag, its fourth column nothing: one load for three words.
    word = tl.arange(0, 4)
    want_at = expected + entry.to(tl.int64)[:, None] * 3 + word[None, :]
    have_at = tags + page.to(tl.int64)[:, None] * 3 + word[None, :]
    want = tl.load(want_at, mask=live[:, None] & (word < 3)[None, :], other=0)
    if AGAIN:
        have = tl.load(have_at, mask=known[:, None] & (word < 3)[None, :], other=0, volatile=True)
    else:
        have = tl.load(have_at, mask=known[:, None] & (word < 3)[None, :], other=0, cache_modifier=".cg")
    # Both answers in one sum over the row: four equal columns, and above them how many words are not 0.
    found = tl.sum((want == have).to(tl.int32) + tl.where(want != 0, 8, 0), 1)
    return known & (found % 8 == 4) & (found >= 8)


@triton.jit(do_not_specialize=["pages", "width"])
def _check_rows(
    tags, tables, expected, rows, refused, counts, first, first_page, pages, width,
    RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program is one request's row."""
    request = tl.program_id(0).to(tl.int64)
    if RAGGED:
        begin = tl.load(rows + request).to(tl.int64)
        count = (tl.load(rows + request + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        begin = request * width
        count = tl.minimum(tl.load(rows + request).to(tl.int32), width)
    place = tl.arange(0, BLOCK)
    wrong = tl.zeros((BLOCK,), tl.int32)
    earliest = tl.full((BLOCK,), _NONE, tl.int32)
    for at in range(0, count, BLOCK):
        entry = at + place
        live = entry < count
        page = tl.load(tables + begin + entry, mask=live, other=0)
        bad = live & (bears(expected + begin * 3, tags, pages, entry, page, live, False) == 0)
        tl.store(refused + begin + entry, bad.to(tl.int8), mask=live)
        wrong += bad.to(tl.int32)
        earliest = tl.minimum(earliest, tl.where(bad, entry, _NONE))
    total = tl.sum(wrong, 0)
    where = tl.min(earliest, 0)
    tl.store(counts + request, total)
    tl.store(first + request, tl.where(total > 0, where, -1))
    tl.store(first_page + request, tl.load(tables + begin + where, mask=total > 0, other=-1).to(tl.int64))


def check(
    tags: Tensor, tables: Tensor, expected: Tensor, used: Tensor | None, indptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `engine.kernels.ownership.check_pages`; its arguments have been checked."""
    rows = used if indptr is None else indptr
    assert rows is not None
    requests = len(rows) - (indptr is not None)
    refused = torch.zeros(tables.shape, dtype=torch.uint8, device=tables.device)
    counts, first = torch.empty((2, requests), dtype=torch.int32, device=tables.device)
    page = torch.empty(requests, dtype=torch.int64, device=tables.device)
    if requests:
        width = tables.shape[1] if indptr is None else 0
        _check_rows[(requests,)](
            tags, tables, expected, rows.contiguous(), refused, counts, first, page, len(tags), width,
            RAGGED=indptr is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return refused.view(torch.bool), counts, first, page
