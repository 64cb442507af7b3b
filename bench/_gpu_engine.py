"""The engine's runner on a device: a Llama model with random weights, a pool in the device's memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine.messages import Sampling
from engine.model.config import ModelConfig
from engine.model.llama import Model, layer_names
from engine.model.tokenizer import ByteTokenizer
from engine.pool import PagePool
from engine.runner import Runner
from engine.scheduler import Chunk
from engine.segment import TAG_WORDS, Segment
from engine.sequence import Sequence

PAGE_TOKENS = 16


class Stand:
    """A model of Llama 3 8B's shape, or a tiny one, in bfloat16; time does not depend on what the weights are."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "feed_forward": 14336}
        vocab = 128_256
        if small:
            sizes = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "feed_forward": 32}
            vocab = 300
        config = ModelConfig(
            name="random", vocab=vocab, context=8192, rope_theta=500_000.0, norm_eps=1e-5, eos_ids=(), **sizes
        )
        shapes = Model.shapes(config)
        weights = {
            name: torch.randn(shapes[name.rpartition(".")[2]], dtype=torch.bfloat16, device=device) * 0.02
            for name in layer_names(config.layers)
        }
        self._model = Model(config, weights, ByteTokenizer())
        self._device = device

    def steps(self, batch: int, context: int, rounds: int) -> tuple[list[float], list[float]]:
        """Seconds of steps that give each of `batch` sequences one token, unguarded and guarded in turn."""
        pages = batch * -(-(context + 2 * rounds + 8) // PAGE_TOKENS)
        shape = self._model.config.page_shape(PAGE_TOKENS)
        page_bytes = torch.Size(shape).numel() * 2
        memory = torch.zeros(pages * (page_bytes + 8 * TAG_WORDS), dtype=torch.uint8, device=self._device)
        pool = PagePool(Segment(Path("none"), memory, pages, page_bytes), shape, torch.bfloat16)
        sequences = []
        for number in range(batch):
            name = f"r{number}"
            sequence = Sequence(
                request=name, tenant="t", prompt=[1] * context, sampling=Sampling(max_tokens=3 * rounds + 8)
            )
            held = pool.alloc(name, pages // batch)
            assert held is not None
            sequence.extend(held, pool.tags_of("t", name, [pool.generation(page) for page in held]))
            # As if prefill had handed it over.
            pool.tags[held[: pool.pages_for(context)]] = sequence.tags[: pool.pages_for(context)].to(self._device)
            sequence.computed, sequence.output = context, [1]
            sequences.append(sequence)
        runners = [Runner(self._model, pool, check_tags=check) for check in (False, True)]
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * (rounds + 2)):
            started = time.perf_counter()
            step = runners[number % 2].begin([Chunk(sequence, 1) for sequence in sequences])
            chosen, late = step.compute()
            spent = time.perf_counter() - started
            assert not step.refused
            assert not late
            for sequence, token in chosen.items():
                sequence.output.append(token)
            if number >= 4:  # the first compile
                times[number % 2].append(spent)
        return times
