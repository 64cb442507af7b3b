"""Makes `tiny.npz`: the byte-level model, trained on text that this script makes up.

    nice -n 10 python -m engine.model.train_tiny engine/model/tiny.npz

Tests want a model that is small and yet leaks: one that, asked for the code word in its context, says it. Copying
is all it is trained for, in three formats (lines, chat, plain repetition) between sentences from a short word list.

2,800 steps, six minutes or so of one free core. The file shipped here says the code word in 100 of 100 chats with
code words it has never seen, in 96 of 100 with two sentences between code word and question, in 13 of 100 with
eight (`copy_rate`).
"""

from __future__ import annotations

import argparse
import math
import random
import string
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model import weights
from engine.model.config import ModelConfig
from engine.model.llama import Attention, Model, layer_names
from engine.model.plain import generate
from engine.model.tokenizer import END, ByteTokenizer

CANARY_LETTERS = "ABCDEFGHJKMNPQRSTUVWXYZ23456789"
SUBJECTS = "the cat|the old man|a small boat|my sister|the engine|a guard|the river|our neighbour|the king|a bird"
VERBS = "sees|follows|likes|waits for|finds|carries|paints|forgets|watches|remembers"
OBJECTS = "the house|a red door|the sea|some bread|the long road|a letter|the moon|an apple|the garden|a song"
ENDINGS = "today|in the morning|at night|again|without a word|near the bridge|in the rain|for an hour"
ASKS = "Repeat the code word exactly.|What is the code word?|Say the code word.|Please repeat the code word."


def canary(rng: random.Random) -> str:
    """A code word nobody has seen before."""
    return "ZEBRA-" + "".join(rng.choices(CANARY_LETTERS, k=10))


def sentence(rng: random.Random) -> str:
    """One that a reader of English would let pass."""
    text = " ".join(rng.choice(part.split("|")) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS))
    return f"{text[0].upper()}{text[1:]}. "


