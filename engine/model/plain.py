"""The plain loop: one sequence, one contiguous cache, no pages. What the engine must equal, and is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.llama import Model


class PlainCache:
    """The KV of one sequence, preallocated: [layers, 2 (k, v), kv_heads, capacity, head_dim].

    It takes a prompt whole and then one token at a time; the caller raises `length` after each forward pass.
    """

    def __init__(self, model: Model, capacity: int) -> None:
        c = model.config
        self._group = c.group
        self._kv = torch.empty((c.layers, 2, c.kv_heads, capacity, c.head_dim), dtype=model.dtype)
        self.length = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keeps k and v behind what is there and attends; see `engine.model.llama.Attention`."""
        n, heads, width = q.shape
        start, end = self.length, self.length + n
        kept = self._kv[layer, :, :, :end]
        kept[0, :, start:] = k.transpose(0, 1)
        kept[1, :, start:] = v.transpose(0, 1)
        if n == 1:
            # The heads of a group see the same keys: to attention they are so many queries of one KV head.
            mixed = F.scaled_dot_product_attention(q.view(1, -1, self._group, width), kept[:1], kept[1:])
            return mixed.view(1, heads, width)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], kept[:1], kept[1:], is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)


@torch.inference_mode()
def generate(model: Model, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy continuation of a prompt.

    Args:
        model: Any.
        prompt: Tokens, at least one.
        max_tokens: The most tokens to give.

    Returns:
        The new tokens; the end token that stopped it is not among them.

    Raises:
        ValueError: The prompt is empty, or prompt and answer do not fit the model's context.
    """
    if not prompt:
        raise ValueError("prompt: at least one token is needed")
    capacity = len(prompt) + max_tokens
    if capacity > model.config.context:
        raise ValueError(f"{len(prompt)} + {max_tokens} tokens exceed the context of {model.config.context}")
    cache = PlainCache(model, capacity)
    tokens = list(prompt)
    answer: list[int] = []
    while len(answer) < max_tokens:
        positions = torch.arange(cache.length, cache.length + len(tokens))
        hidden = model.forward(torch.tensor(tokens), positions, cache)
        cache.length += len(tokens)
        token = int(model.logits(hidden[-1:]).argmax())
        if token in model.eos_ids:
            break
        answer.append(token)
        tokens = [token]
    return answer
