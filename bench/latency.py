"""Record written → verdict on the board: four writers, the ring, a real guardd.

The writers (``bench/native/writer.cpp``) are processes of their own that write the streams of one prefill/decode
engine, each record stamped when it is written. The latency is had twice: from outside, by writers that look at the
board until a record that they drew is judged, clock to clock; and from the guard's own histogram, which holds every
record. Writers, guard and looking share the machine's cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from bench import QUICK, _native
from bench._guardd import cpu_s, latencies, quantile, running
from bench._plots import Bar, Line, plot
from guard.act.board.layout import key_of

RATES = (1_000, 100_000) if QUICK else (1_000, 10_000, 50_000, 100_000, 200_000)
RATE = 100_000
"""The one that the bars are for."""
BARS_MS = {0.5: 0.2, 0.99: 1.0}
ROUNDS = 1 if QUICK else 3
SECONDS = 3 if QUICK else 11
WARM_MS = 1000
STREAMS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
QUANTILES = (0.5, 0.99, 0.999)


def main() -> int:
    """Prints quantiles by rate and draws them."""
    print(f"  {'records/s':>9}  from outside, ms: {'p50':>7} {'p99':>7} {'p99.9':>7}   the guard's histogram, ms")
    medians: dict[int, list[float]] = {}
    clean = True
    for rate in RATES:
        rounds = [measure(rate) for _ in range(ROUNDS if rate == RATE else 1)]
        medians[rate] = [statistics.median(values) for values in zip(*(r["outside"] for r in rounds), strict=True)]
        for r in rounds:
            clean = clean and not r["findings"] and not r["dropped"]
            print(
                f"  {rate:9,}  {len(r['samples']):6,} samples:   "
                + " ".join(f"{value:7.3f}" for value in r["outside"])
                + "   "
                + ", ".join(
                    f"p{q * 100:g} {low:g} to {high:g}" for q, (low, high) in zip(QUANTILES, r["own"], strict=True)
                )
                + f"; guard {r['cpu']:.0%} of a core; {r['written']:,} records, {r['dropped']} lost, "
                f"writers up to {r['latest_us'] / 1000:.1f} ms behind"
                + (f"; {r['findings']} FINDINGS in a clean trace: the machine was too busy" if r["findings"] else ""),
                flush=True,
            )
    for q, bar in BARS_MS.items():
        print(f"  at {RATE:,} records/s p{q * 100:g} {medians[RATE][QUANTILES.index(q)]:.3f} ms (bar {bar})")
    plot(
        "latency-rate.png",
        "From a record's writing to its verdict on the board (ring, 4 writers, 2 cores)",
        ("records a second", "milliseconds"),
        [
            Line(f"p{q * 100:g}", [(rate, medians[rate][number]) for rate in RATES], color=number)
            for number, q in enumerate(QUANTILES)
        ],
        [
            Bar(f"bar at {RATE // 1000} k/s: p{q * 100:g} ≤ {bar} ms", bar, QUANTILES.index(q))
            for q, bar in BARS_MS.items()
        ],
        log_y=True,
    )
    return 0 if clean else 1


def measure(rate: int) -> dict[str, Any]:
    """One run at one rate."""
    program = _native.program("writer")
    with running(mode="enforce") as (guard, ring):
        start_ns = time.monotonic_ns() + 1_500_000_000
        writers = []
        for number, stream in enumerate(STREAMS):
            low, high = key_of(stream)
            options = {
                "ring": ring, "board": guard.board_path, "worker": number, "keys": f"{low}:{high}", "rate": rate,
                "seconds": SECONDS, "start-ns": start_ns, "warm-ms": WARM_MS, "pages": 100_000, "tenants": 100,
                "live": min(1000, max(50, rate // 100)),
            }  # fmt: skip
            words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
            writers.append(subprocess.Popen([program, *words], stdout=subprocess.PIPE, text=True))
        time.sleep(max(0.0, (start_ns - time.monotonic_ns()) / 1e9 + WARM_MS / 1000))
        before, cpu_before, measured_from = latencies(guard.metrics()), cpu_s(guard.process.pid), time.monotonic()
        said = [writer.communicate(timeout=60 + SECONDS)[0] for writer in writers]
        cpu = (cpu_s(guard.process.pid) - cpu_before) / (time.monotonic() - measured_from)
        after = latencies(guard.metrics())
        findings = {name: count for name, count in guard.metrics().items() if name.startswith("kvguard_findings_total")}
    if any(writer.returncode for writer in writers):
        sys.exit("a writer failed")
    results = [json.loads(text) for text in said]
    samples = sorted(sample / 1e6 for result in results for sample in result["samples"])
    return {
        "samples": samples,
        "outside": [samples[min(len(samples) - 1, int(q * len(samples)))] for q in QUANTILES],
        "own": [tuple(1000 * bound for bound in quantile(before, after, q)) for q in QUANTILES],
        "cpu": cpu,
        "written": sum(result["written"] for result in results),
        "dropped": sum(result["dropped"] for result in results),
        "latest_us": max(result["latest_us"] for result in results),
        "findings": int(sum(findings.values())),
    }


if __name__ == "__main__":
    main()
