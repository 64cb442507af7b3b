"""`hooks.emit` through the ring, alone and beside OTLP, and a whole engine that does so."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import ALICE, BOB, running_engine
from msgspec.structs import replace
from record_sink import RecordSink
from test_emit import EVERY_KIND, READ

from engine.config import GuardConfig
from guard.native._core import RingReader, RingWriter
from guard.records import Free, PageSet, Record, Respond
from hooks.emit import EmitError, Emitter, configure

DEADLINE_S = 30.0


def on_the_ring(path: str, records: list[Record], emitter: Emitter) -> list[Record]:
    """What the records are once they arrived, and were emitted first of all."""
    return [replace(record, stream=emitter.stream, epoch=emitter.epoch, seq=seq) for seq, record in enumerate(records)]


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_every_kind_of_record_arrives_as_it_was(ring_path: str) -> None:
    emitter, provider = configure("decode-0", endpoint=None, ring=ring_path)
    assert provider is None
    assert emitter.on
    records = [replace(record, time_ns=1000 + i) for i, record in enumerate(EVERY_KIND)]
    assert [emitter.emit(record) for record in records] == list(range(len(records)))
    assert list(RingReader(ring_path).take()) == on_the_ring(ring_path, records, emitter)
    assert emitter.counts == {"records_sent": len(records), "records_dropped": 0, "records_failed": 0}


def test_a_record_without_a_time_gets_one_and_a_context_is_taken(ring_path: str) -> None:
    emitter, _ = configure("decode-0", endpoint=None, ring=ring_path)
    before = time.time_ns()
    emitter.emit(READ, None)
    emitter.emit(READ, context=None)
    assert all(before <= record.time_ns <= time.time_ns() for record in RingReader(ring_path).take())


def test_the_ring_alone_needs_no_opentelemetry(ring_path: str) -> None:
    script = """
import sys
from guard.records import Free, PageSet
from hooks.emit import configure
emitter, provider = configure("decode-0", endpoint=None, ring=sys.argv[1])
assert provider is None
for seq in range(300):
    assert emitter.emit(Free(request="r", tenant="t", pages=PageSet.parse("1"))) == seq
heavy = [name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "grpc", "google", "torch")]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script, ring_path], check=True, timeout=60)
    # There was no reader, and the process is gone.
    assert [record.seq for record in RingReader(ring_path).take()] == list(range(300))


def test_both_ways_give_exact_duplicates(ring_path: str) -> None:
    with RecordSink() as sink:
        emitter, provider = configure("decode-0", endpoint=sink.endpoint, ring=ring_path)
        assert provider is not None
        for record in EVERY_KIND:
            emitter.emit(record)
        provider.force_flush(10_000)
        until(lambda: emitter.counts["records_sent"] == 2 * len(EVERY_KIND))
        provider.shutdown()
        assert list(RingReader(ring_path).take()) == sink.records()


def test_a_second_endpoint_gets_the_records_too(ring_path: str) -> None:
    with RecordSink() as sink:
        emitter, provider = configure(
            "decode-0", endpoint=None, otlp_endpoint=f"http://{sink.endpoint}", ring=ring_path
        )
        assert provider is not None
        emitter.emit(READ)
        provider.get_tracer("engine").start_span("request").end()
        provider.shutdown()
        assert list(RingReader(ring_path).take()) == sink.records() != []


