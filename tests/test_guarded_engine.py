"""Engine and guard together, as real processes: what a correct engine and a broken one look like to their clients."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fixtures import ALICE, BOB
from guard_process import until
from guarded import COMPLETIONS, KEYS, STREAMS, Guarded, counter, guardctl, guarded_engine

from engine.config import PoolConfig
from guard.act.board import Verdict
from guard.findings import Kind
from guard.records import Pool, RequestEnd, Respond

pytestmark = pytest.mark.engine

HURT = {Kind.FOREIGN_READ, Kind.FOREIGN_WRITE, Kind.FOREIGN_SHARE, Kind.DOUBLE_OWNER, Kind.STALE_READ}
OVERLONG = "b" * 250
"""More than the prefill pool holds where a test wants that: the fault swallowed-reject bites."""
SWALLOWS: dict[str, Any] = {"prefill": PoolConfig(pages=8), "decode": PoolConfig(pages=128), "context": 1900}
TWICE: dict[str, Any] = {"prefill": PoolConfig(pages=80), "decode": PoolConfig(pages=150)}


def error_event(body: str) -> dict[str, Any]:
    """The error that ends a stream; fails if it does not end with one."""
    name, _, data = body.rstrip("\n").rpartition("\n\n")[2].partition("\n")
    assert name == "event: error"
    error: dict[str, Any] = json.loads(data.removeprefix("data: "))["error"]
    return error


# A correct engine


def mixed(pair: Guarded, number: int) -> int:
    """One of many requests; each fifth client leaves in the middle. Gives the status."""
    key, rng = KEYS[number % 4], random.Random(number)
    prompt = "The harbour is open. " * rng.randrange(1, 8) + f"Note {rng.randrange(3)}."
    limit = rng.randrange(1, 90)
    with pair.client(key) as client:
        if number % 5 == 0:
            messages = [{"role": "user", "content": prompt}]
            fields = {"model": "tiny", "messages": messages, "max_tokens": limit, "seed": number}
            return client.post("/v1/chat/completions", json=fields).status_code
    if number % 5 < 3:
        return pair.complete(prompt, key, max_tokens=limit).status_code
    with pair.stream(prompt, key, max_tokens=limit if number % 5 == 3 else 150) as response:
        if number % 5 == 3:
            assert response.read().endswith(b"data: [DONE]\n\n")
        else:
            next(response.iter_lines())
        return response.status_code


def many_mixed(pair: Guarded, count: int = 60) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: mixed(pair, number), range(count))) == [200] * count


def until_preempted(pair: Guarded) -> None:
    """Requests of which three fill decode's 24 pages, so that the next page of any of them is another's."""
    prompt = "The harbour is open. " * 5 + "Note 1234."
    for _ in range(20):
        with ThreadPoolExecutor(6) as pool:
            served = pool.map(lambda n: pair.complete(prompt, KEYS[n % 4], max_tokens=60).status_code, range(6))
            assert list(served) == [200] * 6
        if pair.counted("preemptions"):
            return
    pytest.fail("nobody was preempted")


@pytest.fixture(scope="module")
def correct() -> Iterator[Guarded]:
    """An engine without a fault, with too few pages for all that it is asked at once."""
    with guarded_engine(
        prefill=PoolConfig(pages=48, chunk_tokens=48),
        decode=PoolConfig(pages=24),
        max_waiting=16,
        collect=True,
    ) as pair:
        yield pair


def test_a_correct_engine_has_no_finding(correct: Guarded) -> None:
    many_mixed(correct)
    until_preempted(correct)
    assert correct.counted("gate_timeouts") == 0
    assert correct.counted("gate_waits") > 0
    assert correct.counted("prefix_hit_tokens", "prefill-0") > 0
    correct.until_judged()
    assert correct.findings() == {}
    metrics = correct.guard.metrics()
    assert metrics["kvguard_stream_gaps_total"] == 0
    assert metrics['kvguard_spans_invalid_total{protocol="grpc"}'] == 0


def test_a_correct_engine_over_tcp_in_pieces_has_no_finding() -> None:
    with guarded_engine(
        transport="tcp",
        piece_pages=2,
        prefill=PoolConfig(pages=24, workers=2, chunk_tokens=24),
        decode=PoolConfig(pages=24),
        guard={"policy": {"digests": "require"}},
    ) as pair:
        many_mixed(pair)
        until_preempted(pair)
        assert pair.counted("gate_timeouts") == 0
        # Both say all they know when they are told to stop.
        assert pair.engine.stop() == 0
        assert pair.stop_guard() == 0
        assert pair.findings() == {}


def test_records_and_spans_are_in_the_clients_trace(correct: Guarded) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with correct.client() as client:
        response = client.post(
            COMPLETIONS,
            json={"model": "tiny", "prompt": "traced", "max_tokens": 20, "temperature": 0, "seed": 3},
            headers={"traceparent": f"00-{trace}-{parent}-01"},
        )
    assert response.headers["traceparent"].split("-")[1] == trace
    request = response.headers["x-request-id"]
    until(lambda: {r.stream for r in correct.sink.records(request) if isinstance(r, RequestEnd)} == {*STREAMS})
    until(lambda: any(span.kind == span.SPAN_KIND_SERVER for span in in_trace(correct, trace).values()))
    spans = in_trace(correct, trace)
    [server] = [span for span in spans.values() if span.kind == span.SPAN_KIND_SERVER]
    assert server.parent_span_id.hex() == parent
    assert server.name == "text_completion tiny"
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in server.attributes}
    assert attributes.items() >= {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": request,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 20,
        "http.response.status_code": 200,
    }.items()  # fmt: skip
    assert attributes["gen_ai.response.finish_reasons"].values[0].string_value == "length"
    records = [span for span in spans.values() if span.name.startswith("kv.")]
    assert {span.name for span in records} >= {
        "kv.admit", "kv.alloc", "kv.write", "kv.read", "kv.transfer.begin", "kv.transfer.end", "kv.respond",
        "kv.request.end",
    }  # fmt: skip
    # All in one tree: whoever is followed upwards ends at the server's span.
    for span in records:
        while span.parent_span_id != server.span_id:
            span = spans[span.parent_span_id]
    assert len(records) == len(correct.sink.records(request))
    assert "traced" not in str(spans), "no prompt is in any of it"


def in_trace(pair: Guarded, trace: str) -> dict[bytes, Any]:
    return {span.span_id: span for _instance, span in pair.sink.spans() if span.trace_id.hex() == trace}


def test_too_many_are_told_to_come_back(correct: Guarded) -> None:
    prefill = correct.engine.pids()["prefill-0"]
    limit = correct.engine.config.max_waiting
    os.kill(prefill, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(limit) as pool:
            waiting = [pool.submit(correct.complete, "wait", KEYS[n % 4], max_tokens=4) for n in range(limit)]
            until(lambda: correct.metrics()["kvguard_engine_requests_without_output"] == limit)
            refused = correct.complete("one too many", max_tokens=4)
            os.kill(prefill, signal.SIGCONT)
            assert [future.result().status_code for future in waiting] == [200] * limit
    finally:
        os.kill(prefill, signal.SIGCONT)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "no_capacity"
    assert correct.complete("again", max_tokens=4).status_code == 200
    correct.until_judged()
    assert correct.findings() == {}


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
def test_a_worker_that_dies_under_load_is_no_leak(correct: Guarded, worker: str) -> None:
    before = correct.epochs()[worker]
    started = [record for record in correct.sink.records(stream=worker) if isinstance(record, Pool)]
    process = correct.engine.pids()[worker]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(mixed, correct, number) for number in range(40) if number % 5 in (0, 1, 2)]
        until(lambda: sum(future.done() for future in asked) >= 4)
        # Wherever it is just now, until all the others need something of it.
        os.kill(process, signal.SIGSTOP)
        until(lambda: correct.metrics()["kvguard_engine_requests_in_flight"] == 8)
        os.kill(process, signal.SIGKILL)
        statuses = [future.result() for future in asked]
    assert set(statuses) == {200, 503}
    until(lambda: correct.client().get("/health").status_code == 200)
    assert correct.epochs()[worker] > before
    # The guard follows the new epoch: where it did not, this gate would stay closed.
    many_mixed(correct, 12)
    assert len([r for r in correct.sink.records(stream=worker) if isinstance(r, Pool)]) == len(started) + 1
    correct.until_judged()
    nobody_was_hurt(correct)


def test_nothing_was_found_in_all_this(correct: Guarded) -> None:
    """Last: what the guard says when engine and guard have stopped in order."""
    assert correct.engine.stop() == 0
    assert correct.stop_guard() == 0
    nobody_was_hurt(correct)


def nobody_was_hurt(pair: Guarded) -> None:
    """A process that is killed takes its last records with it; what rests on those is said to be doubtful."""
    assert [f for f in pair.findings().values() if f["kind"] in HURT and f["confidence"] == "full"] == []
    assert "killed" not in {incident.action for incident in pair.incidents()}


# A broken one


@pytest.fixture(scope="module")
def swallowing() -> Iterator[Guarded]:
    """An engine with the fault swallowed-reject; requests that fit prefill's pool are served as they should be."""
    with guarded_engine("--fault", "swallowed-reject", **SWALLOWS, collect=True) as pair:
        yield pair


