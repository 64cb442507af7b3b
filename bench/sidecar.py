"""What the sidecar costs beside an engine, and how fast a recorded trace is judged.

Resident memory and CPU of an idle guardd; the growth of its resident set while pools of a million pages are handed
out, written and freed once, through the ring; `guardctl replay` over OTLP/JSON lines, lines a minute and peak memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import QUICK, _native
from bench._guardd import cpu_s, resident_mb, running

PAGES = 100_000 if QUICK else 1_000_000
LINES = 20_000 if QUICK else 1_000_000
IDLE_S = 2 if QUICK else 20
ROUNDS = 1 if QUICK else 3
IDLE_BAR_MB, PAGES_BAR_MB, LINES_BAR = 80.0, 64.0, 500_000


def main() -> int:
    """Prints what it costs."""
    rounds = [_beside() for _ in range(ROUNDS)]
    idle, cpu, grown = (statistics.median(values) for values in zip(*rounds, strict=True))
    print(f"  guardd idle: {idle:.1f} MB resident (bar {IDLE_BAR_MB:.0f}), {cpu:.2%} of a core")
    print(f"  {PAGES:,} pages touched: {grown:+.1f} MB resident (bar {PAGES_BAR_MB:.0f} a million)", flush=True)
    _replay()
    return 0


def _beside() -> tuple[float, float, float]:
    """Idle megabytes and CPU share, and by how many megabytes it grew."""
    with running(mode="enforce") as (guard, ring):
        pid = guard.process.pid
        time.sleep(1)
        started, cpu = time.monotonic(), cpu_s(pid)
        time.sleep(IDLE_S)
        share = (cpu_s(pid) - cpu) / (time.monotonic() - started)
        idle = resident_mb(pid)
        last: dict[str, int] = _native.run("writer", ring=ring, touch=1, pages=PAGES)
        board = guard.board()
        deadline = time.monotonic() + 60
        while any(board.watermark(stream, 1) < seq for stream, seq in last.items()):
            if time.monotonic() > deadline:
                sys.exit("the guard did not judge all that was written")
            time.sleep(0.01)
        return idle, share, resident_mb(pid) - idle


def _replay() -> None:
    rates, peaks = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        lines = _native.run("spans", str(path), records=LINES, pages=100_000, tenants=100, live=1000)["records"]
        size = path.stat().st_size
        for _ in range(ROUNDS):
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-c", "from guard.cli import main; main()", "replay", str(path)],
                stdout=subprocess.DEVNULL,
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                sys.exit(f"guardctl replay ended with {process.returncode}: a clean trace has no findings")
            rates.append(lines / (time.monotonic() - started) * 60)
            peaks.append(usage.ru_maxrss / 1024)
    print(
        f"  guardctl replay, {lines:,} lines of {size / lines:.0f} bytes: {statistics.median(rates) / 1e6:.2f} M lines "
        f"a minute ({min(rates) / 1e6:.2f} to {max(rates) / 1e6:.2f}; bar {LINES_BAR / 1e6:g}), "
        f"peak {max(peaks):.0f} MiB resident"
    )


if __name__ == "__main__":
    main()
