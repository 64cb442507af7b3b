"""The guard's log: one JSON object a line on standard error, for people and collectors alike. Ids and counts only."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log(level: str, event: str, **fields: Any) -> None:
    """Writes one line. A reader that is gone or a full disk behind it stops nothing.

    Args:
        level: ``info``, ``warning`` or ``error``.
        event: What happened, in a few words.
        fields: What it happened to.
    """
    line = json.dumps({"time_ns": time.time_ns(), "level": level, "event": event, **fields}, default=str)
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
