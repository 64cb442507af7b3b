"""Where it is decided whether a kernel runs in Triton or in torch: here and nowhere else."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
"""``auto``: Triton where the tensor lies on a GPU, torch where it lies on a CPU. The others are for tests and
measurements: ``triton`` on a CPU needs Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported)."""


def in_triton(tensor: Tensor, backend: Backend) -> bool:
    """Whether the Triton kernel is the one to run.

    Args:
        tensor: One that the kernel works on.
        backend: What the caller asked for.

    Raises:
        ValueError: There is no such backend.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend {backend!r}: use auto, torch or triton")
    return bool(tensor.is_cuda) if backend == "auto" else backend == "triton"
