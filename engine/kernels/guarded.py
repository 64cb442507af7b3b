"""Paged attention that refuses pages: each page's tag is compared, at the read, with what the entry expects.

A page that does not match is masked: its bytes reach no score and no output, be they NaN, and what is computed is
attention over the other pages (zeros, if there are none). The entry is marked in a buffer. After its last read every
program looks a second time, because nothing keeps a writer from changing a page between the check and the read, and
marks what has changed meanwhile; then bytes may have reached the output. So a request with a mark gets no answer:
**the caller discards its output**. Marks only ever go up; one buffer serves all layers of a step.

Prompt chunks and single tokens are the same call: a sequence has some new tokens, whose keys and values are in its
pages already, and each attends, causally, to everything before it. The pool is given a layer at a time as two strided
views, so that this engine's [pages, layers, 2, page_tokens, kv_heads, head_dim] and pools of one tensor a layer (vLLM,
SGLang; with tokens or heads in front) all work as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.kernels.backend import Backend, in_triton
from engine.kernels.ownership import PageCheck, check_tags, refused_entries, summary


@dataclass(frozen=True)
class GuardedBatch:
    """What one step's sequences are; built once a step, used by every layer."""

    tables: Tensor
    """[requests, width] int32: block tables; what lies behind a sequence's last page is never looked at."""
    expected: Tensor
    """[requests, width, 3] int64: the tag that each entry's page must bear."""
    lengths: Tensor
    """[requests] int32: tokens after this step."""
    starts: Tensor
    """[requests] int32: each sequence's first row in q and in the output."""
    new_tokens: Tensor
    """[requests] int32: so many rows are its; they are its last tokens."""
    longest: int
    """No sequence has more tokens than this; it decides how far the work is split up."""
    most_new: int
    """No sequence has more new tokens than this."""
    marks: Tensor
    """[requests, width] uint8: 1 where an entry's page was not what it expects."""

    @classmethod
    def build(
        cls,
        tables: Sequence[Sequence[int]],
        expected: Sequence[Tensor],
        lengths: Sequence[int],
        new_tokens: Sequence[int],
        device: torch.device,
        *,
        starts: Sequence[int] | None = None,
    ) -> GuardedBatch:
        """A batch out of ragged tables.

        Args:
            tables: Each sequence's pages; below 0 or behind the pool's end is a violation, not an error.
            expected: [at least the table's length, 3] int64 for each.
            lengths: Each sequence's tokens after this step.
            new_tokens: How many of those are this step's: those that ask.
            device: The pool's.
            starts: Each sequence's first row; None: the first sequence's rows, then the second's, and so on.

        Raises:
            ValueError: The arguments do not fit together; names the sequence.
        """
        if not len(tables) == len(expected) == len(lengths) == len(new_tokens) or not tables:
            raise ValueError(
                f"batch: as many tables ({len(tables)}) as expected ({len(expected)}), lengths ({len(lengths)}) and "
                f"new_tokens ({len(new_tokens)}) are needed, and at least one"
            )
        width = max(1, max(map(len, tables)))
        padded = torch.full((len(tables), width), -1, dtype=torch.int32)
        wanted = torch.zeros((len(tables), width, 3), dtype=torch.int64)
        for place, (table, tags, length, new) in enumerate(zip(tables, expected, lengths, new_tokens, strict=True)):
            if not 1 <= new <= length:
                raise ValueError(f"sequence {place}: {new} new tokens of {length}: at least 1, at most all")
            if len(tags) < len(table):
                raise ValueError(f"sequence {place}: {len(table)} pages, but tags are expected of {len(tags)} only")
            padded[place, : len(table)] = torch.tensor(table, dtype=torch.int32)
            wanted[place, : len(table)] = tags[: len(table)]
        if starts is None:
            starts = [0, *accumulate(new_tokens[:-1])]
        return cls(
            padded.to(device),
            wanted.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(new_tokens, dtype=torch.int32, device=device),
            max(lengths),
            max(new_tokens),
            torch.zeros((len(tables), width), dtype=torch.uint8, device=device),
        )

    def check(self) -> PageCheck:
        """What has been marked so far, as `engine.kernels.ownership.check_pages` says it."""
        return summary(self.marks != 0, self.tables)


