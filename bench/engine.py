"""The reference engine: with the guard against without, and against a plain loop on the same model.

The guard twice: records through the ring, and as spans (OTLP); the gate is ``sync`` in both. All live at once and
are measured in turn, round by round; whoever is not measured sleeps. Greedy, the same prompts for all.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from bench import QUICK
from guard.demo.client import ALICE, BOB, CAROL, DAVE, Client
from guard.demo.stand import Stand

ROUNDS = 1 if QUICK else 9
STREAMS = 8
TOKENS = 16 if QUICK else 96
BAR = 0.98
"""With the guard, ring and ``sync``, against without."""
THREADS = 2
_TENANTS = (ALICE, BOB, CAROL, DAVE)
_ENGINE = {
    "model": "smollm2",
    "prefill": {"pages": 64, "threads": THREADS},
    "decode": {"pages": 128, "threads": THREADS, "max_batch": STREAMS},
}


def prompt(number: int) -> str:
    """A prompt that makes the model go on for long."""
    return f"Chapter {number}. It was a dark and stormy night, and the harbour master said: "


def plain_loop(pipe: Connection) -> None:
    """A process that runs the plain loop whenever it is told to, and says how many tokens a second it made."""
    import engine.model
    from engine.model.plain import generate

    model = engine.model.load("smollm2", threads=THREADS)
    tokens = model.tokenizer.encode(prompt(0))
    generate(model, tokens, 4)
    pipe.send("ready")
    while pipe.recv():
        started = time.perf_counter()
        count = len(generate(model, tokens, TOKENS))
        pipe.send(count / (time.perf_counter() - started))


async def streams(client: Client, count: int, ask: Callable[[int], str] = prompt) -> float:
    """Output tokens a second over `count` streams at once, of the prompts that `ask` gives for 0, 1, …"""
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.stream(
                _TENANTS[n % 4], ask(n), max_tokens=TOKENS, stream_options={"include_usage": True}
            )
            for n in range(count)
        )
    )  # fmt: skip
    spent = time.perf_counter() - started
    assert all(answer.status == 200 and not answer.code for answer in answers)
    return sum(answer.output_tokens for answer in answers) / spent


async def measure(url: str, count: int, ask: Callable[[int], str] = prompt) -> float:
    """One round against one engine."""
    client = Client(url)
    try:
        return await streams(client, count, ask)
    finally:
        await client.close()


def main() -> int:
    """Prints medians and ratios."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    loop = multiprocessing.get_context("spawn").Process(target=plain_loop, args=(theirs,), daemon=True)
    loop.start()
    ours.recv()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvg") as folder, ExitStack() as stack:
        stands = {
            "engine": Stand(Path(folder, "bare"), _ENGINE),
            "engine + guard (ring)": _with_ring(Path(folder, "ring")),
            "engine + guard (OTLP)": Stand(Path(folder, "otlp"), _ENGINE, guarded=True),
        }
        for stand in stands.values():
            stack.enter_context(stand)
        for number in range(ROUNDS + 1):
            ours.send(True)
            round_ = {"plain loop, 1 stream": ours.recv()}
            for count in (1, STREAMS):
                # Each comes first in turn: what runs after another finds the caches as that one left them.
                names = list(stands)[number % 3 :] + list(stands)[: number % 3]
                for name in names:
                    round_[f"{name}, {_streams(count)}"] = asyncio.run(measure(stands[name].url, count))
            if number:  # the first warms up
                for name, value in round_.items():
                    figures.setdefault(name, []).append(value)
            print(f"  round {number}: " + ", ".join(f"{round_[name]:.1f}" for name in sorted(round_)), flush=True)
    ours.send(False)
    loop.join(timeout=10)
    for name, values in sorted(figures.items()):
        print(f"  {name:35} {statistics.median(values):7.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})")
    _ratio(figures, "engine, 1 stream", "plain loop, 1 stream")
    for count in (1, STREAMS):
        for carrier, bar in (("ring", f"; bar {BAR}"), ("OTLP", "")):
            _ratio(figures, f"engine + guard ({carrier}), {_streams(count)}", f"engine, {_streams(count)}", bar)
    return 0


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def _with_ring(folder: Path) -> Stand:
    """An engine and a guard that share nothing but memory."""
    ring = folder / "ring"
    side = {"ring": str(ring), "board": str(folder / "board"), "gate": "sync", "wait_ms": 2000, "on_timeout": "closed"}
    return Stand(folder, {**_ENGINE, "guard": side}, guarded=True, guard={"ring": {"path": str(ring)}})


def _ratio(figures: dict[str, list[float]], ours: str, theirs: str, bar: str = "") -> None:
    ratios = [a / b for a, b in zip(figures[ours], figures[theirs], strict=True)]
    print(f"  {ours} / {theirs}: {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f}{bar})")


if __name__ == "__main__":
    main()
