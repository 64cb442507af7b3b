"""Paged attention in torch: a batch of prompt chunks and single tokens over one pool of pages.

The pool is one contiguous tensor [pages, layers, 2 (k, v), page_tokens, kv_heads, head_dim]. A sequence's block
table names its pages in order; token t lies in page ``table[t // page_tokens]`` at place ``t % page_tokens``. What
lies in a page behind the sequence's last token, or in a page that no table names, never reaches an output, be it
NaN: pages are handed out with their last owner's bytes still in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class _Group:
    """Sequences that one call of the attention kernel computes: single tokens of several, or a chunk of one."""

    rows: Tensor | None
    """[sequences · queries], their tokens' places in the batch; None: the whole batch, in its order."""
    sequences: int
    queries: int
    """New tokens of each."""
    length: int
    """Tokens of the longest, the new ones included."""
    pages: Tensor
    """[2 · sequences · pages], rows of the pool's [pages · layers · 2, …] view at layer 0: all k's, then all v's."""
    mask: Tensor | None
    """Added to the scores; broadcasts to [sequences, heads, queries, length]. None: everything is seen."""
    unread: Tensor | None
    """Places in [sequences · pages · page_tokens] behind their sequence's end, where the mask alone does not do:
    0 · NaN is NaN."""
    causal: bool
    """The chunk is the whole sequence, so that the kernel's own causal mask is right."""
    scratch: Tensor
    """[2 · sequences · pages, page_tokens · kv_heads · head_dim]: the gathered pages, the same memory each layer."""


