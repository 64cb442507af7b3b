"""The kernels of `engine.kernels.guarded` in Triton.

A program is (a tile of new tokens of one sequence, a KV head, a part of the sequence's tokens). Its rows are the
tile's tokens times the query heads of that KV head, so that keys and values are read once for all of them; it walks
over the tokens in blocks, with the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). The page of a block
and the check of its tag are had one block ahead: no read of keys waits for a tag.

With parts, a second kernel joins them by their maxima and sums.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.ownership_triton import bears

if TYPE_CHECKING:
    from engine.kernels.guarded import GuardedBatch

_LOG2_E = 1.4426950408889634
_TILE_ROWS = 64
"""Rows (new tokens · heads of a group) of a tile of a prompt chunk."""
_LEAST_PART = 256
"""Tokens of a part: fewer are not worth the second kernel."""
_MOST_PARTS = 128
_WAVES = 4
"""So many programs a multiprocessor are wanted before a sequence is split up no further."""
_ENTRIES = tl.constexpr(64)
"""Table entries that the second look takes in one go."""


@triton.jit
def _look(
    table, expected, tags, pages, marks, at, stop,
    PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """The check of a block, from token `at` on: whether each of the SPAN pages that it touches may be read, [SPAN]
    int32. Entries that may not are marked. And the page of each token, [BLOCK]."""
    token = at + tl.arange(0, BLOCK)
    page = tl.load(table + token // PAGE_TOKENS, mask=token < stop, other=0)
    if GUARD:
        entry = at // PAGE_TOKENS + tl.arange(0, SPAN)
        live = entry * PAGE_TOKENS < stop
        ok = bears(expected, tags, pages, entry, tl.load(table + entry, mask=live, other=0), live, False)
        tl.store(marks + entry, tl.full((SPAN,), 1, tl.uint8), mask=live & (ok == 0))
        return page, ok.to(tl.int32)
    else:  # noqa: RET505 -- Triton compiles one of the two
        return page, tl.full((SPAN,), 1, tl.int32)


@triton.jit
def look_again(table, expected, tags, pages, marks, begin, stop, PAGE_TOKENS: tl.constexpr):
    """Marks the entries of tokens `begin` to `stop` whose pages do not, or no more, bear what is expected."""
    # All threads have read what they read: what is seen from here on is later.
    tl.debug_barrier()
    last = tl.cdiv(stop, PAGE_TOKENS)
    for at in range(begin // PAGE_TOKENS, last, _ENTRIES):
        entry = at + tl.arange(0, _ENTRIES)
        live = entry < last
        page = tl.load(table + entry, mask=live, other=0)
        ok = bears(expected, tags, pages, entry, page, live, True)
        tl.store(marks + entry, tl.full((_ENTRIES,), 1, tl.uint8), mask=live & (ok == 0))


# What changes from step to step must not make a new kernel each time: these are not specialised on.
@triton.jit(do_not_specialize=["pages", "width", "tiles", "parts"])
def _attend(
    q, k, v, out, partial, sums, tables, expected, tags, lengths, starts, news, marks, scale,
    pages, width, tiles, parts,
    q_row, q_head, k_page, k_token, k_head, k_dim, v_page, v_token, v_head, v_dim, heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr, GUARD: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (requests · tiles, kv_heads, parts). `scale` is of scores to the base 2.

    TILE new tokens a tile; ROWS ≥ TILE · GROUP rows. Without SPLIT the result goes to `out` [n, heads, HEAD_DIM],
    else to `partial` [n, heads, parts, HEAD_DIM] float32, not divided by its sum yet, with maximum and sum in `sums`
    [n, heads, parts, 2] float32.
    """
    request = tl.program_id(0) // tiles
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(starts + request)
    new = tl.load(news + request)
    length = tl.load(lengths + request)
    first = (tl.program_id(0) % tiles) * TILE
    if first < new:
        row = tl.arange(0, ROWS)
        query = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        asks = (row < TILE * GROUP) & (query < new)
        position = length - new + query
        dim = tl.arange(0, PADDED_DIM)
        in_head = dim < HEAD_DIM
        out_row = (start + query).to(tl.int64) * heads + head
        q_at = (start + query).to(tl.int64) * q_row + head * q_head
        asked = tl.load(q + q_at[:, None] + dim[None, :], mask=asks[:, None] & in_head[None, :], other=0.0)
        if UPCAST:
            asked = asked.to(tl.float32)

        table = tables + request.to(tl.int64) * width
        wanted = expected + request.to(tl.int64) * width * 3
        marked = marks + request.to(tl.int64) * width
        # What the tile's last token sees, in blocks, shared out evenly.
        end = tl.minimum(length, length - new + first + TILE)
        share = tl.cdiv(tl.cdiv(end, BLOCK), parts) * BLOCK
        begin = part * share
        stop = tl.minimum(end, begin + share)

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, PADDED_DIM), tl.float32)
        column = tl.arange(0, BLOCK)
        page, ok = _look(table, wanted, tags, pages, marked, begin, stop, PAGE_TOKENS, BLOCK, SPAN, GUARD)
        for at in range(begin, stop, BLOCK):
            after = at + BLOCK
            next_page, next_ok = _look(table, wanted, tags, pages, marked, after, stop, PAGE_TOKENS, BLOCK, SPAN, GUARD)
            token = at + column
            place = token % PAGE_TOKENS
            live = token < stop
            if GUARD:
                there = live & (page >= 0) & (page < pages)
                mine = live & (tl.gather(ok, token // PAGE_TOKENS - at // PAGE_TOKENS, 0) != 0)
            else:
                there = live
                mine = live
            k_at = page.to(tl.int64) * k_page + place * k_token + kv_head * k_head
            keys = tl.load(k + k_at[None, :] + dim[:, None] * k_dim, mask=in_head[:, None] & there[None, :], other=0.0)
            if UPCAST:
                keys = keys.to(tl.float32)
            scores = tl.dot(asked, keys, input_precision=PRECISION) * scale
            # Here, and nowhere before, a foreign key could reach a score: a column of the product is one key's.
            seen = mine[None, :] & (token[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))

            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet: -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(top - base)
            v_at = page.to(tl.int64) * v_page + place * v_token + kv_head * v_head
            values = tl.load(v + v_at[:, None] + dim[None, :] * v_dim, mask=mine[:, None] & in_head[None, :], other=0.0)
            if UPCAST:
                values = values.to(tl.float32)
            mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision=PRECISION)
            total = total * fade + tl.sum(weights, 1)
            top = higher
            page, ok = next_page, next_ok

        if GUARD:
            look_again(table, wanted, tags, pages, marked, begin, stop, PAGE_TOKENS)

        kept = asks[:, None] & in_head[None, :]
        if SPLIT:
            slot = out_row * parts + part
            tl.store(partial + slot[:, None] * HEAD_DIM + dim[None, :], mixed, mask=kept)
            tl.store(sums + slot * 2, top, mask=asks)
            tl.store(sums + slot * 2 + 1, total, mask=asks)
        else:
            mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], mixed.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["most_new", "parts"])
