"""What `bench.gpu` runs on: attention problems on a device, their check against torch, and a stopwatch."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import (
    GuardedBatch,
    TokenWrites,
    check_pages,
    guarded_attention,
    scrub_pages,
    write_pages,
    write_tokens,
)
from engine.kernels.digest import HashTensors, page_hashes, tobytes
from guard.native._core import HashKey

Work = Callable[[], object]
_FLUSH_BYTES = 512 << 20
"""More than any device's cache: written before each round, so that no kernel finds its pages there."""


@dataclass
class Problem:
    """One layer's attention: pages in random order, each request's tags its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    tags: Tensor
    batch: GuardedBatch

    @classmethod
    def make(
        cls,
        k: Tensor,
        v: Tensor,
        lengths: list[int],
        heads: int,
        new_tokens: list[int] | None = None,
    ) -> Problem:
        """Over pages that are there already: k, v [pages, page_tokens, kv_heads, head_dim], enough of them."""
        new = [1] * len(lengths) if new_tokens is None else new_tokens
        device, page_tokens = k.device, k.shape[1]
        width = -(-max(lengths) // page_tokens)
        tables = torch.randperm(len(k), device=device)[: len(lengths) * width].view(len(lengths), width).int()
        tags = torch.randint(1, 2**62, (len(k), 3), device=device)
        starts = torch.tensor([0, *new]).cumsum(0)[:-1]
        batch = GuardedBatch(
            tables=tables,
            expected=tags[tables.long()],
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            starts=starts.to(device, torch.int32),
            new_tokens=torch.tensor(new, dtype=torch.int32, device=device),
            longest=max(lengths),
            most_new=max(new),
            marks=torch.zeros(tables.shape, dtype=torch.uint8, device=device),
        )
        q = torch.randn((sum(new), heads, k.shape[3]), device=device).to(k.dtype)
        return cls(q, k, v, tags, batch)

    def attend(self, *, guard: bool = True, backend: str = "triton", splits: int | None = None) -> Tensor:
        return guarded_attention(
            self.q, self.k, self.v, self.tags, self.batch, guard=guard, backend=backend, splits=splits  # type: ignore[arg-type]
        )  # fmt: skip


# Checks

_BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def checks(device: torch.device, *, small: bool) -> Iterator[tuple[str, bool, str]]:
    """Every kernel against torch on this device: what it is, whether it is equal, and by how much.

    Args:
        device: Where.
        small: As small as it can be, for the interpreter.
    """
    torch.manual_seed(0)
    shapes = [(8, 2, 24, 5, [37, 9]), (9, 3, 64, 16, [50, 3])]
    if not small:
        shapes = [(32, 8, 128, 16, [5000, 37, 1]), (32, 8, 128, 64, [3000, 640]), (9, 3, 64, 16, [1500, 2]),
                  (8, 8, 80, 5, [777, 64]), (16, 1, 256, 48, [999, 5])]  # fmt: skip
    for dtype in _BOUND:
        for heads, kv_heads, head_dim, page_tokens, lengths in shapes:
            for new in ([1] * len(lengths), [min(33, length) for length in lengths]):
                yield _check_attention(device, dtype, heads, kv_heads, head_dim, page_tokens, lengths, new)
    yield _check_ownership(device, 4 if small else 64, 5 if small else 900)
    yield from _check_writes(device, 3 if small else 40, 100 if small else 1 << 19)
    for page_bytes in (100, 4200) if small else (1 << 21, 4100, 99_999):
        yield _check_digest(device, 3 if small else 40, page_bytes)


def _check_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    lengths: list[int],
    new: list[int],
) -> tuple[str, bool, str]:
    pages = len(lengths) * -(-max(lengths) // page_tokens) + 1
    k, v = torch.randn((2, pages, page_tokens, kv_heads, head_dim), device=device).to(dtype)
    problem = Problem.make(k, v, lengths, heads, new)
    foreign = problem.batch.tables[0, [0, -1]].long()
    problem.tags[foreign, 2] += 1
    k[foreign], v[foreign] = float("nan"), float("inf")
    error, marks = 0.0, []
    expected = problem.attend(backend="torch").float()
    marks.append(problem.batch.marks.clone())
    for splits in (None, 1, 3):
        problem.batch.marks.zero_()
        out = problem.attend(splits=splits).float()
        error = max(error, float((out - expected).abs().nan_to_num(nan=float("inf")).max()))
        marks.append(problem.batch.marks.clone())
    equal = all(torch.equal(marks[0], other) for other in marks)
    kind = "decode" if max(new) == 1 else "prefill"
    name = f"{kind}, {str(dtype)[6:]}, {heads}/{kv_heads} heads of {head_dim}, pages of {page_tokens}"
    return name, equal and error <= _BOUND[dtype], f"off by {error:.1e}" + ("" if equal else ", OTHER PAGES MARKED")


def _check_ownership(device: torch.device, requests: int, width: int) -> tuple[str, bool, str]:
    tags = torch.randint(1, 2**62, (requests * width, 3), device=device)
    tables = torch.randperm(requests * width, device=device).view(requests, width)
    expected, used = tags[tables], torch.randint(0, width + 1, (requests,), device=device)
    for place in torch.randint(0, requests * width, (width,)).tolist():
        tags[place, place % 3] ^= 1 << place % 60
    tables[0, -1], tables[-1, 0] = -1, requests * width
    found = [check_pages(tags, tables, expected, used=used, backend=b) for b in ("torch", "triton")]  # type: ignore[arg-type]
    same = all(torch.equal(getattr(found[0], part), getattr(found[1], part)) for part in vars(found[0]))
    return "pre-pass", same, f"{int(found[0].counts.sum())} refused entries"


def _check_writes(device: torch.device, pages: int, page_bytes: int) -> Iterator[tuple[str, bool, str]]:
    data = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=device)
    tags = torch.randint(1, 2**62, (pages, 3), device=device)
    order = torch.randperm(2 * pages).tolist()
    made = []
    for backend in ("torch", "triton"):
        pool = torch.full((2 * pages, page_bytes), 9, dtype=torch.uint8, device=device)
        borne = torch.ones((2 * pages, 3), dtype=torch.int64, device=device)
        write_pages(pool, borne, order[:pages], data, tags, backend=backend)  # type: ignore[arg-type]
        scrub_pages(pool, borne, order[pages - 1 : pages + 1], backend=backend)  # type: ignore[arg-type]
        made.append((pool, borne))
    yield "write + tag, scrub", all(map(torch.equal, *made)), f"{pages} pages"
    made = []
    k, v = torch.randn((2, 21, 3, 40), device=device)
    expected = [torch.arange(1, 13).view(4, 3)] * 2
    writes = TokenWrites.build([[0, 1, 2, 3], [4, 5]], [18, 6], [15, 6], expected, 5, device)
    for backend in ("torch", "triton"):
        pool = torch.zeros((6, 2, 2, 5, 3, 40), device=device)
        borne = torch.zeros((6, 3), dtype=torch.int64, device=device)
        write_tokens(pool[:, 1, 0], pool[:, 1, 1], borne, k, v, writes, backend=backend)  # type: ignore[arg-type]
        made.append((pool, borne))
    yield "tokens + tag", all(map(torch.equal, *made)), "21 tokens"


def _check_digest(device: torch.device, pages: int, page_bytes: int) -> tuple[str, bool, str]:
    """With the native core too, which is what the engines on CPUs have."""
    from engine.kernels import digest_triton

    material = os.urandom(12 * 512 + 32)
    key = HashTensors.of(material, device)
    data = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=device)
    order = torch.randperm(pages).tolist()
    found = [hashes([data], order, key) for hashes in (page_hashes, digest_triton.page_hashes)]
    native = HashKey(material).pages([data.cpu().numpy().data], order, 1)
    same = torch.equal(*found) and tobytes(found[0]) == native
    return "digest", same, f"{pages} pages of {page_bytes} bytes, and the native core's"


# The stopwatch


class Stopwatch:
    """Takes the time of work on a device; on a CPU, in the interpreter, only that it runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES if self._on_gpu else 1, dtype=torch.uint8, device=device)

    def captured(self, work: Work) -> Work:
        """The work as one graph: what is timed is the device, not the launches from Python."""
        if not self._on_gpu:
            return work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and warms up
            work()
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def alternating(self, works: list[Work], rounds: int) -> list[list[float]]:
        """Seconds of each, round by round; who comes first alternates."""
        times: list[list[float]] = [[] for _ in works]
        for number in range(rounds):
            order = list(enumerate(works))
            for place, work in order if number % 2 else reversed(order):
                times[place].append(self._once(work))
        return times

    def median(self, work: Work, rounds: int) -> float:
        work()
        return statistics.median(self.alternating([work], rounds)[0])

    def _once(self, work: Work) -> float:
        if not self._on_gpu:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