def guarded_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tags: Tensor,
    batch: GuardedBatch,
    *,
    out: Tensor | None = None,
    scale: float | None = None,
    guard: bool = True,
    splits: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attends over one layer's pages and marks those that are not what is expected, see the module.

    Args:
        q: [n, heads, head_dim] float32, float16 or bfloat16, the batch's rows.
        k_pages: [pages, page_tokens, kv_heads, head_dim] of q's dtype and any strides; the new tokens' keys are there.
        v_pages: The same, with values.
        tags: [pages, 3] int64, contiguous.
        batch: The step's sequences. Each one's width times page_tokens is at least its length.
        out: [n, heads, head_dim], contiguous, of q's dtype: only the batch's rows are written; None: a new one.
        scale: Of the scores; None: 1 / √head_dim.
        guard: False compiles the same kernel without the check, to be measured against; then every entry must name a
            page of the pool, and marks stay as they are.
        splits: So many programs share a sequence's pages, and a second kernel puts their parts together (flash
            decoding, Dao et al. 2023); None: as many as fill the device.
        backend: See `engine.kernels.backend`.

    Returns:
        [n, heads, head_dim] of q's dtype: softmax(scale · q kᵀ) v over the pages that are the request's; head *h*
        reads KV head h // (heads / kv_heads). Zeros for a row that has no such page.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together; names the tensor.
    """
    _check_arguments(q, k_pages, v_pages, tags, batch)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
        raise ValueError(
            f"out: contiguous {q.dtype} {_shape(q)} on {q.device} is needed, not {out.dtype} {_shape(out)}"
        )
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if in_triton(q, backend):
        from engine.kernels import guarded_triton

        guarded_triton.attention(q, k_pages, v_pages, tags, batch, out, scale, guard, splits)
    else:
        _attention(q, k_pages, v_pages, tags, batch, out, scale, guard)
    return out


def _attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tags: Tensor,
    batch: GuardedBatch,
    out: Tensor,
    scale: float,
    guard: bool,
) -> None:
    """The same in torch, a sequence at a time, in float32: what the kernels are compared with."""
    page_tokens, kv_heads = k_pages.shape[1:3]
    spans = zip(batch.lengths.tolist(), batch.starts.tolist(), batch.new_tokens.tolist(), strict=True)
    for request, (length, start, new) in enumerate(spans):
        rows = slice(start, start + new)
        used = -(-length // page_tokens)
        table = batch.tables[request, :used]
        seen = torch.ones(used, dtype=torch.bool, device=q.device)
        if guard:
            seen = ~refused_entries(tags, table, batch.expected[request, :used])
            batch.marks[request, :used] |= (~seen).to(torch.uint8)
        token_seen = seen.repeat_interleave(page_tokens)[:length]
        pages = torch.where(seen, table, 0).long()

        def gather(half: Tensor, pages: Tensor = pages, length: int = length, seen: Tensor = token_seen) -> Tensor:
            kept = half[pages].flatten(0, 1)[:length].float()
            return torch.where(seen[:, None, None], kept, 0).transpose(0, 1)  # [kv_heads, length, head_dim]

        asked = (
            q[rows].float().view(new, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
        )  # [kv_heads, group, new, head_dim]
        scores = scale * asked @ gather(k_pages)[:, None].transpose(2, 3)
        position = torch.arange(length - new, length, device=q.device)
        hidden = (torch.arange(length, device=q.device) > position[:, None]) | ~token_seen
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.where(hidden.all(dim=1)[:, None], 0, scores.softmax(dim=-1))
        out[rows] = (weights @ gather(v_pages)[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def _check_arguments(q: Tensor, k_pages: Tensor, v_pages: Tensor, tags: Tensor, batch: GuardedBatch) -> None:
    check_tags(tags)
    if q.dim() != 3 or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q: float32, float16 or bfloat16 [n, heads, head_dim] is needed, not {q.dtype} {_shape(q)}")
    for name, half in (("k_pages", k_pages), ("v_pages", v_pages)):
        fits = half.dim() == 4 and len(half) == len(tags) and half.shape[3] == q.shape[2] and half.dtype == q.dtype
        if not fits or half.shape != k_pages.shape or half.device != q.device:
            raise ValueError(
                f"{name}: {q.dtype} [{len(tags)}, page_tokens, kv_heads, {q.shape[2]}] on {q.device} is needed, not "
                f"{half.dtype} {_shape(half)} on {half.device}"
            )
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"q: {q.shape[1]} heads do not divide into {k_pages.shape[2]} KV heads")
    if batch.tables.device != q.device or tags.device != q.device:
        raise ValueError(f"batch on {batch.tables.device} and tags on {tags.device}, but q on {q.device}")
    if batch.longest > batch.tables.shape[1] * k_pages.shape[1]:
        raise ValueError(
            f"batch: {batch.longest} tokens do not fit {batch.tables.shape[1]} pages of {k_pages.shape[1]} tokens"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
