"""How requests end early: killed, aborted, left by their client, or with their worker."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fake_fleet import (
    ADMIN,
    ALICE,
    BOB,
    PATIENCE_S,
    FakeFleet,
    Stream,
    both_hear_abort,
    dispatched,
    eventually,
    fake_fleet,
    guarded,
    outcomes,
)

from engine.messages import Abort, Generate, Hello, Prefill, Tokens
from guard.act.board import Verdict
from guard.native._core import BoardWriter
from guard.records import Outcome

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeFleet]:
    with fake_fleet() as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: FakeFleet) -> Iterator[FakeFleet]:
    shared.exporter.clear()
    yield shared
    eventually(lambda: shared.router.in_flight == 0)
    for worker in ("prefill-0", "decode-0"):
        assert shared.silent(worker)


# Killed


def test_killed_before_the_first_byte(fleet: FakeFleet) -> None:
    for stream in (False, True):
        future = fleet.later({"prompt": "x", "stream": stream})
        request = dispatched(fleet)
        fleet.say_failed(request, 503, "kv_guard_killed", incident="inc-0001")
        response = future.result()
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["code"], error["incident"]) == ("kv_guard_killed", "inc-0001")
        assert "inc-0001" in error["message"]
        assert response.headers["x-kvguard-incident"] == "inc-0001"
        assert response.headers["x-should-retry"] == "false"
        both_hear_abort(fleet, request, "inc-0001")
        assert outcomes(fleet, request) == ["admit", Outcome.ABORTED]
    assert 'kills_total{when="before_first_byte"} 2.0' in fleet.http.get("/metrics").text


def test_status_waits_for_the_first_token(fleet: FakeFleet) -> None:
    stream = Stream(fleet)
    request = dispatched(fleet)
    fleet.http.get("/health")
    assert not stream.has_status
    fleet.say_text(request, "a")
    assert stream.response.status_code == 200
    assert stream.text(1) == "a"
    fleet.say_text(request, "", "stop")
    assert stream.rest().endswith("data: [DONE]\n")


def test_killed_in_mid_stream(fleet: FakeFleet) -> None:
    stream = Stream(fleet)
    request = dispatched(fleet)
    fleet.say_text(request, "a")
    assert stream.text(1) == "a"
    response = fleet.post("/abort_request", {"rid": request, "incident": "inc-2"}, ADMIN)
    assert response.json() == {"aborted": True}
    fleet.say_text(request, "secret", "stop")
    rest = stream.rest()
    assert "secret" not in rest
    assert "[DONE]" not in rest
    event, data = [line for line in rest.split("\n") if line]
    assert event == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (error["code"], error["incident"]) == ("kv_guard_killed", "inc-2")
    assert stream.response.headers["connection"] == "close"
    both_hear_abort(fleet, request, "inc-2")
    assert outcomes(fleet, request) == ["admit", Outcome.ABORTED]


def test_openai_client_sees_the_kill(fleet: FakeFleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=ALICE)

    def stream() -> None:
        for _ in client.completions.create(model="tiny", prompt="x", stream=True):
            pass

    whole = fleet._pool.submit(client.completions.create, model="tiny", prompt="x")
    request = dispatched(fleet)
    fleet.say_failed(request, 503, "kv_guard_killed", incident="inc-3")
    with pytest.raises(openai.InternalServerError) as killed:
        whole.result()
    assert killed.value.code == "kv_guard_killed"
    both_hear_abort(fleet, request, "inc-3")

    streamed = fleet._pool.submit(stream)
    request = dispatched(fleet)
    fleet.say_text(request, "a")
    fleet.say_failed(request, 503, "kv_guard_killed", incident="inc-4")
    with pytest.raises(openai.APIError) as cut:
        streamed.result()
    assert cut.value.code == "kv_guard_killed"
    both_hear_abort(fleet, request, "inc-4")


def test_the_board_is_looked_at_before_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "board" / "verdicts"
    writer = BoardWriter.create(path, requests=64, streams=8)
    with fake_fleet(guard=guarded(path)) as fleet:
        future = fleet.later({"prompt": "x", "rid": "killed-01"})
        request = dispatched(fleet)
        writer.set_verdict(request, Verdict.KILL, "inc-5")
        fleet.say_text(request, "secret", "stop")
        response = future.result()
        assert response.status_code == 503
        assert response.json()["error"]["incident"] == "inc-5"
        assert "secret" not in response.text
        both_hear_abort(fleet, request, "inc-5")
        assert outcomes(fleet, request) == ["admit", Outcome.ABORTED]

        stream = Stream(fleet, rid="killed-02")
        request = dispatched(fleet)
        fleet.say_text(request, "a")
        assert stream.text(1) == "a"
        writer.set_verdict(request, Verdict.KILL)
        fleet.say_text(request, "secret")
        rest = stream.rest()
        assert "secret" not in rest
        assert "kv_guard_killed" in rest
        both_hear_abort(fleet, request, "")

        future = fleet.later({"prompt": "x", "rid": "quarantine"})
        request = dispatched(fleet)
        writer.set_verdict(request, Verdict.QUARANTINE, "inc-6")
        fleet.say_text(request, "fine", "stop")
        assert future.result().status_code == 200
    writer.close()


def test_a_board_that_is_not_there_stops_nobody(tmp_path: Path) -> None:
    with fake_fleet(guard=guarded(tmp_path / "none")) as fleet:
        future = fleet.later({"prompt": "x"})
        fleet.say_text(dispatched(fleet), "fine", "stop")
        assert future.result().status_code == 200


def test_an_incident_with_odd_characters_reaches_no_header(fleet: FakeFleet) -> None:
    future = fleet.later({"prompt": "x"})
    request = dispatched(fleet)
    fleet.say_failed(request, 503, "kv_guard_killed", incident="a\r\nb: c")
    response = future.result()
    assert response.status_code == 503
    assert "x-kvguard-incident" not in response.headers
    both_hear_abort(fleet, request, "a\r\nb: c")


# Aborted


def test_abort_by_its_tenant(fleet: FakeFleet) -> None:
    future = fleet.later({"prompt": "x"})
    request = dispatched(fleet)
    assert fleet.post("/abort_request", {"rid": request}).json() == {"aborted": True}
    response = future.result()
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "request_aborted"
    both_hear_abort(fleet, request)
    assert fleet.post("/abort_request", {"rid": request}).json() == {"aborted": False}
    assert outcomes(fleet, request) == ["admit", 499, Outcome.ABORTED]


def test_abort_is_for_the_exact_id_and_the_right_key(fleet: FakeFleet) -> None:
    future = fleet.later({"prompt": "x"})
    request = dispatched(fleet)
    for rid in (request[:-1], request + "0", request.upper(), "cmpl"):
        assert fleet.post("/abort_request", {"rid": rid}, ADMIN).json() == {"aborted": False}
    for body, key, status in (
        ({"rid": request}, BOB, 403),
        ({"rid": request}, "nobody", 401),
        ({"rid": request, "incident": "inc-1"}, ALICE, 403),
        ({"rid": request, "incident": "a\nb"}, ADMIN, 400),
        ({"rid": ""}, ADMIN, 400),
        ({"rid": 5}, ADMIN, 400),
        ({}, ADMIN, 400),
    ):
        assert fleet.post("/abort_request", body, key).status_code == status
    fleet.say_text(request, "x", "stop")
    assert future.result().status_code == 200


# Left


def test_client_leaves_a_stream(fleet: FakeFleet) -> None:
    stream = Stream(fleet)
    request = dispatched(fleet)
    fleet.say_text(request, "a")
    assert stream.text(1) == "a"
    stream.leave()
    both_hear_abort(fleet, request)
    assert outcomes(fleet, request) == ["admit", Outcome.ABORTED]


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_before_the_first_byte(fleet: FakeFleet, stream: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fleet.port)) as raw:
        raw.sendall(head.encode() + body)
        request = dispatched(fleet)
    both_hear_abort(fleet, request)
    assert outcomes(fleet, request) == ["admit", Outcome.ABORTED]
    fleet.say_text(request, "nobody hears", "stop")


def test_client_leaves_within_its_body(fleet: FakeFleet) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\ncontent-length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fleet.port)) as raw:
        raw.sendall(head.encode() + b"{")
    assert fleet.http.get("/health").status_code == 200


def test_a_kill_is_not_overtaken_by_bytes_for_a_slow_client(fleet: FakeFleet) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 250}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ALICE}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", fleet.port))
        raw.sendall(head.encode() + body)
        request = dispatched(fleet)
        live = fleet.router.find(request)
        assert live is not None
        # Far more than the connection's buffers hold: the router has to wait for its client.
        big = Tokens(request=request, tokens=list(b"y" * 65_536))
        for _ in range(200):
            fleet.say(big)
        eventually(lambda: len(live._tokens) > 20)
        fleet.say_text(request, "secret")
        fleet.post("/abort_request", {"rid": request, "incident": "inc-7"}, ADMIN)
        both_hear_abort(fleet, request, "inc-7")
        raw.settimeout(PATIENCE_S)
        received = b""
        while part := raw.recv(1 << 20):
            received += part
    assert b"secret" not in received
    assert received.count(b"y") < 200 * 65_536
    assert b"kv_guard_killed" in received[-1000:]


# Workers that fail or die


def test_failure_of_a_worker_is_the_clients_answer(fleet: FakeFleet) -> None:
    future = fleet.later({"prompt": "x"})
    request = dispatched(fleet)
    fleet.say_failed(request, 400, "context_length_exceeded")
    response = future.result()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    both_hear_abort(fleet, request)
    assert outcomes(fleet, request) == ["admit", 400, Outcome.ABORTED]


@pytest.mark.parametrize(("dies", "other"), [("decode-0", "prefill-0"), ("prefill-0", "decode-0")])
def test_worker_dies(dies: str, other: str) -> None:
    with fake_fleet() as fleet:
        future = fleet.later({"prompt": "x"})
        request = dispatched(fleet)
        fleet.die(dies)
        response = future.result()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_failed"
        assert dies in response.json()["error"]["message"]
        abort = fleet.hear(other, Abort)
        assert abort.request == request
        assert fleet.silent(dies)
        health = fleet.http.get("/health")
        assert (health.status_code, health.json()["missing"]) == (503, [dies])
        assert fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x"}).status_code == 503
        # The successor takes requests; what is still said of the dead one changes nothing.
        before = fleet.epochs[dies]
        fleet.epochs[dies] += 1
        fleet.hello(dies)
        fleet.wait_for_health()
        fleet.epochs[dies] = before
        fleet.die(dies)
        future = fleet.later({"prompt": "x"})
        assert fleet.hear("decode-0", Generate).epoch == (201 if dies == "decode-0" else 200)
        assert fleet.hear("prefill-0", Prefill).epoch == (101 if dies == "prefill-0" else 100)
        fleet.say_failed("unknown", 500, "worker_failed")
        assert f'worker_deaths_total{{worker="{dies}"}} 1.0' in fleet.http.get("/metrics").text
        future.cancel()


def test_decode_dies_in_mid_stream_and_prefill_after_its_part() -> None:
    with fake_fleet() as fleet:
        stream = Stream(fleet)
        request = dispatched(fleet)
        fleet.say_text(request, "a")
        assert stream.text(1) == "a"
        fleet.die("prefill-0")
        fleet.wait_for_health(503)
        fleet.say_text(request, "b")
        assert stream.text(1) == "b"  # Prefill had done its part.
        fleet.die("decode-0")
        rest = stream.rest()
        assert "worker_failed" in rest
        assert "[DONE]" not in rest
        assert outcomes(fleet, request) == ["admit", Outcome.ABORTED]


def test_a_hello_of_a_new_life_buries_the_old_one() -> None:
    with fake_fleet() as fleet:
        future = fleet.later({"prompt": "x"})
        dispatched(fleet)
        fleet.epochs["decode-0"] = 201
        fleet.hello("decode-0")
        assert future.result().json()["error"]["code"] == "worker_failed"
        assert fleet.hear("supervisor", Hello).epoch == 201
        fleet.hear("prefill-0", Abort)


def test_output_for_nobody_is_stopped(fleet: FakeFleet) -> None:
    for _ in range(3):
        fleet.say_text("of-an-earlier-router", "a")
    for worker in ("decode-0", "prefill-0"):
        assert fleet.hear(worker, Abort).request == "of-an-earlier-router"


def test_messages_that_cannot_be_read(fleet: FakeFleet) -> None:
    for data in (b"", b"\xc1", b"\x81\xa4type\xa6Tokens", b"\x00" * 1000):
        fleet._router.send(data)
    future = fleet.later({"prompt": "x"})
    fleet.say_text(dispatched(fleet), "ok", "stop")
    assert future.result().status_code == 200


def test_stopping_fails_what_runs() -> None:
    with fake_fleet() as fleet:
        future = fleet.later({"prompt": "x"})
        request = dispatched(fleet)
        fleet._loop.call_soon_threadsafe(fleet.router.fail_all)
        response = future.result()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        both_hear_abort(fleet, request)
        assert fleet.http.get("/health").json()["status"] == "stopping"
        assert fleet.post(COMPLETIONS, {"model": "tiny", "prompt": "x"}).json()["error"]["code"] == "shutting_down"
