"""The HTTP API with workers that the test plays: answers, refusals, and what is recorded of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_fleet import FakeFleet, answer, error_of, fake_fleet

from engine.messages import Abort, Generate, Prefill, Stats, Tokens
from guard.records import Outcome, Pool, Respond, Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeFleet]:
    with fake_fleet(max_waiting=2) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: FakeFleet) -> Iterator[FakeFleet]:
    shared.exporter.clear()
    yield shared
    assert shared.router.in_flight == 0
    for worker in ("prefill-0", "decode-0"):
        assert shared.silent(worker)


def events(text: str) -> list[tuple[str, Any]]:
    """(event, data) of a stream."""
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return found


# Answers


def test_completion(fleet: FakeFleet) -> None:
    future = fleet.later({"prompt": "abc", "max_tokens": 7, "temperature": 0, "seed": 5, "top_p": 0.5})
    generate, prefill = answer(fleet)
    response = future.result()
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert re.fullmatch(r"cmpl-[0-9a-f]{24}", body["id"])
    assert response.headers["x-request-id"] == body["id"] == generate.request
    assert generate.prompt == prefill.prompt == list(b"abc")
    assert generate.tenant == prefill.tenant == "alice-corp"
    assert (generate.epoch, generate.prefill, generate.prefill_epoch) == (200, "prefill-0", 100)
    assert (prefill.epoch, prefill.decode, prefill.decode_epoch) == (100, "decode-0", 200)
    sampling = generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0, 0.5, 5)


def test_chat_takes_the_template_and_defaults(fleet: FakeFleet) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    future = fleet.later({"messages": messages, "unheard_of": 1}, CHAT)
    generate, _ = answer(fleet, "ok", "length")
    body = future.result().json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
    assert body["choices"][0]["finish_reason"] == "length"
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert generate.prompt == fleet.tokenizer.chat(plain)
    assert generate.sampling.temperature == 1
    assert generate.sampling.max_tokens == 256 - len(generate.prompt)


def test_stream(fleet: FakeFleet) -> None:
    body = {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}
    future = fleet.later(body)
    generate, _ = answer(fleet, "hey")
    response = future.result()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == generate.request
    *chunks, usage, done = [data for _, data in events(response.text)]
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hey"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["usage"] is None and chunk["id"] == generate.request for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_chat_stream_begins_with_the_role(fleet: FakeFleet) -> None:
    future = fleet.later({"messages": [{"role": "user", "content": "x"}], "stream": True}, CHAT)
    answer(fleet, "hey")
    first, *rest, _done = [data for _, data in events(future.result().text)]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == "hey"
    assert "usage" not in first


def test_ending_token_is_not_shown(fleet: FakeFleet) -> None:
    future = fleet.later({"prompt": "x"})
    generate = fleet.hear("decode-0", Generate)
    fleet.hear("prefill-0", Prefill)
    fleet.say(Tokens(request=generate.request, tokens=[*b"ab", fleet.model.eos_ids[0]], finish="stop"))
    body = future.result().json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_ends_decoding(fleet: FakeFleet, stream: bool) -> None:
    future = fleet.later({"prompt": "x", "stop": ["lo w", "zz"], "stream": stream})
    generate = fleet.hear("decode-0", Generate)
    fleet.hear("prefill-0", Prefill)
    fleet.say_text(generate.request, "hel")
    fleet.say_text(generate.request, "lo worl")
    abort = fleet.hear("decode-0", Abort)
    assert (abort.request, abort.epoch, abort.outcome) == (generate.request, 200, Outcome.FINISHED)
    response = future.result()
    if stream:
        *chunks, done = [data for _, data in events(response.text)]
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hel"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        body = response.json()
        assert body["choices"][0]["text"] == "hel"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("hello w")
    fleet.say_text(generate.request, "d", "length")  # What was under way comes to nothing.
    assert fleet.records(generate.request)[-1].outcome is Outcome.FINISHED  # type: ignore[attr-defined]


def test_openai_client(fleet: FakeFleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="key-of-alice", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    messages: Any = [{"role": "user", "content": "hi"}]

    def ask() -> Any:
        return client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=9, temperature=0)

    future = fleet._pool.submit(ask)
    answer(fleet, "yes")
    assert future.result().choices[0].message.content == "yes"

    def stream() -> str:
        chunks = client.chat.completions.create(model="tiny", messages=messages, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    streamed = fleet._pool.submit(stream)
    answer(fleet, "streamed")
    assert streamed.result() == "streamed"
    completion = fleet._pool.submit(lambda: client.completions.create(model="tiny", prompt="p", stop="!"))
    answer(fleet, "plain")
    assert completion.result().choices[0].text == "plain"

    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.AuthenticationError) as who:
        openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="nobody").models.list()
    assert who.value.code == "invalid_api_key"


def test_no_capacity(fleet: FakeFleet) -> None:
    futures = [fleet.later({"prompt": "x"}) for _ in range(2)]
    requests = [fleet.hear("decode-0", Generate).request for _ in futures]
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="key-of-alice", max_retries=0)
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="tiny", prompt="x")
    assert full.value.response.headers["retry-after"] == "1"
    for request in requests:
        fleet.say_text(request, "x", "stop")
        fleet.hear("prefill-0", Prefill)
    assert [future.result().status_code for future in futures] == [200, 200]
    refused = next(record for record in fleet.records() if isinstance(record, Respond))
    assert refused.status == 429


# Telling


def test_health_names_the_missing() -> None:
    with fake_fleet(workers=False) as fleet:
        response = fleet.http.get("/health")
        assert response.status_code == 503
        assert response.json()["missing"] == ["prefill-0", "decode-0"]
        error = error_of(fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x"}), 503, "worker_unavailable")
        assert "decode-0" in error["message"]
        fleet.hello()
        fleet.wait_for_health()
        first = fleet.records()[0]
        assert isinstance(first, Pool)
        assert (first.role, first.pages, first.context_limit, first.seq) == (Role.ROUTER, 0, 256, 0)


def test_server_info(fleet: FakeFleet) -> None:
    info = fleet.http.get("/get_server_info").json()
    assert (info["context"], info["model"], info["page_tokens"], info["faults"]) == (256, "tiny", 16, [])
    assert info["gate"] == {"mode": "off", "wait_ms": 250.0, "on_timeout": "open"}
    sizes = {
        worker["name"]: (worker["role"], worker["pages"], worker["tokens"], worker["live"])
        for worker in info["workers"]
    }
    assert sizes == {"prefill-0": ("prefill", 16, 256, True), "decode-0": ("decode", 16, 256, True)}
    assert "key" not in json.dumps(info)


def test_metrics(fleet: FakeFleet) -> None:
    fleet.say(
        Stats(
            worker="decode-0",
            epoch=200,
            reply_id=0,
            gauges={"pages_free": 11, "Bad name\n": 1},
            counters={"tokens": 7, "tokens_of_a_stranger": 1},
        )
    )
    future = fleet.later({"prompt": "x"})
    answer(fleet)
    assert future.result().status_code == 200
    text = fleet.http.get("/metrics").text
    assert 'kvguard_engine_pages_free{worker="decode-0"} 11.0' in text
    assert 'kvguard_engine_worker_tokens_total{worker="decode-0"} 7.0' in text
    assert 'kvguard_engine_worker_up{worker="prefill-0"} 1.0' in text
    assert 'kvguard_engine_requests_total{route="/v1/completions",status="200"}' in text
    assert "kvguard_engine_ttft_seconds_bucket" in text
    assert "Bad name" not in text
    assert "alice" not in text


def test_span_and_trace(fleet: FakeFleet) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    future = fleet.later(
        {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 9, "temperature": 0},
        CHAT,
        traceparent=f"00-{trace}-00f067aa0ba902b7-01",
    )
    generate, prefill = answer(fleet, "another")
    response = future.result()
    span = next(span for span in fleet.spans if span.name == "chat tiny")
    attributes = dict(span.attributes or {})
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trace
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["gen_ai.request.temperature"] == 0
    assert attributes["gen_ai.response.id"] == generate.request
    assert attributes["gen_ai.usage.input_tokens"] == len(generate.prompt)
    assert attributes["gen_ai.usage.output_tokens"] == 7
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["http.response.status_code"] == 200
    own = f"00-{trace}-{span.context.span_id:016x}-01"
    assert generate.traceparent == prefill.traceparent == response.headers["traceparent"] == own
    for other in fleet.spans:
        assert "secret" not in str(other.attributes)
        assert "another" not in str(other.attributes)
        assert other.context is not None
    admit = next(span for span in fleet.spans if span.name == "kv.admit")
    assert admit.parent is not None
    assert admit.parent.span_id == span.context.span_id
