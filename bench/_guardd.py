"""A real guardd to measure, as the tests start it, and what the kernel says of its process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from guard_process import Guardd

_TICKS = os.sysconf("SC_CLK_TCK")
LATENCY = "kvguard_verdict_latency_seconds_bucket"


@contextmanager
def running(**config: Any) -> Iterator[tuple[Guardd, Path]]:
    """A guardd with a ring, and the ring's path; files in shared memory, as they are in life."""
    with tempfile.TemporaryDirectory(prefix="kvg-bench-", dir="/dev/shm") as folder:
        ring = Path(folder, "run", "ring")
        ring.parent.mkdir()
        guard = Guardd(Path(folder), **{**config, "ring": {"path": str(ring), "rows": 32_768}})
        try:
            yield guard, ring
        finally:
            guard.stop()


def resident_mb(pid: int) -> float:
    """What of the process is in memory, in 10^6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    """CPU time that it has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def latencies(metrics: dict[str, float]) -> dict[float, float]:
    """The guard's own histogram: upper bound in seconds → records within it, all smaller ones included."""
    return {
        float(name.split('le="')[1].split('"')[0].replace("+Inf", "inf")): count
        for name, count in metrics.items()
        if name.startswith(LATENCY)
    }


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> tuple[float, float]:
    """The bounds between which the quantile of what was observed in between lies, in seconds."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    wanted, lower = q * max(counts.values()), 0.0
    for bound, count in counts.items():
        if count >= wanted:
            return lower, bound
        lower = bound
    return lower, float("inf")
