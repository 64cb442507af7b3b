from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_for_a_gpu_where_there_is_none(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "kernels_compiled.py", str(capability)],
        env={**environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(kernel["shared"] <= SHARED[capability] for kernel in made)
    attention = [kernel for kernel in made if kernel["kernel"] == "_attend"]
    guarded, bare = attention[0], attention[1]
    assert guarded["volatile"] > bare["volatile"] == 0, "the second look is there, and not without the guard"
    assert guarded["async"] == bare["async"] > 0, "the guard does not keep keys and values from being read ahead"
    for kernel in made:
        if kernel["kernel"] in ("_write_pages", "_write_tokens"):
            assert kernel["release"] == 3, "a tag's three words"