@dataclass(frozen=True)
class BatchMeta:
    """What a step's batch looks like; built once a step, used by every layer."""

    positions: Tensor
    """[n] int64: each new token's position in its sequence, for `engine.model.llama.Model.forward`."""
    last: Tensor
    """[sequences] int64: the row of each sequence's last new token, the one whose logits are wanted."""
    slots: Tensor
    """[n] int64: each new token's place in the pool's [pages · layers · 2 · page_tokens, …] view at layer 0."""
    groups: tuple[_Group, ...]

    @classmethod
    def build(
        cls, pool: Tensor, tables: Sequence[Sequence[int]], lengths: Sequence[int], new_tokens: Sequence[int]
    ) -> BatchMeta:
        """Describes a batch; its flat tokens are those of the first sequence, then of the second, and so on.

        Args:
            pool: [pages, layers, 2, page_tokens, kv_heads, head_dim], contiguous.
            tables: For each sequence the pages it attends to, in order; more than its length needs is no harm.
            lengths: For each sequence its tokens after this step.
            new_tokens: How many of those are this step's: their k and v are written, and they ask.

        Raises:
            ValueError: The pool has another shape, or a sequence does not fit its table or the pool; names it.
        """
        if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
            raise ValueError(
                f"pool: contiguous [pages, layers, 2, page_tokens, kv_heads, head_dim] is needed, not "
                f"{list(pool.shape)}"
            )
        pages, layers, _, page_tokens, kv_heads, head_dim = pool.shape
        width = page_tokens * kv_heads * head_dim
        used = used_tables(tables, lengths, new_tokens, pages, page_tokens)
        slots = [
            table[t // page_tokens] * layers * 2 * page_tokens + t % page_tokens
            for table, length, new in zip(used, lengths, new_tokens, strict=True)
            for t in range(length - new, length)
        ]
        starts = [0]
        for new in new_tokens:
            starts.append(starts[-1] + new)

        def group(members: Sequence[int], queries: int) -> _Group:
            length = max(lengths[i] for i in members)
            columns = max(len(used[i]) for i in members)
            # A shorter table is filled up with its own first page: read, and then not seen.
            padded = [[*used[i], *[used[i][0]] * (columns - len(used[i]))] for i in members]
            base = torch.tensor(padded, dtype=torch.int64).flatten() * (layers * 2)
            mask = unread = None
            even = all(lengths[i] == length for i in members)
            if not even:
                ends = torch.tensor([lengths[i] for i in members])[:, None]
                behind = torch.arange(length) >= ends
                mask = _blocked(behind, pool.dtype)[:, None, None, :]
                behind = torch.arange(columns * page_tokens) >= ends
                unread = behind.flatten().nonzero()[:, 0]
            causal = queries > 1 and queries == length
            if queries > 1 and not causal:
                asked = torch.arange(length - queries, length)[:, None]
                mask = _blocked(torch.arange(length) > asked, pool.dtype)
            rows = list(chain.from_iterable(range(starts[i], starts[i + 1]) for i in members))
            return _Group(
                rows=None if rows == list(range(starts[-1])) else torch.tensor(rows),
                sequences=len(members),
                queries=queries,
                length=length,
                pages=torch.cat((base, base + 1)),
                mask=mask,
                unread=unread,
                causal=causal,
                scratch=torch.empty((2 * base.shape[0], width), dtype=pool.dtype),
            )

        chunks = [group([i], new) for i, new in enumerate(new_tokens) if new > 1]
        singles = [group(members, 1) for members in _alike([i for i, n in enumerate(new_tokens) if n == 1], used)]
        return cls(
            positions=positions_of(lengths, new_tokens),
            last=torch.tensor(starts[1:]) - 1,
            slots=torch.tensor(slots),
            groups=(*chunks, *singles),
        )


def used_tables(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    new_tokens: Sequence[int],
    pages: int,
    page_tokens: int,
) -> list[Sequence[int]]:
    """What of each block table a step reads, once it is seen that the batch fits its tables and the pool.

    Raises:
        ValueError: It does not; names the sequence.
    """
    if not len(tables) == len(lengths) == len(new_tokens) or not tables:
        raise ValueError(
            f"batch: as many tables ({len(tables)}) as lengths ({len(lengths)}) and new_tokens "
            f"({len(new_tokens)}) are needed, and at least one"
        )
    used: list[Sequence[int]] = []
    for place, (table, length, new) in enumerate(zip(tables, lengths, new_tokens, strict=True)):
        if not 1 <= new <= length:
            raise ValueError(f"sequence {place}: {new} new tokens of {length}: at least 1, at most all")
        needed = -(-length // page_tokens)
        if len(table) < needed:
            raise ValueError(
                f"sequence {place}: {length} tokens need {needed} pages of {page_tokens} tokens, its block "
                f"table has {len(table)}"
            )
        table = table[:needed]
        if min(table) < 0 or max(table) >= pages:
            raise ValueError(f"sequence {place}: its block table names a page outside 0..{pages - 1}")
        used.append(table)
    return used


def positions_of(lengths: Sequence[int], new_tokens: Sequence[int]) -> Tensor:
    """[n] int64: each new token's place in its sequence."""
    return torch.tensor(
        list(chain.from_iterable(range(end - new, end) for end, new in zip(lengths, new_tokens, strict=True)))
    )


def _alike(members: list[int], used: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sorts single-token sequences into groups whose longest table is at most twice its shortest.

    Together they are one kernel call, but each is read as if it were as long as the longest.
    """
    longest_first = sorted(members, key=lambda i: -len(used[i]))
    groups: list[list[int]] = []
    for i in longest_first:
        if groups and 2 * len(used[i]) >= len(used[groups[-1][0]]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def _blocked(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(blocked.shape, dtype=dtype).masked_fill_(blocked, float("-inf"))


def paged_attention(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, layer: int, meta: BatchMeta) -> Tensor:
    """Writes the new tokens' k and v into their pages and attends, causally, over each sequence's block table.

    Args:
        q: [n, heads, head_dim], the batch's new tokens in the order of `BatchMeta.build`.
        k: [n, kv_heads, head_dim].
        v: [n, kv_heads, head_dim].
        pool: The one that `meta` was built for.
        layer: From 0.
        meta: The step's batch.

    Returns:
        [n, heads, head_dim]. Softmax(q kᵀ / √head_dim) v, Vaswani et al. 2017; head h reads KV head
        h // (heads / kv_heads), Ainslie et al. 2023.
    """
    n, heads, width = q.shape
    pages, layers, _, page_tokens, kv_heads, _ = pool.shape
    tokens = pool.view(pages * layers * 2 * page_tokens, kv_heads * width)
    slots = meta.slots + 2 * layer * page_tokens
    tokens.index_copy_(0, slots, k.reshape(n, -1))
    tokens.index_copy_(0, slots + page_tokens, v.reshape(n, -1))

    halves = pool.view(pages * layers * 2, page_tokens * kv_heads * width)
    out: Tensor | None = None
    for group in meta.groups:
        torch.index_select(halves, 0, group.pages + 2 * layer, out=group.scratch)
        if group.unread is not None:
            group.scratch.view(2, -1, kv_heads * width).index_fill_(1, group.unread, 0)
        kept = group.scratch.view(2, group.sequences, -1, kv_heads, width)[:, :, : group.length].transpose(2, 3)
        asked = q if group.rows is None else q.index_select(0, group.rows)
        if group.queries == 1:
            # The heads of a KV head's group see the same keys: to the kernel they are so many queries of one head.
            asked = asked.reshape(group.sequences, kv_heads, heads // kv_heads, width)
            mixed = F.scaled_dot_product_attention(asked, kept[0], kept[1], attn_mask=group.mask)
            mixed = mixed.reshape(-1, heads, width)
        else:
            asked = asked.transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(
                asked, kept[0], kept[1], attn_mask=group.mask, is_causal=group.causal, enable_gqa=True
            )
            mixed = mixed[0].transpose(0, 1)
        if group.rows is None:
            return mixed
        if out is None:
            out = torch.empty_like(q)
        out.index_copy_(0, group.rows, mixed)
    assert out is not None  # `build` makes no batch without a group
    return out
