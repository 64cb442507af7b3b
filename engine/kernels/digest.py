"""The hash of pages in torch, on any device; `engine.kernels.digest_triton` is the same for a GPU.

``guard/native/include/kvguard/digest.h`` says what the hash is. On a CPU the native core computes it many times
faster, and `hooks.digest` makes digests of hashes: this is for pages that only torch can reach, and what the kernels
are held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PRIME = 2**61 - 1
BLOCK_BYTES = 4096
HALF = 512
"""Words that a half of a block has."""
CHUNK = 128
"""Blocks that one step of the polynomial takes together."""
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, eq=False, repr=False)
class HashTensors:
    """A tenant's key of the hash, where the pages are."""

    table: Tensor
    """[1536] int32: the key table of NH, the bits of unsigned words."""
    powers: Tensor
    """[2, 2 · CHUNK + 1] int64: each lane's point to the power of 0, 1, …, modulo 2⁶¹ - 1."""

    @classmethod
    def of(cls, material: bytes, device: torch.device | str = "cpu") -> HashTensors:
        """Out of `hooks.digest.TenantKey.material`.

        Raises:
            ValueError: It is not 6176 bytes.
        """
        if len(material) != 12 * HALF + 32:
            raise ValueError(f"key: {12 * HALF + 32} bytes are needed, not {len(material)}")
        powers = []
        for at in (12 * HALF, 12 * HALF + 16):
            point = 1 + int.from_bytes(material[at : at + 16], "little") % (PRIME - 1)
            lane = [1]
            while len(lane) <= 2 * CHUNK:
                lane.append(lane[-1] * point % PRIME)
            powers.append(lane)
        table = torch.frombuffer(bytearray(material[: 12 * HALF]), dtype=torch.int32)
        return cls(table.to(device), torch.tensor(powers, dtype=torch.int64, device=device))


def pieces_of(pools: Sequence[Tensor], layers: int) -> list[Tensor]:
    """What a page is made of: for each piece a [pages, piece bytes] uint8 view, in order.

    Args:
        pools: [pages, ...] of any dtype, what lies behind the first dimension contiguous: whole pages, or a tensor for
            each piece (say each layer's) in order.
        layers: Pieces that each page in a tensor is cut into.

    Raises:
        ValueError: The tensors are not like that, or of unlike sizes.
    """
    if layers < 1 or not pools:
        raise ValueError(f"pools: at least one and layers at least 1 are needed, not {len(pools)} and {layers}")
    pieces: list[Tensor] = []
    for pool in pools:
        if pool.dim() < 2 or (pool.numel() and not pool[0].is_contiguous()):
            raise ValueError(f"pools: [pages, ...] is needed, each page in one run, not {list(pool.shape)}")
        size = pool[0].numel() * pool.element_size() if len(pool) else 0
        if size % layers:
            raise ValueError(f"layers: {size} bytes a page do not divide into {layers} pieces")
        pages = pool.flatten(1) if pool.dim() > 2 else pool
        pieces += torch.chunk(pages.view(torch.uint8), layers, 1) if size else [pages.view(torch.uint8)] * layers
    if len({piece.shape[1] for piece in pieces}) != 1:
        raise ValueError(f"pools: the same bytes a page are needed in all, not {[p.shape[1] for p in pieces]}")
    return pieces


def page_hashes(pools: Sequence[Tensor], pages: Sequence[int], key: HashTensors, layers: int = 1) -> Tensor:
    """The hashes of pages.

    Args:
        pools: See `pieces_of`.
        pages: Which, in order.
        key: The tenant's, on the pools' device.
        layers: See `pieces_of`.

    Returns:
        [n, 2] int64, each below 2⁶¹ - 1, on the pools' device.

    Raises:
        ValueError: See `pieces_of`; or a page is not in a pool.
    """
    pieces = pieces_of(pools, layers)
    check_pieces(pieces, pages)
    if not pieces[0].shape[1]:
        return torch.ones((len(pages), 2), dtype=torch.int64, device=key.table.device)
    places = torch.tensor(pages, dtype=torch.int64, device=key.table.device)
    values = [_nh(piece[places], key.table) for piece in pieces]
    return _polynomial(torch.cat(values, 1), key.powers)


