from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench" / "gpu.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BENCH, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "no GPU at hand" in done.stdout


@pytest.mark.slow
def test_all_of_it_runs_in_the_interpreter(tmp_path: Path) -> None:
    done = run("--interpret", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert table.startswith("Triton's interpreter: the times mean nothing")
    assert "| yes |" in table
    assert "NO" not in table
    for part in ("prefill, bfloat16", "pre-pass", "write + tag", "scrub", "digest", "engine, step", "batch 2 × 24"):
        assert part in table
    assert "of 4 shapes" in table
    assert (tmp_path / "gpu-attention.png").stat().st_size > 10_000
