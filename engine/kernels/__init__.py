"""What runs in the inner loop over the page pool: paged attention, and the checks of a page's owner tag.

Each is there twice and equal, in torch for any device and in Triton for GPUs; `engine.kernels.backend` decides which
one runs. What this engine does not need to use them is here by name, and works on any paged KV cache:

* `check_pages`, the ownership pre-pass: block tables against owner tags, in front of any attention (`ownership`).
* `guarded_attention` with `GuardedBatch`: paged attention that refuses foreign pages as it reads (`guarded`).
* `write_pages`, `write_tokens` with `TokenWrites`, `scrub_pages`: a page's tag is never newer than its bytes (`pages`).

`attention` is the engine's own torch path on a CPU, `step` puts a step of the engine together on either device. The
modules that end in ``_triton`` hold the kernels and are imported when one is run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.kernels.guarded import GuardedBatch, guarded_attention
    from engine.kernels.ownership import PageCheck, check_pages
    from engine.kernels.pages import TokenWrites, scrub_pages, write_pages, write_tokens

__all__ = [
    "GuardedBatch",
    "PageCheck",
    "TokenWrites",
    "check_pages",
    "guarded_attention",
    "scrub_pages",
    "write_pages",
    "write_tokens",
]

_HOME = {
    "GuardedBatch": "guarded",
    "PageCheck": "ownership",
    "TokenWrites": "pages",
    "check_pages": "ownership",
    "guarded_attention": "guarded",
    "scrub_pages": "pages",
    "write_pages": "pages",
    "write_tokens": "pages",
}


def __getattr__(name: str) -> Any:
    # Not at the top: who enters the package for one module must not pay for torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
