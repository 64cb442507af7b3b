"""The writes of `engine.kernels.pages` in Triton.

A tag is never newer than its bytes, for any reader on the device or behind its bus:

1. The tag is cleared by an exchange that acquires at system scope, and then the program's threads meet at a barrier:
   no byte is written before it is cleared.
2. The bytes.
3. A barrier, and then the tag is set by one thread with exchanges that release at system scope: the bytes that all
   threads wrote are visible before it (release is cumulative over what the barrier ordered). The generation, which is
   never 0, comes last: what is read in between lacks it and is the tag of no request.

Where several programs share a page, each does (1) before its own bytes and then counts itself in by an atomic that
acquires and releases; the last to arrive has seen all the others' bytes and does (3).
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from engine.kernels.pages import TokenWrites

_BLOCK = 1024
"""Words, or elements, that a program moves in one go."""
_ROUNDS = 8
"""So many blocks of a page are one program's."""


@triton.jit
def _clear_tag(tag):
    for word in tl.static_range(3):
        tl.atomic_xchg(tag + word, tl.zeros((), tl.int64), sem="acq_rel", scope="sys")
    tl.debug_barrier()


@triton.jit
def _set_tag(tag, new):
    tl.debug_barrier()
    for word in tl.static_range(3):
        tl.atomic_xchg(tag + word, tl.load(new + word), sem="release", scope="sys")


@triton.jit
def _write_pages(pool, tags, pages, data, new_tags, arrived, width, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """A program moves ROUNDS blocks of words of one page: grid (pages, parts)."""
    number = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + number)
    _clear_tag(tags + page * 3)
    begin = tl.program_id(1) * BLOCK * ROUNDS
    for at in range(begin, tl.minimum(begin + BLOCK * ROUNDS, width), BLOCK):
        word = at + tl.arange(0, BLOCK)
        live = word < width
        tl.store(pool + page * width + word, tl.load(data + number * width + word, mask=live), mask=live)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + number, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(1) - 1:
        _set_tag(tags + page * 3, new_tags + number * 3)


@triton.jit
def _scrub_pages(pool, tags, pages, width, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    page = tl.load(pages + tl.program_id(0))
    _clear_tag(tags + page * 3)
    begin = tl.program_id(1) * BLOCK * ROUNDS
    for at in range(begin, tl.minimum(begin + BLOCK * ROUNDS, width), BLOCK):
        word = at + tl.arange(0, BLOCK)
        tl.store(pool + page * width + word, tl.zeros((BLOCK,), pool.dtype.element_ty), mask=word < width)


@triton.jit
def _write_tokens(
    k_pages, v_pages, tags, k, v, pages, places, fresh, new_tags,
    k_page, k_token, k_head, k_dim, v_page, v_token, v_head, v_dim,
    k_row, k_row_head, v_row, v_row_head, kv_heads,
    HEAD_DIM: tl.constexpr, TAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program is one page: its tokens' k and v of one layer, and its tag if it is fresh."""
    number = tl.program_id(0)
    page = tl.load(pages + number)
    place = tl.load(places + number * 3)
    count = tl.load(places + number * 3 + 1)
    row = tl.load(places + number * 3 + 2).to(tl.int64)
    if TAG:
        new = tl.load(fresh + number) != 0
        if new:
            _clear_tag(tags + page * 3)
    width = kv_heads * HEAD_DIM
    for at in range(0, count * width, BLOCK):
        element = at + tl.arange(0, BLOCK)
        live = element < count * width
        token, head, dim = element // width, element % width // HEAD_DIM, element % HEAD_DIM
        source = (row + token) * k_row + head * k_row_head + dim
        target = page * k_page + (place + token) * k_token + head * k_head + dim * k_dim
        tl.store(k_pages + target, tl.load(k + source, mask=live), mask=live)
        source = (row + token) * v_row + head * v_row_head + dim
        target = page * v_page + (place + token) * v_token + head * v_head + dim * v_dim
        tl.store(v_pages + target, tl.load(v + source, mask=live), mask=live)
    if TAG:  # noqa: SIM102 -- a constant of the compilation, and a value
        if new:
            _set_tag(tags + page * 3, new_tags + number * 3)


def write(pool: Tensor, tags: Tensor, pages: Tensor, data: Tensor, new_tags: Tensor) -> None:
    """See `engine.kernels.pages.write_pages`; its arguments have been checked."""
    words, source = _words(pool, data.contiguous())
    if len(pages):
        arrived = torch.zeros(len(pages), dtype=torch.int32, device=pool.device)
        _write_pages[_grid(pages, words)](
            words, tags, pages, source, new_tags, arrived, words.shape[1], BLOCK=_BLOCK, ROUNDS=_ROUNDS
        )


def scrub(pool: Tensor, tags: Tensor, pages: Tensor) -> None:
    """See `engine.kernels.pages.scrub_pages`; its arguments have been checked."""
    (words,) = _words(pool)
    if len(pages):
        _scrub_pages[_grid(pages, words)](words, tags, pages, words.shape[1], BLOCK=_BLOCK, ROUNDS=_ROUNDS)


def write_tokens(
    k_pages: Tensor, v_pages: Tensor, tags: Tensor, k: Tensor, v: Tensor, writes: TokenWrites, tag: bool
) -> None:
    """See `engine.kernels.pages.write_tokens`."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    _write_tokens[(len(writes.pages),)](
        k_pages, v_pages, tags, k, v, writes.pages, writes.places, writes.fresh.to(torch.uint8), writes.tags,
        *k_pages.stride(), *v_pages.stride(), *k.stride()[:2], *v.stride()[:2], k.shape[1],
        HEAD_DIM=k.shape[2], TAG=tag, BLOCK=_BLOCK,
    )  # fmt: skip


def _words(*tensors: Tensor) -> list[Tensor]:
    """The same bytes in the widest words that all allow: a program moves words, not bytes."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if all(t.shape[1] % size == 0 and t.data_ptr() % size == 0 for t in tensors):
            return [t.view(dtype) for t in tensors]
    return list(tensors)


def _grid(pages: Tensor, words: Tensor) -> tuple[int, int]:
    return len(pages), max(1, triton.cdiv(words.shape[1], _BLOCK * _ROUNDS))
