"""The Llama forward pass over a flat batch of tokens.

Continuous batching makes no difference between prompt chunks and single new tokens: a step is `n` tokens of any
number of sequences, each with its position. Only attention mixes tokens, and attention is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.tokenizer import Tokenizer

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [n, heads, d], k [n, kv_heads, d], v [n, kv_heads, d]) → [n, heads, d]: keeps k, v and attends."""

Matmul = Callable[[Tensor], Tensor]


def layer_names(layers: int) -> Iterable[str]:
    """Every weight's name, in the order of use (`Model` says what each is)."""
    yield "embed"
    for layer in range(layers):
        for part in ("attn_norm", "qkv", "out", "ffn_norm", "gate_up", "down"):
            yield f"{layer}.{part}"
    yield "norm"


class _Layer(NamedTuple):
    attn_norm: Tensor
    qkv: Matmul
    out: Matmul
    ffn_norm: Tensor
    gate_up: Matmul
    down: Matmul


class Model:
    """A Llama model: RMSNorm, rotary positions on interleaved pairs, grouped-query attention, SwiGLU, tied embeddings.

    Weights by name (each matrix [out, in], as `torch.nn.functional.linear` wants it): ``embed`` [vocab, hidden];
    for each layer ``L.attn_norm``, ``L.qkv`` [(heads + 2 kv_heads) d, hidden], ``L.out``, ``L.ffn_norm``,
    ``L.gate_up`` [2 feed_forward, hidden], ``L.down``; ``norm``. q, k, v and gate, up are one matrix each because
    at one token a step the call, not the arithmetic, is what is left to save.

    Args:
        config: The shape.
        weights: By the names above, all of one dtype.
        tokenizer: Kept for the caller.

    Raises:
        ValueError: A weight is missing or has the wrong shape; names it.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(config.eos_ids)
        c = config
        shapes = self.shapes(config)
        for name in layer_names(c.layers):
            if name not in weights:
                raise ValueError(f"{c.name}: weight {name} is missing")
            if (found := tuple(weights[name].shape)) != (wanted := shapes[name.rpartition(".")[2]]):
                raise ValueError(f"{c.name}: weight {name} has shape {found}, expected {wanted}")
        self._embed = weights["embed"]
        self._unembed = _linear(self._embed)
        self._norm = weights["norm"]
        self._layers = [
            _Layer(
                weights[f"{layer}.attn_norm"],
                _linear(weights[f"{layer}.qkv"]),
                _linear(weights[f"{layer}.out"]),
                weights[f"{layer}.ffn_norm"],
                _linear(weights[f"{layer}.gate_up"]),
                _linear(weights[f"{layer}.down"]),
            )
            for layer in range(c.layers)
        ]
        # Rotary embedding (Su et al. 2021): pair i of a head turns by position · theta^(-2i/d). The pairs are
        # neighbours (2i, 2i+1), llama.cpp's layout of q and k, so a pair is one complex number.
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angle = torch.outer(torch.arange(c.context, dtype=torch.float64), frequency)
        self._turns = torch.polar(torch.ones_like(angle), angle).to(self._embed.device, torch.complex64)

    @staticmethod
    def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shape of each weight by the last part of its name."""
        c = config
        return {
            "embed": (c.vocab, c.hidden),
            "norm": (c.hidden,),
            "attn_norm": (c.hidden,),
            "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            "out": (c.hidden, c.heads * c.head_dim),
            "ffn_norm": (c.hidden,),
            "gate_up": (2 * c.feed_forward, c.hidden),
            "down": (c.hidden, c.feed_forward),
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations, k and v."""
        return self._embed.dtype

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states of `n` tokens. To be called in `torch.inference_mode`, unless it is to be trained.

        Args:
            tokens: [n] int64, of any number of sequences.
            positions: [n] int64, each token's place in its sequence, from 0.
            attention: Called once a layer, in order.

        Returns:
            [n, hidden], normed: what `logits` takes.

        Raises:
            ValueError: A position is not within the model's context, or a token not in its vocabulary.
        """
        c = self.config
        try:
            turns = self._turns.index_select(0, positions).unsqueeze(1)
            x = F.embedding(tokens, self._embed)
        except IndexError as error:
            raise ValueError(
                f"{c.name}: tokens must be in 0..{c.vocab - 1} and positions in 0..{c.context - 1}: {error}"
            ) from error
        n = tokens.shape[0]
        q_width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        shape = (c.hidden,)
        for layer, part in enumerate(self._layers):
            qkv = part.qkv(F.rms_norm(x, shape, part.attn_norm, c.norm_eps))
            qk, v = qkv[:, :-kv_width], qkv[:, -kv_width:]
            pairs = torch.view_as_complex(qk.float().view(n, c.heads + c.kv_heads, -1, 2))
            qk = torch.view_as_real(pairs * turns).flatten(2).to(x.dtype)
            mixed = attention(layer, qk[:, : c.heads], qk[:, c.heads :], v.view(n, c.kv_heads, c.head_dim))
            x = x + part.out(mixed.reshape(n, q_width))
            gate, up = part.gate_up(F.rms_norm(x, shape, part.ffn_norm, c.norm_eps)).chunk(2, dim=1)
            x = x + part.down(F.silu(gate) * up)
        return F.rms_norm(x, shape, self._norm, c.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [m, hidden] → [m, vocab] float32. Only for rows that are sampled: it is dear."""
        return self._unembed(hidden).float()


def _linear(weight: Tensor) -> Matmul:
    """x [n, in] → x · weightᵀ [n, out], the weight copied once into oneDNN's blocked layout where it has one.

    Against `torch.nn.functional.linear` in float32 on an AVX-512 core, over all of SmolLM2's matrices: 16 ms
    instead of 32 for one token, 23 instead of 57 for eight, 146 instead of 347 for 128. It costs a private copy of
    the weights a process. oneDNN has no float16 kernel for CPUs without AVX512-FP16.
    """
    usable = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and weight.device.type == "cpu"
        and not weight.requires_grad
        and (
            weight.dtype in (torch.float32, torch.bfloat16)
            or (weight.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported())
        )
    )
    if not usable:
        return partial(F.linear, weight=weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    # bias, activation, its scalars, its algorithm: none
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
