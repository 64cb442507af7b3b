"""The native ledger on one core: records a second by pages, tenants and live requests; memory by pages.

The records are those of a prefill/decode engine (``bench/native/trace.hpp``), the same mix in every cell. They stand
in memory before the clock starts; what is timed is the thread's CPU time in `parse` and `feed`, live (a reorder window
of 200 ms, `advance` every 1000 records). A cell whose ledger finds, misses or drops anything ends the bench.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import QUICK, _native
from bench._plots import Bar, Line, plot

PAGES = (10_000, 100_000, 1_000_000) if QUICK else (10_000, 100_000, 1_000_000, 10_000_000)
TENANTS = (2, 100, 10_000)
LIVE = (100, 1000) if QUICK else (100, 1000, 10_000, 100_000)
POLICIES = {
    "lifo": "the page freed last first",
    "fifo": "pages in turn",
    "shuffled": "pages in turn, out of order",
}
"""How an engine hands out its pages. The last goes over the whole pool and finds no two neighbours: the worst for a
cache, and the one that is the same in pools of every size."""
WORST = "shuffled"
ROUNDS = 1 if QUICK else 3
SIZE: dict[str, int] = {"records": 200_000, "warm": 20_000} if QUICK else {"records": 2_000_000}
PYTHON_RECORDS = 5_000 if QUICK else 100_000
BAR, FLAT, BYTES_BAR = 5e6, 0.8, 64.0

Cell = dict[str, Any]


def main() -> int:
    """Prints the tables and draws the curves."""
    cells = _matrix()
    for policy in POLICIES:
        _table(policy, cells)
    _live()
    _memory(cells)
    _against_python()
    _draw(cells)
    return 0


def _matrix() -> dict[tuple[str, int, int], Cell]:
    """Every cell, the median round of each: rounds go over all cells in turn."""
    keys = [(policy, pages, tenants) for policy in POLICIES for pages in PAGES for tenants in TENANTS]
    rounds: dict[tuple[str, int, int], list[Cell]] = {key: [] for key in keys}
    for _ in range(ROUNDS):
        for policy, pages, tenants in keys:
            cell = _native.run("ledger", policy=policy, pages=pages, tenants=tenants, live=200, **SIZE)
            rounds[policy, pages, tenants].append(cell)
    return {key: _median(cells) for key, cells in rounds.items()}


def _median(cells: list[Cell]) -> Cell:
    return sorted(cells, key=lambda cell: cell["records_per_s"])[len(cells) // 2]


def _table(policy: str, cells: dict[tuple[str, int, int], Cell]) -> None:
    mine = {key[1:]: cell for key, cell in cells.items() if key[0] == policy}
    sample = mine[PAGES[-1], TENANTS[-1]]
    print(
        f"  {POLICIES[policy]}: {sample['pages_per_record']:.1f} pages in {sample['runs_per_record']:.1f} runs and "
        f"{sample['bytes_per_record']:.0f} bytes a record; 200 live requests; million records/s"
    )
    print("    " + "pages".rjust(11) + "".join(f"{tenants:>8} tenants" for tenants in TENANTS))
    for pages in PAGES:
        row = (f"{mine[pages, tenants]['records_per_s'] / 1e6:16.2f}" for tenants in TENANTS)
        print(f"    {pages:11,}" + "".join(row))
    rates = [cell["records_per_s"] for cell in mine.values()]
    base = mine[PAGES[0], TENANTS[0]]["records_per_s"]
    print(
        f"    slowest {min(rates) / 1e6:.2f} M/s (bar {BAR / 1e6:.0f}); slowest / {PAGES[0]:,} pages and {TENANTS[0]} "
        f"tenants {min(rates) / base:.3f}, slowest / fastest {min(rates) / max(rates):.3f} (bar {FLAT})",
        flush=True,
    )


def _live() -> None:
    """By live requests, in pools that can hold them all."""
    pages = PAGES[-1]
    print(f"  by live requests; {pages:,} pages, 100 tenants, {POLICIES[WORST]}; million records/s")
    results: dict[int, list[Cell]] = {live: [] for live in LIVE}
    for _ in range(ROUNDS):
        for live in LIVE:
            results[live].append(_native.run("ledger", policy=WORST, pages=pages, tenants=100, live=live, **SIZE))
    for live, cells in results.items():
        cell = _median(cells)
        aged = statistics.median(c["second_half"] / c["first_half"] for c in cells)
        print(
            f"    {live:11,} {cell['records_per_s'] / 1e6:7.2f}   second half / first half {aged:.3f}; "
            f"{cell['requests_live']:,} live and {cell['requests_ended']:,} ended kept, "
            f"{cell['ledger_bytes'] / 1e6:.0f} MB of tables",
            flush=True,
        )


def _memory(cells: dict[tuple[str, int, int], Cell]) -> None:
    print("  memory: growth of the resident set while every page is handed out, written and freed once")
    for pages in PAGES:
        measured = cells[WORST, pages, TENANTS[0]]["page_bytes"]
        print(f"    {pages:11,} {measured:7.1f} bytes a page (bar {BYTES_BAR:.0f})")


def _against_python() -> None:
    """The same records through the readable ledger, in turn."""
    from guard.ledger import Ledger
    from guard.native import _core

    ratios, python_rates, native_rates = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.rows")
        _native.run("spans", str(path), records=PYTHON_RECORDS, pages=10_000, tenants=100, live=100)
        records = list(_core.Rows.frombytes(path.read_bytes()))
        for _ in range(ROUNDS):
            native_rates.append(_native.run("ledger", rows=path)["records_per_s"])
            found: list[object] = []
            ledger = Ledger(on_finding=lambda finding, new, found=found: found.append(finding))
            started = time.process_time()
            for number, record in enumerate(records):
                ledger.feed(record, record.time_ns)
                if number % 1000 == 999:
                    ledger.advance(record.time_ns)
            python_rates.append(len(records) / (time.process_time() - started))
            assert not found, found[0]
            ratios.append(native_rates[-1] / python_rates[-1])
    print(
        f"  the first {len(records):,} records of a trace: readable ledger {statistics.median(python_rates):,.0f} "
        f"records/s, native {statistics.median(native_rates):,.0f}; native / readable {statistics.median(ratios):.0f} "
        f"({min(ratios):.0f} to {max(ratios):.0f})"
    )


def _draw(cells: dict[tuple[str, int, int], Cell]) -> None:
    def rate(policy: str, pages: int, tenants: int) -> float:
        return cells[policy, pages, tenants]["records_per_s"] / 1e6

    bars = [Bar(f"bar: {BAR / 1e6:.0f} M records/s", BAR / 1e6)]
    plot(
        "ledger-pages.png",
        "Native ledger, one core: records a second by pages",
        ("pages in all pools", "million records/s"),
        [
            Line(f"{tenants:,} tenants, {name}", [(pages, rate(policy, pages, tenants)) for pages in PAGES],
                 color=number, dashed=policy == "lifo")
            for number, tenants in enumerate(TENANTS)
            for policy, name in ((WORST, "pages in turn"), ("lifo", "last freed first"))
        ],
        bars,
    )  # fmt: skip
    plot(
        "ledger-tenants.png",
        "Native ledger, one core: records a second by tenants (pages in turn, out of order)",
        ("tenants", "million records/s"),
        [
            Line(f"{pages:,} pages", [(tenants, rate(WORST, pages, tenants)) for tenants in TENANTS], color=number)
            for number, pages in enumerate(PAGES)
        ],
        bars,
    )


if __name__ == "__main__":
    main()
