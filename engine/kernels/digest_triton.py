"""The hash of pages in Triton: one pass over the bytes, wherever the pieces of a page lie.

The same bits as `engine.kernels.digest`, and what they are is said in ``guard/native/include/kvguard/digest.h``. Two
launches: the first reads the pages, many programs a page, and leaves 16 bytes for each block of 4 KiB; the second
makes one hash a page of them. The first is bound by memory: a word costs a program two additions, two widening
multiplications and its share of a sum, and the key table stays in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.digest import BLOCK_BYTES, CHUNK, HALF, HashTensors, check_pieces, pieces_of

_TILE = 4
"""Blocks that a program reads at a time, so that enough loads are under way."""
_STEPS = 4
"""How often a program does so at most, so that the key table is read once for 64 KiB."""


def page_hashes(pools: Sequence[Tensor], pages: Sequence[int], key: HashTensors, layers: int = 1) -> Tensor:
    """See `engine.kernels.digest.page_hashes`, which this equals to the bit."""
    pieces = pieces_of(pools, layers)
    check_pieces(pieces, pages)
    size = pieces[0].shape[1]
    per_piece = -(-size // BLOCK_BYTES)
    blocks = per_piece * len(pieces)
    device = key.table.device
    out = torch.ones((len(pages), 2), dtype=torch.int64, device=device)
    if not len(pages) or not blocks:
        return out
    # Where each piece of each page starts: one launch serves any number of pools.
    bases = torch.tensor([piece.data_ptr() for piece in pieces], dtype=torch.int64)
    strides = torch.tensor([piece.stride(0) for piece in pieces], dtype=torch.int64)
    starts = (bases + torch.tensor(pages, dtype=torch.int64)[:, None] * strides).to(device)
    # What all starts are multiples of decides how wide loads are.
    odd = size
    for piece in pieces:
        odd |= piece.data_ptr() | piece.stride(0)
    values = torch.empty((len(pages), blocks, 2), dtype=torch.int64, device=device)
    steps = min(_STEPS, triton.cdiv(per_piece, _TILE))
    grid = (len(pages) * len(pieces), triton.cdiv(per_piece, _TILE * steps))
    _nh_kernel[grid](
        starts, key.table, values, size, size // 4, per_piece,
        HALF_=HALF, TILE=_TILE, STEPS=steps, WORDS=odd % 4 == 0, ALIGNED=odd % 16 == 0,
        WHOLE=size % (BLOCK_BYTES * _TILE * steps) == 0,
    )  # fmt: skip
    _polynomial_kernel[(len(pages), 2)](values, key.powers, out, blocks, triton.cdiv(blocks, CHUNK), CHUNK_=CHUNK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _words(  # type: ignore[no-untyped-def]
    start, at, size, words, WORDS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr
):
    """The words at places `at`; zeros behind the piece's end."""
    if WORDS:
        source = start.to(tl.pointer_type(tl.int32))
        if ALIGNED:
            source = tl.multiple_of(source, 16)
        if WHOLE:
            word = tl.load(source + at)
        else:
            word = tl.load(source + at, mask=at < words, other=0)
        word = word.to(tl.uint32, bitcast=True)
    else:
        source = start.to(tl.pointer_type(tl.uint8)) + at * 4
        word = tl.zeros(at.shape, tl.uint32)
        for i in tl.static_range(4):
            byte = tl.load(source + i, mask=at * 4 + i < size, other=0)
            word += byte.to(tl.uint32) << (8 * i)
    return word


