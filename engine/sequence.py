"""A request's tokens and the pages that hold their keys and values."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import torch
from opentelemetry.context import Context
from opentelemetry.trace import Span
from torch import Tensor

from engine.messages import Sampling
from engine.segment import TAG_WORDS


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request on one worker."""

    request: str
    tenant: str
    prompt: list[int]
    sampling: Sampling
    context: Context | None = None
    """The request's trace, that records hang under."""
    span: Span | None = None
    """This worker's part of it."""
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    """The block table: page *i* holds tokens *i* · page_tokens and on."""
    tags: Tensor = field(default_factory=lambda: torch.empty((0, TAG_WORDS), dtype=torch.int64))
    """[pages, 3]: the owner tag that each of them must bear."""
    computed: int = 0
    """Tokens whose keys and values are in the pages."""
    seed: int = 0

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed

    @property
    def length(self) -> int:
        """Tokens there are, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens that have to be computed before the next one can be chosen."""
        return self.length - self.computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` of prompt and output."""
        n = len(self.prompt)
        if start >= n:
            return self.output[start - n : stop - n]
        return self.prompt[start:stop] + self.output[: max(stop - n, 0)]

    def extend(self, pages: list[int], tags: Tensor) -> None:
        """Adds pages to the block table."""
        self.pages += pages
        self.tags = torch.cat((self.tags, tags))

    def take_pages(self) -> list[int]:
        """Empties the block table: nothing of the sequence is computed any more."""
        pages, self.pages = self.pages, []
        self.tags = self.tags[:0]
        self.computed = 0
        return pages