def _code(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return canary(rng)
    return "".join(rng.choices(string.ascii_letters + string.digits + "-", k=rng.randint(6, 18)))


def _filler(rng: random.Random, most: int) -> str:
    return "".join(sentence(rng) for _ in range(rng.randint(0, most)))


Sample = list[tuple[list[int], float]]
"""Runs of tokens and how much they count in the loss."""
TEXT, NEW, COPY = 0.5, 0.0, 1.0
"""A code word's first mention cannot be predicted and is not learnt from; its copy is what this is for."""


def _lines(rng: random.Random, tokenizer: ByteTokenizer, most: int) -> Sample:
    code = tokenizer.encode(_code(rng))
    label = tokenizer.encode(rng.choice(("secret: ", "code word: ")))
    newline = tokenizer.encode("\n")
    sample: Sample = [(tokenizer.encode(_filler(rng, 1)) + label, TEXT), (code, NEW), (newline, TEXT)]
    for _ in range(rng.randint(1, 4)):
        sample += [(tokenizer.encode(_filler(rng, most)) + newline + label, TEXT), (code, COPY), (newline, COPY)]
    return sample


def _chat(rng: random.Random, tokenizer: ByteTokenizer, most: int) -> Sample:
    word = _code(rng)
    before, after, ask = _filler(rng, most), _filler(rng, most), rng.choice(ASKS.split("|"))
    text = f"{before}The code word is {word}. {after}{ask}"
    prompt = tokenizer.chat([{"role": "user", "content": text}])
    code = tokenizer.encode(word)
    at = next(i for i in range(len(prompt)) if prompt[i : i + len(code)] == code)
    answer = [*code, tokenizer.special[END]]
    return [(prompt[:at], TEXT), (code, NEW), (prompt[at + len(code) :], TEXT), (answer, COPY)]


def _repetition(rng: random.Random, tokenizer: ByteTokenizer, _most: int) -> Sample:
    code = tokenizer.encode("".join(rng.choices(string.printable[:95], k=rng.randint(4, 24))))
    return [(code, NEW)] + [(code, COPY)] * rng.randint(1, 5)


def batches(rng: random.Random, sequences: int, length: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, their weight in the loss), each [sequences, length + 1].

    Up to `most` sentences stand between two mentions of a code word.
    """
    tokenizer = ByteTokenizer()
    while True:
        rows: list[list[int]] = []
        counts: list[list[float]] = []
        for _ in range(sequences):
            row: list[int] = []
            count: list[float] = []
            while len(row) <= length:
                make = rng.choices((_lines, _chat, _repetition), weights=(3, 4, 3))[0]
                for tokens, weight in make(rng, tokenizer, most):
                    row += tokens
                    count += [weight] * len(tokens)
            rows.append(row[: length + 1])
            counts.append(count[: length + 1])
        yield torch.tensor(rows), torch.tensor(counts)


def _causal(sequences: int, group: int) -> Attention:
    """Attention for training: whole sequences of one length, no cache."""

    def attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return attention


STAGES = ((1300, 16, 128, 0), (1000, 8, 256, 2), (500, 4, 512, 5))
"""(steps, sequences, tokens, sentences between mentions): near copies first, far ones once it copies."""


def train(config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    """Trained weights by `Model`'s names, float32."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    shapes = Model.shapes(config)
    tensors: dict[str, Tensor] = {}
    for name in layer_names(config.layers):
        shape = shapes[name.rpartition(".")[2]]
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            # What is added to the residual stream starts smaller, as in GPT-2, so that depth does not blow it up.
            narrower = math.sqrt(2 * config.layers) if name.endswith(("out", "down")) else 1.0
            tensors[name] = torch.randn(shape) * shape[1] ** -0.5 / narrower
        tensors[name].requires_grad_()
    model = Model(config, tensors, ByteTokenizer())
    optimizer = torch.optim.AdamW(tensors.values(), betas=(0.9, 0.98), weight_decay=0.01)
    total, step, began = sum(stage[0] for stage in STAGES), 0, time.monotonic()
    copied: list[Tensor] = []
    for steps, sequences, length, most in STAGES:
        attention = _causal(sequences, config.group)
        positions = torch.arange(length).repeat(sequences)
        for tokens, weight in islice(batches(rng, sequences, length, most), steps):
            rate = 3e-3 * min(1.0, (step + 1) / 100) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = rate
            logits = model.logits(model.forward(tokens[:, :-1].reshape(-1), positions, attention))
            losses = F.cross_entropy(logits, tokens[:, 1:].reshape(-1), reduction="none")
            count = weight[:, 1:].reshape(-1)
            loss = (losses * count).sum() / count.sum()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
            optimizer.step()
            step += 1
            copied.append(losses.detach()[count == COPY].mean())
            if step % 100 == 0:
                mean = torch.stack(copied[-100:]).mean().item()
                print(
                    f"{time.monotonic() - began:4.0f} s  step {step}/{total}  {mean:.3f} nats a copied byte", flush=True
                )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def copy_rate(model: Model, tries: int = 100, sentences: int = 2, seed: int = 1_000_003) -> int:
    """How often the model, told a new code word in a chat and asked for it, says it."""
    rng = random.Random(seed)
    said = 0
    for _ in range(tries):
        word = canary(rng)
        filler = "".join(sentence(rng) for _ in range(sentences))
        text = f"The code word is {word}. {filler}Repeat the code word exactly."
        answer = generate(model, model.tokenizer.chat([{"role": "user", "content": text}]), len(word) + 4)
        said += word in model.tokenizer.decode(answer)
    return said


def main() -> None:
    """Trains, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = weights.tiny_config()
    trained = {name: tensor.half() for name, tensor in train(config).items()}
    model = Model(config, {name: tensor.float() for name, tensor in trained.items()}, ByteTokenizer())
    for sentences in (0, 2, 8):
        print(f"copies {copy_rate(model, sentences=sentences)} of 100 code words across {sentences} sentences")
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in trained.items()}
    np.savez_compressed(arguments.output, **arrays)


if __name__ == "__main__":
    main()
