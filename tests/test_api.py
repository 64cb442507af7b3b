"""The HTTP API with workers that the test plays: answers, refusals, and what is recorded of them."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_fleet import ADMIN, BOB, FakeFleet, fake_fleet

from engine.api.body import MAX_BYTES
from engine.api.protocol import MAX_HEAD_BYTES
from engine.messages import Abort, Generate, Prefill, Stats, Tokens
from guard.records import Admit, Outcome, Pool, RequestEnd, Respond, Role

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


def answer(fleet: FakeFleet, text: str = "hello", finish: str = "stop") -> tuple[Generate, Prefill]:
    generate, prefill = fleet.hear("decode-0", Generate), fleet.hear("prefill-0", Prefill)
    for letter in text[:-1]:
        fleet.say_text(generate.request, letter)
    fleet.say_text(generate.request, text[-1:], finish)
    return generate, prefill


def events(text: str) -> list[tuple[str, Any]]:
    """(event, data) of a stream."""
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", "message"), data if data == "[DONE]" else json.loads(data)))
    return found


def error_of(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    assert {"message", "type", "param"} <= error.keys()
    return error


def refused(fleet: FakeFleet, path: str, body: Any, param: str | None, code: str = "invalid_type") -> dict[str, Any]:
    error = error_of(fleet.post(path, body), 400, code)
    assert error["param"] == param
    return error


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


# Refusals


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": 5}, "prompt", "invalid_type"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ["a", "b"]}, "prompt", "invalid_value"),
        ({"prompt": [1, "b"]}, "prompt", "invalid_value"),
        ({"prompt": [1, True]}, "prompt", "invalid_value"),
        ({"prompt": [259]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": "x", "model": 3}, "model", "invalid_type"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens", "invalid_type"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens", "invalid_type"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"prompt": "x", "temperature": 2.1}, "temperature", "invalid_value"),
        ({"prompt": "x", "top_p": 0}, "top_p", "invalid_value"),
        ({"prompt": "x", "seed": 1 << 63}, "seed", "invalid_value"),
        ({"prompt": "x", "n": 2}, "n", "invalid_value"),
        ({"prompt": "x", "echo": True}, "echo", "invalid_value"),
        ({"prompt": "x", "best_of": 3}, "best_of", "invalid_value"),
        ({"prompt": "x", "stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"prompt": "x", "stop": ""}, "stop", "invalid_value"),
        ({"prompt": "x", "stop": [1]}, "stop[0]", "invalid_type"),
        ({"prompt": "x", "stream": "yes"}, "stream", "invalid_type"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "invalid_value"),
        ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
        ({"prompt": "x", "rid": "short"}, "rid", "invalid_value"),
        ({"prompt": "x", "rid": "a\r\nb: c12345"}, "rid", "invalid_value"),
        ([], None, "invalid_type"),
    ],
)  # fmt: skip
def test_bad_field_is_named(fleet: FakeFleet, body: Any, param: str | None, code: str) -> None:
    if isinstance(body, dict):
        body = {"model": "tiny", **body}
    error = refused(fleet, COMPLETIONS, body, param, code)
    assert param is None or param.split("[")[0] in error["message"]


def test_bad_messages_are_named(fleet: FakeFleet) -> None:
    def ask(*messages: Any) -> Any:
        return {"model": "tiny", "messages": messages}

    refused(fleet, CHAT, ask(), "messages", "invalid_value")
    refused(fleet, CHAT, ask({"role": "root", "content": "x"}), "messages[0].role", "invalid_value")
    refused(fleet, CHAT, ask({"role": "user"}), "messages[0].content", "missing_required_parameter")
    image = {"type": "image_url", "image_url": {"url": "x"}}
    error = refused(fleet, CHAT, ask({"role": "user", "content": [image]}), "messages[0].content[0].type", "invalid_value")
    assert "image_url" not in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"x":' + b"[" * 100_000, b'{"a":\x00}', b"nul"])
def test_what_is_not_json(fleet: FakeFleet, body: bytes) -> None:
    error_of(fleet.post(COMPLETIONS, body), 400, "invalid_json")


def test_unknown_keys(fleet: FakeFleet) -> None:
    body = {"model": "tiny", "prompt": "x"}
    for header in ("Bearer nobody", "Bearer", "Basic key-of-alice", "", "Bearer \xe9\xe8", "Bearer key-of-alic"):
        response = fleet.post(COMPLETIONS, body, authorization=header.encode("latin-1"))  # type: ignore[arg-type]
        error_of(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    error_of(fleet.post(COMPLETIONS, body, ADMIN), 403, "tenant_key_required")
    for path in ("/v1/models", "/get_server_info"):
        assert fleet.http.get(path, headers={"authorization": "Bearer x"}).status_code == 401
        assert fleet.http.get(path, headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200


def test_overlong_names_both_numbers(fleet: FakeFleet) -> None:
    error = error_of(fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 256}), 400, "context_length_exceeded")
    assert "256 tokens" in error["message"]
    assert error["param"] == "prompt"
    body = {"model": "tiny", "prompt": "x" * 250, "max_tokens": 7}
    error = error_of(fleet.post(COMPLETIONS, body), 400, "context_length_exceeded")
    assert "257 together" in error["message"]
    assert "256 tokens" in error["message"]
    assert error["param"] == "max_tokens"
    future = fleet.later({**body, "max_tokens": 6})
    answer(fleet)
    assert future.result().status_code == 200


def test_refusal_is_recorded_before_its_end(fleet: FakeFleet) -> None:
    response = fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 999})
    admit, respond, end = fleet.records(response.headers["x-request-id"])
    assert isinstance(admit, Admit)
    assert (admit.tenant, admit.tokens) == ("alice-corp", 999)
    assert isinstance(respond, Respond)
    assert (respond.status, respond.final) == (400, True)
    assert isinstance(end, RequestEnd)
    assert end.outcome is Outcome.REJECTED


def test_request_ids_are_used_once(fleet: FakeFleet) -> None:
    rid = "my-request_0001"
    future = fleet.later({"prompt": "x", "rid": rid})
    generate = fleet.hear("decode-0", Generate)
    fleet.hear("prefill-0", Prefill)
    assert generate.request == rid
    for key in ("key-of-alice", BOB):
        error = error_of(fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x", "rid": rid}, key), 409, "duplicate_request_id")
        assert error["param"] == "rid"
    fleet.say_text(rid, "x", "stop")
    response = future.result()
    assert response.json()["id"] == response.headers["x-request-id"] == rid
    # The guard knows it by this id for good.
    error_of(fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x", "rid": rid}), 409, "duplicate_request_id")
    assert [type(record) for record in fleet.records(rid)] == [Admit, RequestEnd]


def test_large_bodies(fleet: FakeFleet) -> None:
    error_of(fleet.post(COMPLETIONS, b" " * (MAX_BYTES + 1)), 413, "body_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BYTES // 65_536 + 1):
            yield b" " * 65_536

    response = fleet.http.post(COMPLETIONS, content=chunks())
    error_of(response, 413, "body_too_large")


def test_large_head(fleet: FakeFleet) -> None:
    with socket.create_connection(("127.0.0.1", fleet.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 431 ")


def test_no_route(fleet: FakeFleet) -> None:
    error_of(fleet.http.get("/nowhere"), 404, "not_found")
    error_of(fleet.http.get(COMPLETIONS), 405, "method_not_allowed")


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
    sizes = {worker["name"]: (worker["role"], worker["pages"], worker["tokens"], worker["live"]) for worker in info["workers"]}
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