@triton.jit  # type: ignore[untyped-decorator]
def _nh_kernel(  # type: ignore[no-untyped-def]
    starts, table, values, size, words, per_piece,
    HALF_: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
    WORDS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """NH of TILE · STEPS blocks of one piece of one page, both lanes; programs: [pages · pieces, parts of a piece]."""
    piece = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + piece)
    i = tl.arange(0, HALF_)
    k0 = tl.load(table + i).to(tl.uint32, bitcast=True)[None, :]
    k1 = tl.load(table + HALF_ + i).to(tl.uint32, bitcast=True)[None, :]
    k2 = tl.load(table + 2 * HALF_ + i).to(tl.uint32, bitcast=True)[None, :]
    for step in range(STEPS):
        block = (tl.program_id(1) * STEPS + step) * TILE + tl.arange(0, TILE)
        at = (block[:, None] * (2 * HALF_) + i[None, :]).to(tl.int64)
        a = _words(start, at, size, words, WORDS, ALIGNED, WHOLE)
        b = _words(start, at + HALF_, size, words, WORDS, ALIGNED, WHOLE)
        lane0 = tl.sum((a + k0).to(tl.uint64) * (b + k1).to(tl.uint64), 1)
        lane1 = tl.sum((a + k1).to(tl.uint64) * (b + k2).to(tl.uint64), 1)
        filled = tl.minimum(size - block.to(tl.int64) * (8 * HALF_), 8 * HALF_)
        out = values + (piece * per_piece + block) * 2
        there = block < per_piece
        tl.store(out, lane0.to(tl.int64, bitcast=True) + filled, mask=there)
        tl.store(out + 1, lane1.to(tl.int64, bitcast=True) + filled, mask=there)


@triton.jit
def _reduced(x):  # type: ignore[no-untyped-def]
    """x modulo 2⁶¹ - 1, for x < 2⁶⁴."""
    prime = tl.full((), 0x1FFFFFFFFFFFFFFF, tl.uint64)
    x = (x & prime) + (x >> 61)
    return tl.where(x >= prime, x - prime, x)


@triton.jit
def _times(a, b):  # type: ignore[no-untyped-def]
    """a b modulo 2⁶¹ - 1, for both below it."""
    prime = tl.full((), 0x1FFFFFFFFFFFFFFF, tl.uint64)
    low = a * b
    return _reduced((low & prime) + ((low >> 61) | (tl.umulhi(a, b) << 3)))


@triton.jit  # type: ignore[untyped-decorator]
def _polynomial_kernel(values, powers, out, blocks, chunks, CHUNK_: tl.constexpr):  # type: ignore[no-untyped-def]
    """One lane of one page's hash: CHUNK blocks at a time, the first ones fewer; programs: [pages, 2]."""
    page = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1)
    low32 = tl.full((), 0xFFFFFFFF, tl.uint64)
    powers += lane * (2 * CHUNK_ + 1)
    i = tl.arange(0, CHUNK_)
    # A block's upper coefficient has an odd power, its lower one the even power below.
    of_low = tl.load(powers + 2 * (CHUNK_ - 1 - i)).to(tl.uint64, bitcast=True)
    of_high = tl.load(powers + 2 * (CHUNK_ - 1 - i) + 1).to(tl.uint64, bitcast=True)
    total = tl.full((), 1, tl.uint64)
    for chunk in range(chunks):
        stop = blocks - (chunks - 1 - chunk) * CHUNK_
        block = stop - CHUNK_ + i
        value = tl.load(values + (page * blocks + block) * 2 + lane, mask=block >= 0, other=0)
        value = value.to(tl.uint64, bitcast=True)
        terms = _reduced(_times(value >> 32, of_high) + _times(value & low32, of_low))
        # Their upper and lower halves are summed apart, which do not overflow.
        high = tl.sum(terms >> 32, 0)
        here = _reduced((high >> 29) + ((high & 0x1FFFFFFF) << 32)) + tl.sum(terms & low32, 0)
        moved = tl.load(powers + 2 * tl.minimum(stop, CHUNK_)).to(tl.uint64, bitcast=True)
        total = _reduced(_times(total, moved) + _reduced(here))
    tl.store(out + page * 2 + lane, total.to(tl.int64, bitcast=True))
