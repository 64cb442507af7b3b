"""What the HTTP API refuses, and how it says so."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fake_fleet import ADMIN, ALICE, BOB, FakeFleet, answer, error_of, fake_fleet
from hypothesis import given
from hypothesis import strategies as st

from engine.api.body import MAX_BYTES
from engine.api.errors import ApiError
from engine.api.protocol import MAX_HEAD_BYTES
from engine.api.schema import AbortAsk, ChatAsk, CompletionAsk, parse
from engine.messages import Generate, Prefill
from guard.records import Admit, Outcome, RequestEnd, Respond

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeFleet]:
    with fake_fleet() as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: FakeFleet) -> Iterator[FakeFleet]:
    shared.exporter.clear()
    yield shared
    assert shared.router.in_flight == 0
    for worker in ("prefill-0", "decode-0"):
        assert shared.silent(worker)


def refused(fleet: FakeFleet, path: str, body: Any, param: str | None, code: str = "invalid_type") -> dict[str, Any]:
    error = error_of(fleet.post(path, body), 400, code)
    assert error["param"] == param
    return error


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
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
        ({"prompt": "x", "rid": "short"}, "rid", "invalid_value"),
        ({"prompt": "x", "rid": "ends-in-a-newline\n"}, "rid", "invalid_value"),
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
    error = refused(
        fleet, CHAT, ask({"role": "user", "content": [image]}), "messages[0].content[0].type", "invalid_value"
    )
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
    for key in (ALICE, BOB):
        error = error_of(
            fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x", "rid": rid}, key), 409, "duplicate_request_id"
        )
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


def test_slow_heads_and_bodies(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.protocol.HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr("engine.api.body.TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", fleet.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        assert raw.recv(100) == b""
    with socket.create_connection(("127.0.0.1", fleet.port)) as raw:
        raw.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\n".encode())
        raw.sendall(b"content-length: 9\r\n\r\n{")
        answer = b""
        while part := raw.recv(1000):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
NAMES = (
    "model prompt messages max_tokens max_completion_tokens temperature top_p seed n stop stream stream_options rid "
    "echo best_of incident"
)
fields = st.sampled_from(NAMES.split())


@given(st.dictionaries(fields, anything) | anything, st.sampled_from([ChatAsk, CompletionAsk, AbortAsk]))
def test_any_body_is_taken_or_refused(body: Any, kind: Any) -> None:
    with contextlib.suppress(ApiError):
        ask = parse(json.dumps(body).encode(), kind)
        if isinstance(ask, CompletionAsk):
            assert isinstance(ask.single(), str | list)


def test_no_route(fleet: FakeFleet) -> None:
    error_of(fleet.http.get("/nowhere"), 404, "not_found")
    error_of(fleet.http.get(COMPLETIONS), 405, "method_not_allowed")
