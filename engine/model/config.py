"""The shape of a Llama-architecture model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the forward pass has to know beside the weights."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    context: int
    """The longest sequence the model was made for, in tokens."""
    rope_theta: float
    norm_eps: float
    eos_ids: tuple[int, ...]
    """Tokens that end an answer."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.heads} heads do not divide into {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"{self.name}: head_dim {self.head_dim} is odd, rotary pairs need it even")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def page_shape(self, page_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of one page of the KV pool: [layers, 2 (k, v), page_tokens, kv_heads, head_dim]."""
        return self.layers, 2, page_tokens, self.kv_heads, self.head_dim
