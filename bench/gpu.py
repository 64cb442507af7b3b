"""The kernels on a GPU: equal to torch's, and what the guard costs.

`python bench/gpu.py` or `python -m bench gpu`; under six minutes on one GPU, and where there is none it says so. Every
kernel is compared with torch on the device first. Attention is measured guarded against the same kernel compiled
without the guard, alternating, each as one graph and with a cold cache; the other kernels as a share of what a copy
moves on the same device. Prints a table, and with ``--out FOLDER`` leaves it there as gpu.md beside the plots.

``--interpret`` runs all of it on tiny shapes in Triton's interpreter: it shows that it runs, its times mean nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the folder that it lies in has an engine.py too
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

INTERPRET = "--interpret" in sys.argv
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import QUICK, _plots  # noqa: E402
from bench._gpu import Problem, Stopwatch, checks  # noqa: E402
from engine.kernels import check_pages  # noqa: E402
from engine.kernels.digest import HashTensors  # noqa: E402

BUDGET_S = 300
"""After so long the attention shapes that are left are left out; the table says which."""
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 16) if INTERPRET else (32, 8, 128)
BATCHES = (1, 2) if INTERPRET else (1, 16) if QUICK else (1, 4, 16, 64, 256)
CONTEXTS = (24,) if INTERPRET else (1 << 10, 1 << 13) if QUICK else (1 << 10, 1 << 13, 1 << 15, 1 << 17)
PAGES = (4, 16) if INTERPRET else (16, 64)
STEPS = ((2, 6),) if INTERPRET else ((1, 1 << 10), (16, 1 << 10), (64, 1 << 12))
"""(batch, context) of the engine's steps."""
ROUNDS = 1 if INTERPRET else 3 if QUICK else 21
BAR = 1.01
"""Guarded against unguarded attention."""
DIGEST_BAR = 0.8
"""Of the read side of a copy."""
PAGE_BYTES = 256 if INTERPRET else 2 << 20
"""A page of 16 tokens of 32 layers of the heads above."""
MOST_BYTES = 16 << 30
"""Of what is copied and written, where the device has that much; large, so that launches do not count."""