def check_pieces(pieces: Sequence[Tensor], pages: Sequence[int]) -> None:
    """Raises ValueError for a page that a piece's pool does not have."""
    count = min(len(piece) for piece in pieces)
    absent = [page for page in pages if not 0 <= page < count]
    if absent:
        raise ValueError(f"pages: there is no page {absent[0]} among {count}")


def tobytes(hashes: Tensor) -> list[bytes]:
    """[n, 2] int64 as `hooks.digest.Digester.seal` takes them."""
    return [a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in hashes.tolist()]


def _nh(data: Tensor, table: Tensor) -> Tensor:
    """[n, bytes] uint8 → [n, blocks, 2] int64, the bits of the blocks' values modulo 2⁶⁴."""
    n, size = data.shape
    blocks = -(-size // BLOCK_BYTES)
    words = F.pad(data, (0, blocks * BLOCK_BYTES - size)).contiguous().view(torch.int32).view(n, blocks, 2, HALF)
    a, b = words[:, :, 0], words[:, :, 1]
    k0, k1, k2 = table.view(3, HALF)
    # Sums of int32 wrap as those of unsigned words do, and so do products and sums of int64.
    lanes = [(_wide(a + x) * _wide(b + y)).sum(-1) for x, y in ((k0, k1), (k1, k2))]
    filled = (size - BLOCK_BYTES * torch.arange(blocks, device=data.device)).clamp(max=BLOCK_BYTES)
    return torch.stack(lanes, -1) + filled[:, None]


def _wide(words: Tensor) -> Tensor:
    return words.to(torch.int64) & _LOW


def _polynomial(values: Tensor, powers: Tensor) -> Tensor:
    """[n, blocks, 2] → [n, 2]: CHUNK blocks at a time, the first ones fewer."""
    n, blocks, _ = values.shape
    coefficients = torch.stack((values >> 32 & _LOW, values & _LOW), 2).view(n, 2 * blocks, 2)
    total = torch.ones((n, 2), dtype=torch.int64, device=values.device)
    stop = 2 * (blocks % CHUNK or min(blocks, CHUNK))
    start = 0
    while start < 2 * blocks:
        count = stop - start
        falling = powers[:, :count].flip(1).T
        terms = _times(coefficients[:, start:stop], falling)
        total = _reduced(_times(total, powers[:, count]) + _sum(terms))
        start, stop = stop, stop + 2 * CHUNK
    return total


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a b modulo 2⁶¹ - 1, for both below it; nothing leaves the 63 bits of an int64."""
    a1, a0, b1, b0 = a >> 31, a & 0x7FFFFFFF, b >> 31, b & 0x7FFFFFFF
    middle = a1 * b0 + a0 * b1  # of 2^31; and 2^62 is 2
    return _reduced(_reduced(2 * a1 * b1 + (middle >> 30)) + _reduced((middle & 0x3FFFFFFF) << 31) + _reduced(a0 * b0))


def _sum(terms: Tensor) -> Tensor:
    """Over the second dimension, modulo 2⁶¹ - 1: of the upper and the lower halves apart, which do not overflow."""
    high, low = (terms >> 32).sum(1), (terms & _LOW).sum(1)
    return _reduced(_reduced((high >> 29) + ((high & 0x1FFFFFFF) << 32)) + low)


def _reduced(x: Tensor) -> Tensor:
    """x modulo 2⁶¹ - 1, for 0 ≤ x < 2⁶³."""
    x = (x & PRIME) + (x >> 61)
    return torch.where(x >= PRIME, x - PRIME, x)
