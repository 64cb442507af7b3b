"""The worker's real entry point, with a bug: Bob's block table gets Alice's first page in the middle of an answer.

Unlike under the fault stale-block-table, tags are looked at. CONFUSED_AFTER in the environment is the number of tokens
of the answer that are right.
"""

from __future__ import annotations

import os
import sys

from engine.decode import DecodeStage
from engine.scheduler import Chunk

plan = DecodeStage._plan


AFTER = int(os.environ["CONFUSED_AFTER"])


def confused(stage: DecodeStage) -> list[Chunk]:
    chunks = plan(stage)
    rows = {chunk.sequence.tenant: chunk for chunk in chunks}
    if {"alice-corp", "bob-corp"} <= rows.keys() and len(rows["bob-corp"].sequence.output) == AFTER:
        rows["bob-corp"].table = rows["alice-corp"].pages[:1] + rows["bob-corp"].pages[1:]
    return chunks


if __name__ == "__main__":
    DecodeStage._plan = confused  # type: ignore[method-assign]
    from engine.worker import main

    sys.exit(main())
