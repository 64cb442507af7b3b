"""The reference engine: with the guard against without, and against a plain loop on the same model.

All three live at once and are measured in turn, round by round; whoever is not measured sleeps. Greedy, the same
prompts for all.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from guard.demo.client import ALICE, BOB, CAROL, DAVE, Client
from guard.demo.stand import Stand

ROUNDS = 9
STREAMS = 8
TOKENS = 96
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


async def streams(client: Client, count: int) -> float:
    """Output tokens a second over `count` streams at once."""
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.stream(
                _TENANTS[n % 4], prompt(n), max_tokens=TOKENS, stream_options={"include_usage": True}
            )
            for n in range(count)
        )
    )  # fmt: skip
    spent = time.perf_counter() - started
    assert all(answer.status == 200 and not answer.code for answer in answers)
    return sum(answer.output_tokens for answer in answers) / spent


async def measure(url: str, count: int) -> float:
    """One round against one engine."""
    client = Client(url)
    try:
        return await streams(client, count)
    finally:
        await client.close()


def main() -> int:
    """Prints medians and ratios."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    loop = multiprocessing.get_context("spawn").Process(target=plain_loop, args=(theirs,), daemon=True)
    loop.start()
    ours.recv()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvg") as folder:
        bare = Stand(Path(folder, "bare"), _ENGINE)
        guarded = Stand(Path(folder, "guarded"), _ENGINE, guarded=True)
        with bare, guarded:
            for number in range(ROUNDS + 1):
                ours.send(True)
                round_ = {
                    "plain loop, 1 stream": ours.recv(),
                    "engine, 1 stream": asyncio.run(measure(bare.url, 1)),
                    "engine + guard, 1 stream": asyncio.run(measure(guarded.url, 1)),
                    f"engine, {STREAMS} streams": asyncio.run(measure(bare.url, STREAMS)),
                    f"engine + guard, {STREAMS} streams": asyncio.run(measure(guarded.url, STREAMS)),
                }
                if number:  # the first warms up
                    for name, value in round_.items():
                        figures.setdefault(name, []).append(value)
                print(f"  round {number}: " + ", ".join(f"{v:.1f}" for v in round_.values()), flush=True)
    ours.send(False)
    loop.join(timeout=10)
    for name, values in figures.items():
        print(f"  {name:30} {statistics.median(values):7.1f} tokens/s  ({min(values):.1f} to {max(values):.1f})")
    _ratio(figures, "engine, 1 stream", "plain loop, 1 stream")
    _ratio(figures, "engine + guard, 1 stream", "engine, 1 stream")
    _ratio(figures, f"engine + guard, {STREAMS} streams", f"engine, {STREAMS} streams")
    return 0


def _ratio(figures: dict[str, list[float]], ours: str, theirs: str) -> None:
    ratios = [a / b for a, b in zip(figures[ours], figures[theirs], strict=True)]
    print(f"  {ours} / {theirs}: {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
