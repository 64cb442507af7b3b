"""What an engine's own check of tags refuses, the guard learns: real processes, records over either carrier."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import ALICE, BOB
from guard_process import until
from guarded import Guarded, counter, guarded_engine
from test_carriers import came_through, findings_of_both
from test_guarded_engine import error_event

from engine.segment import Segment, segment_path
from guard.records import Alloc, Cache, Free, Outcome, PageSet, Read, Record, Refuse, RequestEnd, Scrub, Write

pytestmark = pytest.mark.engine

CONFUSED = (str(Path(__file__).with_name("confused_engine.py")),)
CARRIERS = ("otlp", "ring")
PROMPT = "The harbour is open. " * 4
LONG = 800
"""Tokens of an answer that goes on for as long as a test wants."""


def pool_of(pair: Guarded, worker: str) -> Segment:
    """A worker's pages, as a process that should not be there maps them."""
    path = segment_path(pair.engine.run_dir, worker, pair.epochs()[worker])
    pages = getattr(pair.engine.config, worker.partition("-")[0]).pages
    tag_bytes = 24
    return Segment.open(path, path.stat().st_size // pages - tag_bytes)


def pages_of(pair: Guarded, kind: type[Alloc | Cache], request: str, stream: str) -> list[int]:
    """The first pages that the request was handed, or gave to the cache, there."""

    def find() -> list[int] | None:
        found = [r for r in pair.sink.records(request, stream) if isinstance(r, kind)]
        return list(found[0].pages) if found else None

    pages = until(find)
    assert isinstance(pages, list)
    return pages


def refusal(pair: Guarded, request: str, stream: str) -> Refuse:
    """The record of it, in its place: before the end, and before the pages are free."""
    until(lambda: any(isinstance(r, Free) for r in pair.sink.records(request, stream)))
    records = sorted(pair.sink.records(request, stream), key=lambda r: r.seq)
    kinds: list[type[Record]] = [type(r) for r in records]
    [refused] = [r for r in records if isinstance(r, Refuse)]
    after = kinds[kinds.index(Refuse) + 1 :]
    # Zeroed too, if the guard has stopped the request by then.
    assert after in ([RequestEnd, Free], [RequestEnd, Free, Scrub])
    [end] = [r for r in records if isinstance(r, RequestEnd)]
    assert end.outcome is Outcome.FAILED
    return refused


def text_and_error(response: Any) -> tuple[str, dict[str, Any]]:
    """What a stream gave, and the error that ended it, or came instead of it."""
    body = response.read().decode()
    if response.status_code != 200:
        return "", json.loads(body)["error"]
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    texts = [json.loads(event)["choices"][0]["text"] for event in events if "choices" in json.loads(event)]
    return "".join(texts), error_event(body)


def until_counted(pair: Guarded, worker: str) -> None:
    until(lambda: pair.metrics().get(counter("page_refusals", worker)) == 1)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_page_that_another_process_wrote_over_is_refused_and_contradicts_the_records(
    carrier: str, tmp_path: Path
) -> None:
    with guarded_engine(collect=True, carrier=carrier) as pair:
        whole = pair.complete(PROMPT, BOB, max_tokens=LONG).json()["choices"][0]["text"]
        with pair.stream("b" * 40, ALICE, max_tokens=LONG) as alice, pair.stream(PROMPT, BOB, max_tokens=LONG) as bob:
            request = bob.headers["x-request-id"]
            theirs = pages_of(pair, Alloc, alice.headers["x-request-id"], "decode-0")[0]
            mine = pages_of(pair, Alloc, request, "decode-0")[1]
            pool = pool_of(pair, "decode-0")
            # Alice's page, tag and all, over one of Bob's.
            pool.put(mine, pool.data[theirs].clone(), pool.tags[theirs].clone())
            text, error = text_and_error(bob)
            assert alice.read().endswith(b"data: [DONE]\n\n"), "nothing of it concerns Alice"
        assert (error["code"], error["message"]) == ("kv_page_mismatch", "A KV page was not the request's.")
        assert whole.startswith(text), "not a byte that came of the page"
        refused = refusal(pair, request, "decode-0")
        assert (refused.pages, refused.tenant) == (PageSet.of([mine]), "bob-corp")
        until_counted(pair, "decode-0")

        incident = pair.incident(request, "hook-divergence")
        assert (incident.request, incident.tenant, incident.pool) == (request, "bob-corp", "decode-0")
        assert (incident.kind, incident.severity, incident.action) == ("hook-divergence", "high", "alerted")
        assert not incident.disclosed
        [offending] = [record for record in incident.records if record["offending"]]
        assert offending["name"] == "kv.refuse"
        live, replayed, metrics = findings_of_both(pair, tmp_path / "recorded.jsonl")
    assert live == replayed
    [finding] = live.values()
    assert (finding["kind"], finding["request"], finding["pool"], finding["pages"], finding["confidence"]) == (
        "hook-divergence", request, "decode-0", str(mine), "full",
    )  # fmt: skip
    came_through(carrier, metrics)
    rows = 'kvguard_records_total{record="kv.refuse"}'
    assert metrics[rows] == 1


@dataclass(frozen=True)
class Confusion:
    """Another tenant's page gets into a block table: when, and what the guard may do about it."""

    carrier: str
    prompt: int
    """Tokens of the prompt; 16 are a page."""
    after: int
    """Tokens of the answer that are right."""
    mode: str = "monitor"


@pytest.mark.parametrize(
    "confusion",
    [
        pytest.param(Confusion("otlp", 40, after=3), id="a step that the engine makes no record of"),
        pytest.param(Confusion("ring", 46, after=3), id="a step that reads a new page"),
        pytest.param(Confusion("otlp", 40, after=1), id="the step that prefill's token waits for"),
        pytest.param(Confusion("ring", 46, after=3, mode="enforce"), id="the guard stops it too"),
    ],
)
def test_another_tenants_page_in_the_block_table_gives_no_byte_and_is_a_foreign_read(
    confusion: Confusion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFUSED_AFTER", str(confusion.after))
    with guarded_engine(collect=True, carrier=confusion.carrier, command=CONFUSED, mode=confusion.mode) as pair:
        prompt = "b" * confusion.prompt
        whole = pair.complete(prompt, BOB, max_tokens=20).json()["choices"][0]["text"]
        with pair.stream(PROMPT, ALICE, max_tokens=LONG) as alice:
            theirs = alice.headers["x-request-id"]
            page = pages_of(pair, Alloc, theirs, "decode-0")[0]
            bob = pair.complete(prompt, BOB, max_tokens=20, stream=True)
            assert alice.read().endswith(b"data: [DONE]\n\n")
        request = bob.headers["x-request-id"]
        text, error = text_and_error(bob)
        # The engine's own word and the guard's are as good: whichever comes first.
        killed = ["kv_guard_killed"] if confusion.mode == "enforce" else []
        assert error["code"] in ["kv_page_mismatch", *killed]
        assert whole.startswith(text)
        # Prefill's token leaves with decode's first step.
        right = confusion.after if confusion.after > 1 else 0
        assert len(text) <= right < len(whole), "not a byte that came of the page"
        refused = refusal(pair, request, "decode-0")
        assert refused.pages == PageSet.of([page])
        told = pair.sink.records(request, "decode-0")
        assert not any(page in r.pages for r in told if isinstance(r, (Read, Write))), "what was refused is not read"
        until_counted(pair, "decode-0")
        incident = pair.incident(request, "foreign-read")
        action = "killed" if confusion.mode == "enforce" else "observed: would kill"
        assert (incident.tenant, incident.pool, incident.action) == ("bob-corp", "decode-0", action)
        assert not incident.disclosed, "it was not read"
        live, replayed, metrics = findings_of_both(pair, tmp_path / "recorded.jsonl")
    assert live == replayed
    assert live.keys() == {(kind, request, "decode-0") for kind in ("foreign-read", "stale-read")}
    for finding in live.values():
        assert (finding["seq"], finding["pages"], finding["confidence"]) == (refused.seq, str(page), "full")
    foreign = live["foreign-read", request, "decode-0"]
    assert (foreign["other_tenants"], foreign["other_requests"]) == (["alice-corp"], [theirs])
    came_through(confusion.carrier, metrics)


def test_a_cached_page_whose_tag_is_gone_is_refused_by_prefill(tmp_path: Path) -> None:
    with guarded_engine(collect=True) as pair:
        first = pair.complete(PROMPT, ALICE, max_tokens=4)
        assert first.status_code == 200
        cached = pages_of(pair, Cache, first.headers["x-request-id"], "prefill-0")
        pool_of(pair, "prefill-0").tags[cached[1]] = torch.zeros(3, dtype=torch.int64)
        again = pair.complete(PROMPT + "And closed.", ALICE, max_tokens=4)
        assert (again.status_code, again.json()["error"]["code"]) == (500, "kv_page_mismatch")
        request = again.headers["x-request-id"]
        assert refusal(pair, request, "prefill-0").pages == PageSet.of([cached[1]])
        told = {type(record) for record in pair.sink.records(request, "prefill-0")}
        assert not told & {Read, Write}, "what was refused is not read, and nothing is written behind it"
        until_counted(pair, "prefill-0")
        assert pair.incident(request, "hook-divergence").pool == "prefill-0"
        assert pair.complete(PROMPT, BOB, max_tokens=4).status_code == 200
        live, replayed, _ = findings_of_both(pair, tmp_path / "recorded.jsonl")
    assert live == replayed
    [finding] = live.values()
    assert (finding["kind"], finding["pages"], finding["pool"]) == ("hook-divergence", str(cached[1]), "prefill-0")