class Report:
    """Lines of markdown, printed as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str = "") -> None:
        self.lines.append(line)
        print(line, flush=True)

    def row(self, *cells: object) -> None:
        self.say("| " + " | ".join(map(str, cells)) + " |")

    def head(self, *cells: str) -> None:
        self.say()
        self.row(*cells)
        self.row(*("---" for _ in cells))


def main() -> int:
    """Checks, measures, prints; 1 if a kernel is not equal to torch's."""
    if not INTERPRET and not torch.cuda.is_available():
        print("  gpu: no GPU at hand; nothing was measured (--interpret shows that it runs)")
        return 0
    started = time.monotonic()
    device = torch.device("cpu" if INTERPRET else "cuda")
    report = Report()
    name = "Triton's interpreter: the times mean nothing" if INTERPRET else torch.cuda.get_device_name()
    report.say(f"{name}, torch {torch.__version__}")
    if not check(device, report):
        return 1
    with torch.inference_mode():
        watch = Stopwatch(device)
        size = 1 << 13 if INTERPRET else min(MOST_BYTES, torch.cuda.mem_get_info()[0] // 4)
        copy = measure_copy(device, watch, report, size)
        report.head("kernel", "what", "ms", "GB/s", "share of a copy")
        pages(device, watch, report, copy, size)
        prepass(device, watch, report, copy)
        tpot(device, report)
        points = attention(device, watch, report, copy, started)
    folder = next((Path(b) for a, b in zip(sys.argv, sys.argv[1:], strict=False) if a == "--out"), None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.md").write_text("\n".join(report.lines) + "\n", encoding="utf-8")
        _plots.FOLDER = folder
    if not INTERPRET or folder is not None:
        draw(points)
    print(f"  {time.monotonic() - started:.0f} s")
    return 0


def check(device: torch.device, report: Report) -> bool:
    """Every kernel against torch."""
    report.head("against torch", "equal", "")
    good = True
    for what, equal, detail in checks(device, small=INTERPRET):
        report.row(what, "yes" if equal else "**NO**", detail)
        good = good and equal
    return good


def measure_copy(device: torch.device, watch: Stopwatch, report: Report, size: int) -> float:
    """Bytes a second that a copy reads; it writes as many."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = size / watch.median(lambda: target.copy_(source), ROUNDS)
    report.say()
    report.say(f"A copy reads {rate / 1e9:.0f} GB/s and writes as many.")
    return rate


def pages(device: torch.device, watch: Stopwatch, report: Report, copy: float, size: int) -> None:
    """Write + tag, scrub, digest."""
    from engine.kernels import digest_triton, pages_triton

    count = size // PAGE_BYTES
    pool = torch.randint(0, 256, (count, PAGE_BYTES), dtype=torch.uint8, device=device)
    tags = torch.randint(1, 2**62, (count, 3), device=device)
    some = torch.randperm(count, device=device)[: count // 2]
    data = torch.zeros((len(some), PAGE_BYTES), dtype=torch.uint8, device=device)
    new_tags = torch.ones((len(some), 3), dtype=torch.int64, device=device)
    moved, written = data.numel(), f"{len(some)} pages of {PAGE_BYTES} bytes"
    # Below the front doors, which take a list of pages: the kernels alone, as one graph.
    spent = watch.median(watch.captured(lambda: pages_triton.write(pool, tags, some, data, new_tags)), ROUNDS)
    _row(report, "write + tag", f"{written}, read and written", spent, 2 * moved, 2 * copy)
    spent = watch.median(watch.captured(lambda: pages_triton.scrub(pool, tags, some)), ROUNDS)
    _row(report, "scrub", f"{written}, written", spent, moved, 2 * copy)
    key, every = HashTensors.of(os.urandom(12 * 512 + 32), device), range(count)
    spent = watch.median(lambda: digest_triton.page_hashes([pool], every, key), ROUNDS)
    what = f"{count} pages of {PAGE_BYTES} bytes, read; bar {DIGEST_BAR:.0%}"
    _row(report, "digest", what, spent, pool.numel(), copy)


def prepass(device: torch.device, watch: Stopwatch, report: Report, copy: float) -> None:
    """The check of block tables alone, of the largest batch and context."""
    for page_tokens in PAGES:
        width = -(-CONTEXTS[-1] // page_tokens)
        tags = torch.randint(1, 2**62, (BATCHES[-1] * width, 3), device=device)
        tables = torch.randperm(len(tags), device=device).view(BATCHES[-1], width).int()
        expected = tags[tables.long()]
        used = torch.full((BATCHES[-1],), width, device=device)

        def work(t: Tensor = tags, b: Tensor = tables, e: Tensor = expected, u: Tensor = used) -> object:
            return check_pages(t, b, e, used=u, backend="triton")

        spent = watch.median(watch.captured(work), ROUNDS)
        what = f"{BATCHES[-1]} × {_short(CONTEXTS[-1])} tokens, pages of {page_tokens}"
        _row(report, "pre-pass", what, spent, 52 * len(tags), 2 * copy)  # an entry, and two tags


def _row(report: Report, name: str, what: str, spent: float, moved: float, of: float) -> None:
    report.row(name, what, f"{spent * 1e3:.3f}", f"{moved / spent / 1e9:.0f}", f"{moved / spent / of:.0%}")


def attention(
    device: torch.device, watch: Stopwatch, report: Report, copy: float, started: float
) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Guarded against unguarded. Returns (context, guarded / unguarded) by page size and batch."""
    report.head("decode attention", "page", "unguarded ms", "guarded / unguarded", "traffic of a copy's")
    token_bytes = 2 * KV_HEADS * HEAD_DIM * 2
    room = 128
    if not INTERPRET:
        torch.cuda.empty_cache()
        room = int(0.6 * torch.cuda.mem_get_info()[0]) // token_bytes // 64 * 64
    k, v = (torch.empty((room, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device) for _ in range(2))
    for half in (k, v):
        half.normal_()
    points: dict[tuple[int, int], list[tuple[float, float]]] = {}
    ratios: list[float] = []
    left_out = []
    # From the small to the large: what the time does not suffice for is the largest.
    for batch, context, page_tokens in sorted(
        ((b, c, p) for b in BATCHES for c in CONTEXTS for p in PAGES), key=lambda shape: shape[0] * shape[1]
    ):
        shape = f"batch {batch} × {_short(context)}"
        if batch * context > room:
            left_out.append(f"{shape} (memory)")
            continue
        if time.monotonic() - started > BUDGET_S:
            left_out.append(f"{shape}, page {page_tokens} (time)")
            continue
        count = room // page_tokens
        problem = Problem.make(
            *(half[: count * page_tokens].view(count, page_tokens, KV_HEADS, HEAD_DIM) for half in (k, v)),
            [context] * batch,
            HEADS,
        )
        works = [watch.captured(lambda p=problem, g=guard: p.attend(guard=g)) for guard in (False, True)]
        bare, guarded = watch.alternating(works, ROUNDS)
        assert problem.batch.check().clean
        ratio = statistics.median(b / a for a, b in zip(bare, guarded, strict=True))
        ratios.append(ratio)
        points.setdefault((page_tokens, batch), []).append((context, ratio))
        spent = statistics.median(bare)
        share = batch * context * token_bytes / spent / (2 * copy)
        report.row(shape, page_tokens, f"{spent * 1e3:.3f}", f"{ratio:.4f}", f"{share:.0%}")
    report.say()
    report.say(
        f"Guarded / unguarded: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f} of {len(ratios)} "
        f"shapes; {sum(r <= BAR for r in ratios)} within {BAR}."
    )
    for what in dict.fromkeys(left_out):
        report.say(f"Left out: {what}.")
    return points


def tpot(device: torch.device, report: Report) -> None:
    """The engine's time for a token, its runner on the device, with the check of tags and without."""
    from bench._gpu_engine import Stand

    report.head("engine, step of decode", "context", "ms unguarded", "guarded / unguarded")
    for batch, context in STEPS:
        try:
            bare, guarded = Stand(device, small=INTERPRET).steps(batch, context, ROUNDS)
        except torch.cuda.OutOfMemoryError:
            report.row(f"batch {batch}", _short(context), "left out (memory)", "")
            continue
        ratio = statistics.median(b / a for a, b in zip(bare, guarded, strict=True))
        report.row(f"batch {batch}", _short(context), f"{statistics.median(bare) * 1e3:.2f}", f"{ratio:.4f}")


def draw(points: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """The ratios over the context."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("  no plot: matplotlib is not installed")
        return
    lines = [
        _plots.Line(f"page {page}, batch {batch}", line, color=BATCHES.index(batch), dashed=page != PAGES[0])
        for (page, batch), line in sorted(points.items())
    ]
    _plots.plot(
        "gpu-attention.png",
        "Guarded against unguarded attention (decode, bfloat16)",
        ("tokens of context", "guarded / unguarded"),
        lines,
        [_plots.Bar(f"bar {BAR}", BAR)],
    )


def _short(number: int) -> str:
    return f"{number >> 10} k" if number >= 1024 else str(number)


if __name__ == "__main__":
    sys.exit(main())
