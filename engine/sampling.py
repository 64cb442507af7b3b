"""How the next token is chosen."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row, [m, vocab] → m tokens."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


def sample(logits: Tensor, temperature: float, top_p: float, seed: int, place: int) -> int:
    """Draws a token from the smallest set of likeliest tokens whose probability reaches `top_p`.

    The draw depends on seed and place alone, not on what else is in the batch or was drawn before, so a request
    gives the same answer wherever its tokens are computed: nucleus sampling (Holtzman et al. 2020) by inversion.

    Args:
        logits: [vocab] float32.
        temperature: Above 0.
        top_p: In (0, 1].
        seed: The request's.
        place: Which output token this is, from 0.
    """
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True, stable=True)
    reached = probabilities.double().cumsum(dim=0)
    # A token stays if those before it do not reach top_p yet; the first always stays.
    kept = int((reached - probabilities < top_p).sum().clamp(min=1))
    point = _uniform(seed, place) * float(reached[kept - 1])
    index = int(torch.searchsorted(reached[:kept], point, right=True).clamp(max=kept - 1))
    return int(order[index])


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) from a counter."""
    data = blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(data, "little") >> 11) / (1 << 53)
