"""The whole engine over HTTP: the real router, workers and model, and the records that they send."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_fixtures import ALICE, BOB, RunningEngine, running_engine
from record_sink import RecordSink

import engine.model
from engine.config import GuardConfig, PoolConfig
from engine.model.plain import generate
from guard.findings import Kind
from guard.records import Admit, Outcome, Pool, RequestEnd, Respond

pytestmark = pytest.mark.engine

PATIENCE_S = 30.0
POOL = 64
OWN = re.compile(r'^kvguard_engine_pages_(?:owned|deferred)\{worker="[^"]+"\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def sink() -> Iterator[RecordSink]:
    with RecordSink() as sink:
        yield sink


@pytest.fixture(scope="module")
def small(sink: RecordSink) -> Iterator[RunningEngine]:
    """An engine that advertises more context than its prefill pool holds."""
    with running_engine(
        prefill=PoolConfig(pages=32),
        decode=PoolConfig(pages=POOL),
        context=1000,
        guard=GuardConfig(endpoint=sink.endpoint),
    ) as started:
        yield started


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def all_pages_are_free(running: RunningEngine) -> bool:
    with running.http() as client:
        owned = OWN.findall(client.get("/metrics").text)
    return len(owned) >= 4 and set(owned) == {"0.0"}


def outcomes(sink: RecordSink, request: str) -> dict[str, Outcome]:
    return {record.stream: record.outcome for record in sink.records(request) if isinstance(record, RequestEnd)}


def test_greedy_equals_the_plain_loop(small: RunningEngine) -> None:
    model = engine.model.load("tiny", threads=1)
    prompt = "The quick brown fox "
    plain = generate(model, model.tokenizer.encode(prompt), 40)
    ending = plain[-1] in model.config.eos_ids
    body = small.complete(prompt, max_tokens=40).json()
    assert body["choices"][0]["text"] == model.tokenizer.decode(plain[: len(plain) - ending])
    assert body["usage"]["completion_tokens"] == len(plain)
    client = small.openai()
    chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == body["choices"][0]["text"]


def test_chat_with_the_openai_client(small: RunningEngine) -> None:
    client = small.openai(BOB)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Say something."}], max_completion_tokens=12, seed=1
    )
    again = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Say something."}], max_completion_tokens=12, seed=1
    )
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.choices[0].message.content == again.choices[0].message.content


def test_many_at_once_equal_one_by_one(small: RunningEngine) -> None:
    prompts = [f"{number} bottles of beer on the wall, " * 3 for number in range(10)]
    with ThreadPoolExecutor(10) as pool:
        together = list(
            pool.map(lambda pair: small.complete(pair[1], (ALICE, BOB)[pair[0] % 2], max_tokens=20), enumerate(prompts))
        )
    assert [response.status_code for response in together] == [200] * 10
    for prompt, response in zip(prompts, together, strict=True):
        assert small.complete(prompt, max_tokens=20).json()["choices"] == response.json()["choices"]


def test_what_prefill_rejects_is_rejected(small: RunningEngine, sink: RecordSink) -> None:
    response = small.complete([7] * 600, max_tokens=4)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]
    assert "512" in error["message"]
    request = response.headers["x-request-id"]
    ends = eventually(lambda: len(found := outcomes(sink, request)) == 3 and found)
    assert ends == {"router-0": Outcome.ABORTED, "prefill-0": Outcome.REJECTED, "decode-0": Outcome.ABORTED}
    assert [record.status for record in sink.records(request) if isinstance(record, Respond)] == [400]
    eventually(lambda: all_pages_are_free(small))


def test_a_client_that_leaves_frees_both_sides(small: RunningEngine, sink: RecordSink) -> None:
    body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 800, "temperature": 0, "stream": True}
    with small.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        request = response.headers["x-request-id"]
    eventually(lambda: outcomes(sink, request).keys() >= {"router-0", "prefill-0", "decode-0"})
    eventually(lambda: all_pages_are_free(small))


def test_a_client_that_leaves_at_once(small: RunningEngine, sink: RecordSink) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    body = b'{"model": "tiny", "prompt": "hurry", "max_tokens": 400, "rid": "in-a-hurry"}'
    head = f"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(head.encode() + body)
    eventually(lambda: outcomes(sink, "in-a-hurry").get("router-0") is Outcome.ABORTED)
    eventually(lambda: all_pages_are_free(small))


def test_stop_string_ends_decoding(small: RunningEngine, sink: RecordSink) -> None:
    whole = small.complete("The quick brown fox ", max_tokens=60).json()["choices"][0]["text"]
    stop = whole[10:13]
    response = small.complete("The quick brown fox ", max_tokens=60, stop=stop)
    assert response.json()["choices"][0]["text"] == whole[: whole.index(stop)]
    request = response.headers["x-request-id"]
    ends = eventually(lambda: len(found := outcomes(sink, request)) == 3 and found)
    assert set(ends.values()) == {Outcome.FINISHED}


def test_abort_by_id(small: RunningEngine) -> None:
    with small.http() as client, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(small.complete, "abort me", max_tokens=900, rid="abort-me-please")
        eventually(lambda: client.post("/abort_request", json={"rid": "abort-me-please"}).json()["aborted"])
        assert asking.result().status_code == 499
    eventually(lambda: all_pages_are_free(small))


def test_a_worker_that_is_killed_takes_only_its_requests(small: RunningEngine, sink: RecordSink) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 900, "temperature": 0, "stream": True}
    with small.http() as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(small.pids()["decode-0"], signal.SIGKILL)
            rest = list(lines)
        assert any("worker_failed" in line for line in rest)
        assert not any("[DONE]" in line for line in rest)
        eventually(lambda: client.get("/health").status_code == 200)
    assert small.complete("x", max_tokens=4).status_code == 200
    eventually(lambda: all_pages_are_free(small))
    assert len([record for record in sink.records(stream="decode-0") if isinstance(record, Pool)]) == 2


def test_the_records_of_all_this_are_a_correct_engines(small: RunningEngine, sink: RecordSink) -> None:
    """Last: what the ledger makes of everything above."""
    eventually(lambda: all_pages_are_free(small))
    response = small.complete("the last one", max_tokens=2)
    request = response.headers["x-request-id"]
    eventually(lambda: len(outcomes(sink, request)) == 3)
    by_stream = {
        name: [type(record) for record in sink.records(request, name)] for name in ("router-0", "prefill-0", "decode-0")
    }
    assert by_stream["router-0"] == [Admit, RequestEnd]
    responds = [record for record in sink.records(request) if isinstance(record, Respond)]
    assert {record.stream for record in responds} == {"decode-0"}
    assert responds[-1].final
    kinds = {finding.kind for finding in sink.findings()}
    # The context that is advertised is larger than the pool, and the ledger says so; nothing else is wrong.
    assert kinds <= {Kind.OVER_CAPACITY}


def test_a_correct_engine_gives_no_finding() -> None:
    prompts = ["a" * 40, "b" * 700, "c" * 900, "d" * 5000]
    with RecordSink() as sink:
        with running_engine(
            prefill=PoolConfig(pages=48, workers=2),
            decode=PoolConfig(pages=56),
            max_waiting=8,
            guard=GuardConfig(endpoint=sink.endpoint),
        ) as running:
            with ThreadPoolExecutor(12) as pool:
                asked = list(
                    pool.map(lambda n: running.complete(prompts[n % 4], (ALICE, BOB)[n % 2], max_tokens=30), range(24))
                )
            counts = Counter(response.status_code for response in asked)
            assert counts[400] >= 6
            assert counts[200] >= 8
            assert counts.keys() <= {200, 400, 429}
            eventually(lambda: all_pages_are_free(running))
        assert {type(record) for record in sink.records(stream="router-0")} == {Pool, Admit, RequestEnd, Respond}
        assert sink.findings() == []
