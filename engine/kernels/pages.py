"""Writing pages with their tags, and scrubbing them.

The order is always the same: the tag is cleared, the bytes move, the tag is set. So a page's tag is never newer than
its bytes: whoever finds a tag finds the bytes that belong to it, and while they move the page is nobody's.

In torch on a CPU each of the three is a call of its own, in that order, and x86 keeps the order of stores for the
other processes that map the pool. The Triton kernels do all three in one launch with the fences that a GPU needs; see
`engine.kernels.pages_triton`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels.backend import Backend, in_triton
from engine.kernels.ownership import check_tags


def write_pages(
    pool: Tensor, tags: Tensor, pages: Sequence[int], data: Tensor, new_tags: Tensor, *, backend: Backend = "auto"
) -> None:
    """Writes whole pages and then their tags.

    Args:
        pool: [pages, page_bytes] uint8, contiguous.
        tags: [pages, 3] int64, contiguous.
        pages: Which, each at most once.
        data: [n, page_bytes] uint8, what they get.
        new_tags: [n, 3] int64, what they bear from then on.
        backend: See `engine.kernels.backend`.

    Raises:
        ValueError: The shapes do not fit together, or a page is outside the pool or named twice; nothing is written.
    """
    _check_pages(pool, tags, pages)
    if data.shape != (len(pages), pool.shape[1]) or data.dtype != torch.uint8:
        raise ValueError(f"data: uint8 [{len(pages)}, {pool.shape[1]}] is needed, not {data.dtype} {list(data.shape)}")
    if new_tags.shape != (len(pages), 3) or new_tags.dtype != torch.int64:
        raise ValueError(f"new_tags: int64 [{len(pages)}, 3] is needed, not {new_tags.dtype} {list(new_tags.shape)}")
    if in_triton(pool, backend):
        from engine.kernels import pages_triton

        device = pool.device
        return pages_triton.write(
            pool,
            tags,
            torch.tensor(pages, dtype=torch.int64, device=device),
            data.to(device),
            new_tags.to(device).contiguous(),
        )
    for page, row, tag in zip(pages, data, new_tags, strict=True):
        tags[page] = 0
        pool[page].copy_(row)
        tags[page] = tag
    return None


def scrub_pages(pool: Tensor, tags: Tensor, pages: Sequence[int], *, backend: Backend = "auto") -> None:
    """Clears the tags of pages and then overwrites them with zeros.

    Args:
        pool: [pages, page_bytes] uint8, contiguous.
        tags: [pages, 3] int64, contiguous.
        pages: Which, each at most once.
        backend: See `engine.kernels.backend`.

    Raises:
        ValueError: The shapes do not fit together, or a page is outside the pool or named twice; nothing is written.
    """
    _check_pages(pool, tags, pages)
    index = torch.tensor(pages, dtype=torch.int64, device=pool.device)
    if in_triton(pool, backend):
        from engine.kernels import pages_triton

        return pages_triton.scrub(pool, tags, index)
    tags[index] = 0
    pool[index] = 0
    return None


def _check_pages(pool: Tensor, tags: Tensor, pages: Sequence[int]) -> None:
    check_tags(tags)
    if pool.dim() != 2 or pool.dtype != torch.uint8 or not pool.is_contiguous() or len(pool) != len(tags):
        raise ValueError(
            f"pool: contiguous uint8 [{len(tags)}, page_bytes], as many pages as tags, is needed, not {pool.dtype} "
            f"{list(pool.shape)}"
        )
    if len(set(pages)) != len(pages):
        raise ValueError(f"pages: {list(pages)} names one twice")
    if pages and not 0 <= min(pages) <= max(pages) < len(pool):
        raise ValueError(f"pages: {list(pages)} must lie in 0..{len(pool) - 1}")


@dataclass(frozen=True)
class TokenWrites:
    """Where a step's new tokens go: one row for each page that is written to."""

    pages: Tensor
    """[n] int64."""
    places: Tensor
    """[n, 3] int32: the first token's place in the page, how many there are, and the first one's row in the batch."""
    fresh: Tensor
    """[n] bool: the page is written for the first time, and so gets its tag."""
    tags: Tensor
    """[n, 3] int64: the tag; of those that are not fresh, whatever."""

    @classmethod
    def build(
        cls,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        new_tokens: Sequence[int],
        expected: Sequence[Tensor],
        page_tokens: int,
        device: torch.device,
    ) -> TokenWrites:
        """A batch whose rows are the first sequence's new tokens, then the second's, and so on.

        Args:
            tables: The sequences' block tables, of pages in the pool.
            lengths: Their tokens after the step.
            new_tokens: How many of those are new.
            expected: [at least the table's length, 3] int64 for each: the tags of its pages.
            page_tokens: Tokens a page.
            device: Where the tensors shall lie.
        """
        rows: list[tuple[int, int, int, int, bool]] = []
        tags: list[Tensor] = []
        row = 0
        for table, length, new, theirs in zip(tables, lengths, new_tokens, expected, strict=True):
            first = length - new
            edges = range(first // page_tokens * page_tokens, length, page_tokens)
            for start, stop in pairwise((first, *edges[1:], length)):
                entry, place = divmod(start, page_tokens)
                rows.append((table[entry], place, stop - start, row, not place))
                row += stop - start
            tags.append(theirs[edges.start // page_tokens : edges.start // page_tokens + len(edges)])
        columns = torch.tensor(rows, dtype=torch.int64, device=device)
        return cls(columns[:, 0].contiguous(), columns[:, 1:4].int(), columns[:, 4].bool(), torch.cat(tags).to(device))


def write_tokens(
    k_pages: Tensor,
    v_pages: Tensor,
    tags: Tensor,
    k: Tensor,
    v: Tensor,
    writes: TokenWrites,
    *,
    tag: bool = True,
    backend: Backend = "auto",
) -> None:
    """Writes the new tokens' keys and values of one layer, and the tags of the pages that are fresh.

    A tag stands for all layers of its page, and a step writes one layer after another: the tag goes in behind the
    bytes of the first one. That is right for the step itself, which writes each layer before it reads it, and nobody
    else may read the page before the step is over.

    Args:
        k_pages: [pages, page_tokens, kv_heads, head_dim], of any strides: one layer of the pool.
        v_pages: The same.
        tags: [pages, 3] int64, contiguous.
        k: [n, kv_heads, head_dim], the batch's rows.
        v: The same.
        writes: Where they go.
        tag: False for every layer but the first: no tag is touched.
        backend: See `engine.kernels.backend`.
    """
    if in_triton(k_pages, backend):
        from engine.kernels import pages_triton

        return pages_triton.write_tokens(k_pages, v_pages, tags, k, v, writes, tag)
    fresh = writes.pages[writes.fresh]
    if tag:
        tags[fresh] = 0
    for page, (place, count, row) in zip(writes.pages.tolist(), writes.places.tolist(), strict=True):
        k_pages[page, place : place + count] = k[row : row + count]
        v_pages[page, place : place + count] = v[row : row + count]
    if tag:
        tags[fresh] = writes.tags[writes.fresh]
    return None