def leave_something(pair: Guarded) -> None:
    """Alice's KV is in the pages that come next."""
    assert pair.complete("a" * 100, ALICE, max_tokens=200).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_killed_before_the_first_byte(swallowing: Guarded, stream: bool) -> None:
    leave_something(swallowing)
    aborts = 'kvguard_engine_requests_total{route="/abort_request",status="200"}'
    before = swallowing.metrics().get(aborts, 0)
    response = swallowing.complete(OVERLONG, BOB, max_tokens=20, stream=stream)
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    request, error = response.headers["x-request-id"], response.json()["error"]
    assert error["code"] == "kv_guard_killed"
    assert response.headers["x-kvguard-incident"] == error["incident"]
    assert error["incident"] in error["message"]
    until(lambda: swallowing.metrics().get(aborts, 0) > before)
    until(lambda: swallowing.incident(request).abort_ns)

    run = guardctl("incidents", "--db", swallowing.incidents_path, "show", error["incident"], "-o", "json")
    assert (run.returncode, run.stderr) == (0, "")
    incident = json.loads(run.stdout)
    assert (incident["id"], incident["request"]) == (error["incident"], request)
    assert (incident["tenant"], incident["action"], incident["mode"]) == ("bob-corp", "killed", "enforce")
    assert incident["disclosed"] is False
    assert incident["abort_result"] == "status 200"
    assert incident["record_ns"] < incident["received_ns"] <= incident["verdict_ns"] <= incident["abort_ns"]
    found = {finding["kind"]: finding for finding in incident["findings"]}
    assert found.keys() >= {Kind.FOREIGN_READ, Kind.STALE_READ, Kind.ZOMBIE_REQUEST}
    assert found[Kind.FOREIGN_READ]["other_tenants"] == ["alice-corp"]
    offending = [record for record in incident["records"] if record["offending"]]
    assert "kv.read" in {record["name"] for record in offending}
    read = found[Kind.FOREIGN_READ]
    places = {(r["attributes"]["kv.stream.id"], r["attributes"]["kv.seq"]) for r in offending}
    assert (read["stream"], read["seq"]) in places

    responds = [record for record in swallowing.sink.records(request) if isinstance(record, Respond)]
    assert responds == []
    board = swallowing.board()
    assert (board.verdict(request), board.incident(request)) == (Verdict.KILL, error["incident"])
    board.close()


