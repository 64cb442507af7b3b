"""Page digests: the native hash against xxh3 and CRC32C, and what digests and tags cost the engine.

One core each, the same pages for all, each in turn round by round. The engine's part is like that of ``bench.engine``,
without the guard: one engine with digests and the tags' check, one with tags only, one with neither; the requests'
prompts come out of the prefix cache after the first round, so that there is the more transfer to a token.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, partialmethod
from pathlib import Path

from bench import QUICK
from bench.engine import STREAMS, THREADS, TOKENS, measure, prompt
from guard.demo.stand import Stand

SIZES = (64 << 10, 256 << 10, 2 << 20)
ROUNDS = 2 if QUICK else 15
ENGINE_ROUNDS = 1 if QUICK else 9
BYTES = (4 << 20) if QUICK else (64 << 20)
"""What one measurement hashes."""
BAR_GB_S = 10.0
"""C++, a core, pages of 256 KiB."""
BAR_ENGINE = 0.98
"""With digests and tags, against without."""
NAMES = ("C++ hash", "C++ hash, sealed", "xxh3 (64 bits)", "xxh3 (128 bits)", "CRC32C")
_ENGINE = {
    "model": "smollm2",
    "prefill": {"pages": 80, "threads": THREADS},
    "decode": {"pages": 160, "threads": THREADS, "max_batch": STREAMS},
}
_LONG = " The wind had turned, the lamps along the quay went out one after the other, and nobody had come back." * 4


def main() -> int:
    """Prints medians and ratios."""
    for size in SIZES:
        _print_speeds(size)
    _print_memory()
    _print_torch()
    asyncio.run(_engines())
    return 0


# Speeds


def _ways(size: int) -> dict[str, Callable[[], object]]:
    """Each hashes `BYTES` of one page after the other, out of as few as stay in the cache."""
    import google_crc32c
    import numpy as np
    import xxhash

    from hooks.digest import Digester

    pages = np.random.default_rng(1).integers(0, 256, (max(1, (256 << 10) // size), size), dtype=np.uint8)
    order = list(range(len(pages))) * (BYTES // pages.nbytes)
    digester = Digester(secrets.token_bytes(32))
    key, pool = digester.tenant("t").hash, pages.data
    how = {"generations": order, "nonce": bytes(16)}
    views = [page.data for page in pages]
    copies = [page.tobytes() for page in pages]  # google_crc32c takes nothing but bytes
    return {
        "C++ hash": lambda: key.pages([pool], order),
        "C++ hash, sealed": lambda: digester.pages([pool], "t", "r", order, **how),
        "xxh3 (64 bits)": lambda: [xxhash.xxh3_64_intdigest(views[i]) for i in order],
        "xxh3 (128 bits)": lambda: [xxhash.xxh3_128_intdigest(views[i]) for i in order],
        "CRC32C": lambda: [google_crc32c.value(copies[i]) for i in order],
    }


def _in_turn(ways: dict[str, Callable[[], object]], nbytes: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """GB/s of each in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            spent = time.perf_counter() - started
            if number:  # the first warms up
                speeds[name].append(nbytes / spent / 1e9)
    gc.enable()
    return speeds


def _print_speeds(size: int) -> None:
    from guard.native import _core

    speeds = _in_turn(_ways(size), BYTES)
    print(f"  pages of {size >> 10} KiB, in the cache ({_core.HASH_WAYS[0]})")
    for name in NAMES:
        values = speeds[name]
        ratio = statistics.median(a / b for a, b in zip(speeds["C++ hash"], values, strict=True))
        bar = f"; bar {BAR_GB_S:.0f}" if name == "C++ hash" and size == 256 << 10 else ""
        against = "" if name == "C++ hash" else f"; the C++ hash has {ratio:.2f} times that"
        _print(name, values, bar, against)


