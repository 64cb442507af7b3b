"""The worker's real entry point with a model of random weights: what is tested is the engine, not the answers."""

from __future__ import annotations

import torch

import engine.model
from engine.model.llama import Model, layer_names
from engine.model.tokenizer import ByteTokenizer
from engine.model.weights import tiny_config


def random_model(*_: object) -> Model:
    """The tiny model's shape, the same weights in every process."""
    config = tiny_config()
    generator = torch.Generator().manual_seed(20)
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    shapes = {
        "embed": (config.vocab, config.hidden),
        "qkv": (qkv, config.hidden),
        "out": (config.hidden, config.heads * config.head_dim),
        "gate_up": (2 * config.feed_forward, config.hidden),
        "down": (config.hidden, config.feed_forward),
    }
    weights = {}
    for name in layer_names(config.layers):
        shape = shapes.get(name.rpartition(".")[2])
        if shape is None:
            weights[name] = torch.ones(config.hidden)
        else:
            weights[name] = torch.randn(shape, generator=generator) * (1.0 if name == "embed" else 0.15)
    # No greedy answer ends by itself, so that tests know how long one is.
    weights["embed"][list(config.eos_ids)] = 0
    torch.set_num_threads(1)
    return Model(config, weights, ByteTokenizer())


if __name__ == "__main__":
    engine.model.load = random_model  # type: ignore[assignment]
    from engine.worker import leave, main

    leave(main())