def test_the_others_are_served(swallowing: Guarded) -> None:
    response = swallowing.complete("the others", BOB, max_tokens=20)
    assert response.status_code == 200
    board = swallowing.board()
    assert board.verdict(response.headers["x-request-id"]) is Verdict.ALLOW
    board.close()


def test_a_replay_of_what_was_recorded_finds_the_same(swallowing: Guarded, tmp_path: Path) -> None:
    leave_something(swallowing)
    killed = swallowing.complete(OVERLONG, BOB, max_tokens=5).headers["x-request-id"]
    swallowing.incident(killed)
    # Both say all they know when they are told to stop.
    assert swallowing.engine.stop() == 0
    assert swallowing.stop_guard() == 0
    live = swallowing.findings()
    for finding in live.values():
        assert finding.pop("reason")
        assert finding.pop("time_ns")
    recorded = tmp_path / "recorded.jsonl"
    swallowing.sink.write(recorded)
    run = guardctl("replay", recorded, "-o", "json")
    assert (run.returncode, run.stderr) == (1, "")
    replayed = json.loads(run.stdout)
    assert {(f["kind"], f["request"], f["pool"]): f for f in replayed["findings"]} == live
    assert replayed["requests"][killed] == {
        "tenant": "bob-corp", "verdict": "kill", "lineage": ["alice-corp", "bob-corp"], "disclosed": False,
    }  # fmt: skip
    assert replayed["records"]["invalid"] == 0


def test_cut_in_the_middle() -> None:
    with guarded_engine("--fault", "double-free", **TWICE) as pair:
        # Her pages are in the free list twice now; bob takes some of them.
        assert pair.complete("a" * 1000, ALICE, max_tokens=1).status_code == 200
        with pair.stream("b" * 16, BOB, max_tokens=1200) as response:
            assert response.status_code == 200
            chunks = response.iter_text()
            text = next(chunks)
            # More than she had: however far he has come, she gets some of his.
            alices = pair.complete("c" * 1100, ALICE, max_tokens=1)
            text += "".join(chunks)
        bob = response.headers["x-request-id"]
        error = error_event(text)
        assert error["code"] == "kv_guard_killed"
        assert "[DONE]" not in text
        # The engine's own check of what arrived may come before the verdict.
        assert alices.json()["error"]["code"] in ("kv_guard_killed", "transfer_failed")
        incident = pair.incident(bob, Kind.DOUBLE_OWNER)
        assert incident.id == error["incident"]
        assert (incident.action, incident.mode, incident.disclosed) == ("killed", "enforce", False)
        assert incident.verdict_ns is not None
        assert incident.record_ns < incident.verdict_ns
        assert any(record["offending"] for record in incident.records)
        assert pair.incident(alices.headers["x-request-id"]).action == "killed"
        until(lambda: pair.incident(bob).abort_result == "status 200")
        assert pair.metrics()['kvguard_engine_kills_total{when="mid_stream"}'] == 1


