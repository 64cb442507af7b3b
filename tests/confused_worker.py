"""The worker's real entry point, with a bug: Bob's block table gets Alice's first page in the middle of an answer.

No `kv.read` tells of it, because his pages are as many as before; and unlike under the fault stale-block-table, tags
are looked at.
"""

from __future__ import annotations

import sys

from engine.decode import DecodeStage
from engine.scheduler import Chunk

BEFORE = 3
"""Tokens of the answer that are right."""

plan = DecodeStage._plan


def confused(stage: DecodeStage) -> list[Chunk]:
    chunks = plan(stage)
    rows = {chunk.sequence.tenant: chunk for chunk in chunks}
    if {"alice-corp", "bob-corp"} <= rows.keys() and len(rows["bob-corp"].sequence.output) == BEFORE:
        rows["bob-corp"].table = rows["alice-corp"].pages[:1] + rows["bob-corp"].pages[1:]
    return chunks


if __name__ == "__main__":
    DecodeStage._plan = confused  # type: ignore[method-assign]
    from engine.worker import main

    sys.exit(main())
