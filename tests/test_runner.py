"""The runner over a real pool and the tiny model: in torch, as on a CPU, and with the kernels that a GPU gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

import engine.model
from engine import runner
from engine.kernels.step import step_attention
from engine.messages import Sampling
from engine.model.llama import Model
from engine.model.plain import generate
from engine.pool import PagePool
from engine.runner import Runner
from engine.scheduler import Chunk
from engine.segment import Segment
from engine.sequence import Sequence

PAGE_TOKENS = 4
PROMPTS = ("Say", "KV guard")


@cache
def tiny() -> Model:
    return engine.model.load("tiny", threads=1)


class Stand:
    """A pool whose free pages are full of NaN, and sequences on it."""

    def __init__(self, *, check_tags: bool = True) -> None:
        model = tiny()
        shape = model.config.page_shape(PAGE_TOKENS)
        path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}")
        segment = Segment.create(path, 24, torch.Size(shape).numel() * 4)
        segment.unlink()
        self.pool = PagePool(segment, shape, torch.float32, b"key")
        self.pool.kv[:] = float("nan")
        self.at_layer: Callable[[int], None] = lambda layer: None
        self._layer = 0
        self.runner = Runner(model, self.pool, check_tags=check_tags, between_layers=self._between)

    def _between(self) -> None:
        self.at_layer(self._layer)
        self._layer = (self._layer + 1) % tiny().config.layers

    def sequence(self, name: str, text: str, room: int = 8) -> Sequence:
        prompt = tiny().tokenizer.encode(text)
        sequence = Sequence(request=name, tenant="t", prompt=prompt, sampling=Sampling(max_tokens=room))
        pages = self.pool.alloc(name, self.pool.pages_for(len(prompt) + room))
        assert pages is not None
        sequence.extend(pages, self.pool.tags_of("t", name, [self.pool.generation(page) for page in pages]))
        return sequence

    def step(self, *sequences: Sequence, count: int = 10_000) -> dict[str, list[int]]:
        """The pages refused, before or behind; tokens are appended."""
        with torch.inference_mode():
            step = self.runner.begin([Chunk(s, min(s.pending, count)) for s in sequences])
            chosen, late = step.compute()
        assert not step.refused.keys() & late.keys()
        refused = {**step.refused, **late}
        for sequence, token in chosen.items():
            assert sequence not in refused
            sequence.output.append(token)
        return {sequence.request: pages for sequence, pages in refused.items()}


@pytest.fixture(params=["torch", "triton"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(runner, "step_attention", partial(step_attention, backend=request.param))
    return str(request.param)


def test_the_answer_is_the_plain_loops() -> None:
    """Prompts in chunks, together with single tokens, and pages begun on the way."""
    stand = Stand()
    first, second = (stand.sequence(name, text) for name, text in zip("ab", PROMPTS, strict=True))
    while first.pending > 1 or not first.output:
        assert not stand.step(first, count=3)
    while len(second.output) < 4:
        assert not stand.step(first, second, count=5)
    for sequence in (first, second):
        model = tiny()
        assert sequence.output == generate(model, sequence.prompt, len(sequence.output))


def test_refused_pages_are_named_in_the_order_of_the_table() -> None:
    stand = Stand()
    first, second = (stand.sequence(name, text) for name, text in zip("ab", PROMPTS, strict=True))
    assert stand.step(first, second) == {}
    stand.pool.tags[second.pages[1], 2] += 1
    stand.pool.tags[second.pages[0]] = 0
    stand.pool.kv[second.pages[:2]] = float("inf")
    before = stand.pool.kv.clone()
    assert stand.step(first, second) == {"b": second.pages[:2]}
    assert (len(first.output), len(second.output)) == (2, 1)
    assert torch.equal(stand.pool.kv[second.pages].nan_to_num(), before[second.pages].nan_to_num()), "nothing written"
    assert stand.step(second) == {"b": second.pages[:2]}, "and if nobody else is there"


def test_what_is_refused_is_known_before_anything_is_computed() -> None:
    stand = Stand()
    first, second = (stand.sequence(name, text) for name, text in zip("ab", PROMPTS, strict=True))
    assert stand.step(first, second) == {}
    stand.pool.tags[second.pages[0]] = 0
    before = stand.pool.kv.clone(), stand.pool.tags.clone()
    step = stand.runner.begin([Chunk(first, 1), Chunk(second, 1)])
    assert step.refused == {second: second.pages[:1]}
    assert [chunk.sequence for chunk in step.chunks] == [first]
    assert torch.equal(stand.pool.kv.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(stand.pool.tags, before[1])
    with torch.inference_mode():
        chosen, late = step.compute()
    assert (chosen.keys(), late) == ({first}, {})


def test_a_page_that_changes_between_the_layers_is_named_and_gives_no_token() -> None:
    stand = Stand()
    first, second = (stand.sequence(name, text) for name, text in zip("ab", PROMPTS, strict=True))
    assert stand.step(first, second) == {}
    computed = second.computed

    def steal(layer: int) -> None:
        if layer == 1:
            stand.pool.tags[second.pages[1], 2] += 1

    stand.at_layer = steal
    assert stand.step(first, second) == {"b": [second.pages[1]]}
    assert (len(second.output), second.computed) == (1, computed)


def test_a_fresh_page_is_not_tagged_again_by_the_layers_behind_the_first() -> None:
    stand = Stand()
    sequence = stand.sequence("a", PROMPTS[1])

    def steal(layer: int) -> None:
        if layer == 1:
            stand.pool.tags[sequence.pages[0], 1] += 1

    stand.at_layer = steal
    assert stand.step(sequence) == {"a": [sequence.pages[0]]}
    assert not sequence.output


def test_a_fresh_page_gets_its_tag_behind_its_first_bytes() -> None:
    stand = Stand()
    sequence = stand.sequence("a", PROMPTS[1])
    fresh = sequence.pages[: stand.pool.pages_for(len(sequence.prompt))]
    seen: list[bool] = []
    stand.at_layer = lambda layer: seen.append(bool(stand.pool.tags[fresh].any()))
    assert stand.step(sequence) == {}
    assert seen == [False] + [True] * (tiny().config.layers - 1)
    assert torch.equal(stand.pool.tags[fresh], sequence.tags[: len(fresh)])
    assert not stand.pool.tags[sequence.pages[len(fresh) :]].any(), "what is not written is nobody's"


def test_with_the_check_off_no_tag_is_looked_at() -> None:
    stand = Stand(check_tags=False)
    sequence = stand.sequence("a", PROMPTS[0])
    assert stand.step(sequence) == {}
    stand.pool.tags[:] = 0
    assert stand.step(sequence) == {}
    assert len(sequence.output) == 2


def test_a_table_that_names_a_page_outside_the_pool_is_an_error_before_anything_is_written() -> None:
    stand = Stand(check_tags=False)
    sequence = stand.sequence("a", PROMPTS[0])
    sequence.pages[0] = 24
    with pytest.raises(ValueError, match=r"outside 0\.\.23"):
        stand.step(sequence)
    assert stand.pool.kv.isnan().all()
