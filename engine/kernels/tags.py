"""Owner tags of pages: who may read what lies there.

A tag is one row beside the pool: (tenant hash, request hash, generation), written with the page's bytes and carried
with them by a transfer. A reader that compares it with what it expects before it attends notices a page that was
freed, handed to somebody else, or never arrived, whatever the block table says.
"""

from __future__ import annotations

from torch import Tensor


def mismatched(tags: Tensor, tables: Tensor, expected: Tensor) -> Tensor:
    """Which entries of the block tables name a page that is not what its reader expects; for the whole batch at once.

    Args:
        tags: [pages, 3] int64, the bits of the u64 values.
        tables: [...] int64, page indices; below 0 where a row has no entry.
        expected: [..., 3] int64, the tag each entry must have.

    Returns:
        [...] bool, True where the page must not be read: another tag, or no such page in the pool.

    Raises:
        ValueError: The shapes do not fit together.
    """
    if tags.dim() != 2 or tags.shape[1] != 3 or expected.shape != (*tables.shape, 3):
        raise ValueError(
            f"tags {list(tags.shape)} must be [pages, 3] and expected {list(expected.shape)} the tables' shape "
            f"{list(tables.shape)} with 3 behind it"
        )
    absent = tables >= tags.shape[0]
    found = tags[tables.clamp(0, tags.shape[0] - 1)]
    return ((found != expected).any(dim=-1) | absent) & (tables >= 0)