def _join(
    partial, sums, out, starts, news, most_new, parts, heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (requests · most_new, heads): puts the parts of one row together."""
    request = tl.program_id(0) // most_new
    query = tl.program_id(0) % most_new
    if query < tl.load(news + request):
        row = (tl.load(starts + request) + query).to(tl.int64) * heads + tl.program_id(1)
        dim = tl.arange(0, PADDED_DIM)
        in_head = dim < HEAD_DIM
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        mixed = tl.zeros((PADDED_DIM,), tl.float32)
        for at in range(0, parts, BLOCK):
            part = at + tl.arange(0, BLOCK)
            live = part < parts
            slot = row * parts + part
            tops = tl.load(sums + slot * 2, mask=live, other=float("-inf"))
            totals = tl.load(sums + slot * 2 + 1, mask=live, other=0.0)
            kept = live[:, None] & in_head[None, :]
            found = tl.load(partial + slot[:, None] * HEAD_DIM + dim[None, :], mask=kept, other=0.0)
            higher = tl.maximum(top, tl.max(tops, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(tops - base)
            fade = tl.exp2(top - base)
            mixed = mixed * fade + tl.sum(found * weights[:, None], 0)
            total = total * fade + tl.sum(totals * weights, 0)
            top = higher
        mixed = mixed / tl.where(total == 0.0, 1.0, total)
        tl.store(out + row * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=in_head)


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tags: Tensor,
    batch: GuardedBatch,
    out: Tensor,
    scale: float,
    guard: bool,
    splits: int | None,
) -> None:
    """See `engine.kernels.guarded.guarded_attention`; its arguments have been checked."""
    n, heads, head_dim = q.shape
    page_tokens, kv_heads = k_pages.shape[1:3]
    if q.stride(2) != 1:
        q = q.contiguous()
    group = heads // kv_heads
    tile = 1 if batch.most_new == 1 else max(1, _TILE_ROWS // group)
    rows = max(16, triton.next_power_of_2(tile * group))
    padded = max(16, triton.next_power_of_2(head_dim))
    tiles = triton.cdiv(batch.most_new, tile)
    requests = len(batch.lengths)
    parts = splits or _parts(requests * tiles * kv_heads, batch.longest, q.device)
    partial = torch.empty((n, heads, parts, head_dim) if parts > 1 else (1,), dtype=torch.float32, device=q.device)
    sums = torch.empty((n, heads, parts, 2) if parts > 1 else (1,), dtype=torch.float32, device=q.device)
    single = q.dtype == torch.float32
    block = _block(padded, single)
    span = triton.next_power_of_2(triton.cdiv(block - 1, page_tokens) + 1)
    # In the interpreter tl.dot of bfloat16 is silently wrong.
    upcast = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16
    _attend[(requests * tiles, kv_heads, parts)](
        q, k_pages, v_pages, out, partial, sums, batch.tables, batch.expected, tags, batch.lengths, batch.starts,
        batch.new_tokens, batch.marks, scale * _LOG2_E, len(tags), batch.tables.shape[1], tiles, parts,
        *q.stride()[:2], *k_pages.stride(), *v_pages.stride(), heads,
        GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=padded, PAGE_TOKENS=page_tokens, TILE=tile, ROWS=rows,
        BLOCK=block, SPAN=span, SPLIT=parts > 1, GUARD=guard, UPCAST=upcast,
        PRECISION="ieee" if single or upcast else "tf32", num_warps=4,
        num_stages=3 if tile == 1 and not single else 2,
    )  # fmt: skip
    if parts > 1:
        _join[(requests * batch.most_new, heads)](
            partial, sums, out, batch.starts, batch.new_tokens, batch.most_new, parts, heads,
            HEAD_DIM=head_dim, PADDED_DIM=padded, BLOCK=16,
        )  # fmt: skip


def _block(padded_dim: int, single: bool) -> int:
    """Tokens of a block: keys and values of some stages must fit a multiprocessor's shared memory."""
    return max(16, min(64, 64 * 128 // padded_dim // (2 if single else 1)))


def _parts(programs: int, longest: int, device: torch.device) -> int:
    wanted = triton.cdiv(_WAVES * _multiprocessors(device), programs)
    return int(max(1, min(wanted, triton.cdiv(longest, _LEAST_PART), _MOST_PARTS)))


@cache
def _multiprocessors(device: torch.device) -> int:
    # The interpreter's device has one: it runs a program after the other.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
