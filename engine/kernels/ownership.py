"""Owner tags of pages, and the check of whole block tables against them: one call before any attention backend.

A tag is one row beside the pool, (tenant word, request word, generation), written with the page's bytes and carried
with them by a transfer; all zeros is nobody's. A block table has a second column, so to speak: for each entry the
tag that its page must bear. A reader that compares the two before it attends notices a page that was freed, handed
to somebody else, or never arrived, whatever the block table says; and since what is expected is said for each entry,
pages that are properly shared pass.

`check_pages` needs nothing else of this engine: an engine whose attention cannot be changed calls it once a step
and does not run the requests that have a count. Both usual shapes of block tables are taken as they are: a padded
matrix with lengths (FlashAttention, vLLM), and indices with row pointers (FlashInfer, SGLang).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels.backend import Backend, in_triton


@dataclass(frozen=True)
class PageCheck:
    """What a check found. All on the device of the tables."""

    refused: Tensor
    """bool, the tables' shape: True where the page must not be read."""
    counts: Tensor
    """[requests] int32: refused entries of each."""
    first: Tensor
    """[requests] int32: the place in its table of each request's first refused entry; -1: it has none."""
    page: Tensor
    """[requests] int64: the page which that entry names, be there such a page or not; -1 also where there is none."""

    @property
    def clean(self) -> bool:
        """Whether nothing was refused. On a GPU it waits for the check."""
        return not bool(self.counts.any())


def check_pages(
    tags: Tensor,
    tables: Tensor,
    expected: Tensor,
    *,
    used: Tensor | None = None,
    indptr: Tensor | None = None,
    backend: Backend = "auto",
) -> PageCheck:
    """Compares every page that a batch is about to read with what its reader expects.

    An entry is refused if its page bears another tag than it expects, if there is no such page in the pool (below 0
    or behind the end), or if it expects nobody's tag, all zeros: who expects that has not said what he expects.

    Args:
        tags: [pages, 3] int64, contiguous: what each page bears.
        tables: int32 or int64, contiguous, pages' indices. Either [requests, width] with `used`, or [entries] with
            `indptr`.
        expected: int64, contiguous, the tables' shape with 3 behind it: what each entry's page must bear.
        used: [requests] int32 or int64: so many entries of each row are looked at; those behind may be anything.
        indptr: [requests + 1] int32 or int64: request *i* has the entries from ``indptr[i]`` to ``indptr[i + 1]``.
        backend: See `engine.kernels.backend`.

    Returns:
        What was found. No value is copied to the host.

    Raises:
        ValueError: The shapes or dtypes do not fit together; names the tensor. On a CPU also: a row's end lies
            outside the tables.
    """
    _check_arguments(tags, tables, expected, used, indptr)
    if in_triton(tags, backend):
        from engine.kernels import ownership_triton

        return PageCheck(*ownership_triton.check(tags, tables, expected, used, indptr))
    return _check(tags, tables, expected, used, indptr)


def refused_entries(tags: Tensor, tables: Tensor, expected: Tensor) -> Tensor:
    """The rule itself, in torch, for entries all of which are looked at; see `check_pages`.

    Args:
        tags: [pages, 3] int64.
        tables: [...] int32 or int64.
        expected: [..., 3] int64.

    Returns:
        [...] bool, True where the page must not be read.
    """
    inside = tables.clamp(0, tags.shape[0] - 1)
    return (tags[inside] != expected).any(dim=-1) | (inside != tables) | ~expected.any(dim=-1)


def summary(refused: Tensor, tables: Tensor) -> PageCheck:
    """Counts and first entries of a mask over a padded matrix.

    Args:
        refused: [requests, width] bool.
        tables: [requests, width].
    """
    counts = refused.sum(dim=1, dtype=torch.int32)
    if not refused.shape[1]:
        none = torch.full_like(counts, -1)
        return PageCheck(refused, counts, none, none.long())
    # argmax gives the first of equals, but not for bool on every device.
    first = torch.where(counts > 0, refused.to(torch.uint8).argmax(dim=1).int(), -1)
    page = tables.long().gather(1, first.clamp(min=0).long()[:, None])[:, 0]
    return PageCheck(refused, counts, first, torch.where(counts > 0, page, -1))


def _check(tags: Tensor, tables: Tensor, expected: Tensor, used: Tensor | None, indptr: Tensor | None) -> PageCheck:
    wrong = refused_entries(tags, tables, expected)
    if used is not None:
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) <= tables.shape[1]:
            raise ValueError(f"used: {used.tolist()} must lie in 0..{tables.shape[1]}, the tables' width")
        return summary(wrong & (torch.arange(tables.shape[1], device=tables.device) < used[:, None]), tables)
    assert indptr is not None
    ends = indptr.tolist()
    if ends[0] < 0 or ends[-1] > len(tables) or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"indptr: {ends} must rise from 0 to {len(tables)}, the number of entries")
    requests = len(ends) - 1
    counts = torch.zeros(requests, dtype=torch.int32, device=tables.device)
    first = torch.full((requests,), -1, dtype=torch.int32, device=tables.device)
    page = first.long()
    wrong[: ends[0]] = False
    wrong[ends[-1] :] = False
    for row, (start, stop) in enumerate(pairwise(ends)):
        places = wrong[start:stop].nonzero()[:, 0]
        if len(places):
            counts[row], first[row], page[row] = len(places), places[0], tables[start + places[0]]
    return PageCheck(wrong, counts, first, page)


def _check_arguments(
    tags: Tensor, tables: Tensor, expected: Tensor, used: Tensor | None, indptr: Tensor | None
) -> None:
    check_tags(tags)
    if tables.dtype not in (torch.int32, torch.int64) or not tables.is_contiguous():
        raise ValueError(f"tables: contiguous int32 or int64 is needed, not {tables.dtype}")
    if expected.shape != (*tables.shape, 3) or expected.dtype != torch.int64 or not expected.is_contiguous():
        raise ValueError(
            f"expected: contiguous int64 of the tables' shape {list(tables.shape)} with 3 behind it is needed, not "
            f"{expected.dtype} {list(expected.shape)}"
        )
    if (used is None) == (indptr is None):
        raise ValueError("tables: give used with a matrix, or indptr with flat entries")
    if used is not None and (tables.dim() != 2 or used.shape != tables.shape[:1]):
        raise ValueError(f"used: {_shape(used)} must be [requests] of tables [requests, width], not {_shape(tables)}")
    if indptr is not None and (tables.dim() != 1 or indptr.dim() != 1 or not indptr.numel()):
        raise ValueError(
            f"indptr: {list(indptr.shape)} must be [requests + 1], with tables [entries], {_shape(tables)}"
        )


def check_tags(tags: Tensor) -> None:
    """Raises ValueError unless it is a pool's [pages, 3] int64, contiguous, and of at least one page."""
    if tags.dim() != 2 or tags.shape[1] != 3 or tags.dtype != torch.int64 or not tags.is_contiguous() or not len(tags):
        raise ValueError(f"tags: contiguous int64 [pages, 3] is needed, not {tags.dtype} {list(tags.shape)}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