@pytest.mark.parametrize("both", [False, True])
def test_what_cannot_be_a_row_is_a_hole_counted_and_told_once(
    ring_path: str, both: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with RecordSink() as sink:
        emitter, provider = configure("decode-0", endpoint=sink.endpoint if both else None, ring=ring_path)
        bad: Any = replace(READ, tokens=-1)
        assert [emitter.emit(record) for record in (READ, bad, bad, READ)] == [0, 1, 2, 3]
        if provider is not None:
            provider.shutdown()
        assert [record.seq for record in RingReader(ring_path).take()] == [0, 3]
    assert emitter.counts["records_failed"] >= 2
    told = [record for record in caplog.records if record.name == "hooks.emit" and record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "could not be emitted" in told[0].getMessage()


@pytest.mark.parametrize("both", [False, True])
def test_telemetry_lost_on_purpose_is_a_hole(ring_path: str, both: bool) -> None:
    with RecordSink() as sink:
        emitter, provider = configure(
            "decode-0",
            endpoint=sink.endpoint if both else None,
            ring=ring_path,
            drop=lambda record: isinstance(record, Respond),
        )
        respond = EVERY_KIND[-1]
        assert [emitter.emit(record) for record in (READ, respond, READ)] == [0, 1, 2]
        if provider is not None:
            provider.shutdown()
            assert [record.seq for record in sink.records()] == [0, 2]
        assert [record.seq for record in RingReader(ring_path).take()] == [0, 2]


def test_a_drop_that_raises_costs_the_record_only(ring_path: str) -> None:
    emitter, _ = configure("decode-0", endpoint=None, ring=ring_path, drop=lambda record: bool(1 / 0))
    assert [emitter.emit(READ), emitter.emit(READ)] == [0, 1]
    assert emitter.counts == {"records_sent": 0, "records_dropped": 0, "records_failed": 2}


def test_a_full_ring_is_counted(ring_path: str) -> None:
    RingWriter(ring_path, "x", 1, lanes=1, rows=64).close()
    emitter, _ = configure("decode-0", endpoint=None, ring=ring_path)
    for seq in range(100):
        assert emitter.emit(READ) == seq
    counts = emitter.counts
    assert counts["records_sent"] + counts["records_dropped"] == 100
    reader = RingReader(ring_path)
    kept = [record.seq for record in reader.take()]
    assert kept == list(range(counts["records_sent"]))
    emitter.emit(READ)
    assert [record.seq for record in reader.take()] == [100], "the hole between says what was lost"


@pytest.mark.parametrize("both", [False, True])
def test_threads_share_a_stream(ring_path: str, both: bool) -> None:
    with RecordSink() as sink:
        emitter, provider = configure("decode-0", endpoint=sink.endpoint if both else None, ring=ring_path)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=lambda: [emitter.emit(READ) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        if provider is not None:
            provider.shutdown()
    assert [record.seq for record in RingReader(ring_path).take()] == list(range(2000))


def test_a_forked_child_does_not_go_on_with_its_parents_stream(ring_path: str) -> None:
    script = """
import os, sys
from guard.records import Free, PageSet
from hooks.emit import configure
record = Free(request="r", tenant="t", pages=PageSet.parse("1"))
emitter, _ = configure("decode-0", endpoint=None, ring=sys.argv[1])
emit = emitter.emit
assert emit(record) == 0
child = os.fork()
if child == 0:
    off = emitter.emit(record) == emit(record) == -1 and not emitter.on
    own, _ = configure("decode-1", endpoint=None, ring=sys.argv[1])
    os._exit(0 if off and own.emit(record) == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert emitter.emit(record) == 1
"""
    subprocess.run([sys.executable, "-c", script, ring_path], check=True, timeout=60)
    found = sorted((record.stream, record.seq) for record in RingReader(ring_path).take())
    assert found == [("decode-0", 0), ("decode-0", 1), ("decode-1", 0)]


def test_a_ring_that_cannot_be_had_is_an_error_with_the_remedy(ring_path: str) -> None:
    Path(ring_path).write_bytes(b"no ring")
    with pytest.raises(EmitError, match=f"ring {ring_path}: is open to others"):
        configure("decode-0", endpoint=None, ring=ring_path)
    Path(ring_path).unlink()
    lane = RingWriter(ring_path, "x", 1, lanes=1, rows=64)
    with pytest.raises(EmitError, match=r"no free lane: .* more lanes"):
        configure("decode-0", endpoint=None, ring=ring_path)
    lane.close()
    with pytest.raises(EmitError, match="stream has more than 256"):
        configure("d" * 257, endpoint=None, ring=ring_path)
    with pytest.raises(EmitError, match="at least one"):
        configure("decode-0", endpoint="unix:/run/guard.sock", queue=0, ring=ring_path)
    emitter, _ = configure("decode-0", endpoint=None, ring=ring_path)
    assert emitter.emit(READ) == 0, "what failed before did not keep the lane"


def test_an_emitter_that_is_gone_gives_its_lane_back(ring_path: str) -> None:
    RingWriter(ring_path, "x", 1, lanes=1, rows=64).close()
    for i in range(3):
        emitter, _ = configure(f"decode-{i}", endpoint=None, ring=ring_path)
        emitter.emit(Free(request="r", tenant="t", pages=PageSet.parse("1")))
        del emitter
    assert [record.stream for record in RingReader(ring_path).take()] == [f"decode-{i}" for i in range(3)]


# A whole engine


def places(records: list[Record]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in records:
        found[record.stream, record.epoch].append(record.seq)
    return found


def test_an_engine_says_the_same_through_ring_and_otlp(ring_path: str) -> None:
    with RecordSink() as sink:
        reader = RingReader(ring_path)
        with running_engine(guard=GuardConfig(endpoint=sink.endpoint, ring=ring_path)) as engine:
            for key in (ALICE, BOB):
                assert engine.complete("through both", key, max_tokens=4).status_code == 200
        through_ring = list(reader.take())
        # The engine waited for this one when it stopped.
        through_otlp = sink.records()
    assert {stream for stream, _ in places(through_ring)} == {"router-0", "prefill-0", "decode-0"}
    assert all(seqs == list(range(len(seqs))) for seqs in places(through_ring).values())

    def by_place(records: list[Record]) -> list[Record]:
        return sorted(records, key=lambda record: (record.stream, record.epoch, record.seq))

    assert by_place(through_ring) == by_place(through_otlp)


def test_an_engine_through_the_ring_alone(ring_path: str) -> None:
    reader = RingReader(ring_path)
    with running_engine("--fault", "lost-telemetry", guard=GuardConfig(ring=ring_path)) as engine:
        for _ in range(4):
            assert engine.complete("through the ring", max_tokens=20).status_code == 200
        with engine.http() as client:
            metrics = client.get("/metrics").text
    assert 'kvguard_engine_worker_records_sent_total{worker="decode-0"}' in metrics
    found = {stream: seqs for (stream, _), seqs in places(list(reader.take())).items()}
    for stream in ("router-0", "prefill-0"):
        assert found[stream] == list(range(len(found[stream])))
    lost = set(range(found["decode-0"][-1])) - set(found["decode-0"])
    assert lost, "what the fault loses is a hole here too"
    assert not any(lane.dropped or lane.broken for lane in reader.lanes())