def _print_memory() -> None:
    """Each page once, from a pool that no cache holds; and what a copy reads in that time."""
    import numpy as np

    from guard.native import _core

    pool = np.ones(((64 << 20 if QUICK else 1 << 30) >> 18, 256 << 10), dtype=np.uint8)
    target = np.empty_like(pool[:64])
    material, order = secrets.token_bytes(6176), list(range(len(pool)))

    def copy() -> None:
        for at in range(0, len(pool), 64):
            np.copyto(target, pool[at : at + 64])

    ways = {way: partial(_core.HashKey(material, way).pages, [pool.data], order) for way in _core.HASH_WAYS}
    speeds = _in_turn({**ways, "memcpy": copy}, pool.nbytes, 1 if QUICK else 5)
    print("  pages of 256 KiB, each once out of memory")
    for name, values in speeds.items():
        _print(name, values)


def _print(name: str, values: list[float], bar: str = "", more: str = "") -> None:
    print(f"    {name:18} {statistics.median(values):6.1f} GB/s  ({min(values):.1f} to {max(values):.1f}{bar}){more}")


def _print_torch() -> None:
    import torch

    from engine.kernels.digest import HashTensors, page_hashes

    torch.set_num_threads(1)
    key, pool = HashTensors.of(secrets.token_bytes(6176)), torch.randint(0, 256, (8, 256 << 10), dtype=torch.uint8)
    speeds = _in_turn({"torch": lambda: page_hashes([pool], range(8), key)}, pool.nbytes)["torch"]
    print(f"  torch, CPU, 1 thread, pages of 256 KiB {statistics.median(speeds):.2f} GB/s")


# The engine


class _Untagged(Stand):
    """An engine whose workers do not look at tags: no configuration has that, it is for this comparison only."""

    def _start(self, name: str, command: list[str]) -> None:
        assert command[1:3] == ["-m", "engine"]
        super()._start(name, [command[0], "-m", "bench.digest", "engine", *command[3:]])


async def _engines() -> None:
    with tempfile.TemporaryDirectory(prefix="kvg") as folder, ExitStack() as stack:
        stands = {
            "digests + tags": Stand(Path(folder, "both"), {**_ENGINE, "digests": True}),
            "tags": Stand(Path(folder, "tags"), {**_ENGINE, "digests": False}),
            "neither": _Untagged(Path(folder, "none"), {**_ENGINE, "digests": False}),
        }
        for stand in stands.values():
            stack.enter_context(stand)
        figures: dict[str, list[float]] = {name: [] for name in stands}
        for number in range(ENGINE_ROUNDS + 1):
            # Each comes first in turn: what runs after another finds the caches as that one left them.
            for name in list(stands)[number % 3 :] + list(stands)[: number % 3]:
                value = await measure(stands[name].url, STREAMS, lambda n: prompt(n) + _LONG)
                if number:  # the first warms up, and fills the prefix caches
                    figures[name].append(value)
            print(f"  round {number}", flush=True)
    print(f"  the engine, {STREAMS} streams of {TOKENS} tokens")
    for name, values in figures.items():
        print(f"    {name:18} {statistics.median(values):6.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})")
    for name, bar in (("digests + tags", f"; bar {BAR_ENGINE}"), ("tags", "")):
        ratios = [a / b for a, b in zip(figures[name], figures["neither"], strict=True)]
        print(f"    {name} / neither: {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f}{bar})")


def _untagged_engine(words: list[str]) -> int:
    from engine.__main__ import main as engine

    return engine(words, worker=("-m", "bench.digest", "worker"))


def _untagged_worker(words: list[str]) -> int:
    from engine import worker
    from engine.runner import Runner

    Runner.__init__ = partialmethod(Runner.__init__, check_tags=False)  # type: ignore[assignment, method-assign]
    return worker.main(words)


if __name__ == "__main__":
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role == "engine":
        sys.exit(_untagged_engine(sys.argv[2:]))
    if role == "worker":
        sys.exit(_untagged_worker(sys.argv[2:]))
    sys.exit(main())