def test_monitor_mode_tells_and_stops_nothing() -> None:
    with guarded_engine("--fault", "swallowed-reject", mode="monitor", **SWALLOWS) as pair:
        leave_something(pair)
        response = pair.complete(OVERLONG, BOB, max_tokens=20)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 20
        request = response.headers["x-request-id"]
        incident = pair.incident(request, Kind.TAINTED_RESPONSE)
        assert (incident.action, incident.mode, incident.disclosed) == ("observed: would kill", "monitor", True)
        assert incident.verdict_ns is not None
        assert incident.abort_ns is None
        board = pair.board()
        assert (board.verdict(request), board.incident(request)) == (Verdict.ALLOW, "")
        board.close()
        metrics = pair.guard.metrics()
        assert (metrics["kvguard_kills_total"], metrics["kvguard_kills_withheld_total"]) == (0, 1)
        assert pair.counted("gate_timeouts") == 0


def test_async_waits_for_nothing_and_cuts_all_the_same() -> None:
    with guarded_engine("--fault", "swallowed-reject", gate="async", **SWALLOWS) as pair:
        leave_something(pair)
        pair.guard.process.send_signal(signal.SIGSTOP)
        try:
            with pair.stream(OVERLONG, BOB, max_tokens=1600) as response:
                assert response.status_code == 200
                chunks = response.iter_text()
                text = next(chunks)
                pair.guard.process.send_signal(signal.SIGCONT)
                text += "".join(chunks)
        finally:
            pair.guard.process.send_signal(signal.SIGCONT)
        assert error_event(text)["code"] == "kv_guard_killed"
        assert "[DONE]" not in text
        incident = pair.incident(response.headers["x-request-id"], Kind.TAINTED_RESPONSE)
        assert incident.id == error_event(text)["incident"]
        assert (incident.action, incident.disclosed) == ("killed", True)
        assert pair.counted("gate_waits") == 0


# A guard that is not there


def test_without_a_guard_an_open_gate_lets_go() -> None:
    with guarded_engine("--fault", "swallowed-reject", **SWALLOWS, on_timeout="open", start_guard=False) as pair:
        assert pair.complete("x", max_tokens=4).status_code == 200
        until(lambda: pair.metrics().get(counter("gate_timeouts"), 0) > 0)
        pair.start_guard()
        is_guarded(pair)
        waited = pair.counted("gate_timeouts")
        is_guarded(pair)
        assert pair.counted("gate_timeouts") == waited

        pair.stop_guard(signal.SIGKILL)
        assert pair.complete("x", max_tokens=4).status_code == 200
        until(lambda: pair.metrics()[counter("gate_timeouts")] > waited)
        pair.start_guard()
        says_what_it_missed(pair)
        is_guarded(pair)


def test_without_a_guard_a_closed_gate_stays_closed() -> None:
    with guarded_engine("--fault", "swallowed-reject", **SWALLOWS, wait_ms=2000, start_guard=False) as pair:
        is_unavailable(pair.complete("x", max_tokens=4))
        pair.start_guard()
        is_guarded(pair)

        pair.stop_guard(signal.SIGKILL)
        is_unavailable(pair.complete("x", max_tokens=4))
        is_unavailable(pair.complete("x", max_tokens=4, stream=True))
        pair.start_guard()
        says_what_it_missed(pair)
        is_guarded(pair)
        # A guard that is told to stop closes its board: nobody waits for it.
        assert pair.stop_guard() == 0
        is_unavailable(pair.complete("x", max_tokens=4))
        assert until(lambda: pair.metrics().get(counter("kv_guard_unavailable"), 0)) > 0
        # Nor does an engine that is to stop: it says what it could not tell any more.
        assert pair.engine.stop() == 0
        assert not any("did not stop in time" in line for line in pair.engine.stderr)
        assert any(line.startswith("decode-0: ") and "have been dropped" in line for line in pair.engine.stderr)


def is_guarded(pair: Guarded) -> None:
    """Good requests are served, and bad ones are killed."""
    leave_something(pair)
    response = pair.complete(OVERLONG, BOB, max_tokens=8)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "kv_guard_killed")


def is_unavailable(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "kv_guard_unavailable")


def says_what_it_missed(pair: Guarded) -> None:
    gaps = until(lambda: pair.incidents(kind=Kind.STREAM_GAP))
    streams = {finding["stream"] for incident in gaps for finding in incident.findings}
    assert streams == {*STREAMS}
