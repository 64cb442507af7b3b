from __future__ import annotations

import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from ring_rig import ROOT, Start, as_sent, go, record, seqs

from guard.native._core import RingReader, RingWriter, encode
from guard.records import Free, PageSet

HEADER, ROW = 4096, 64
READ = record(0)


# What a ring is


def test_the_layout_that_the_header_documents(ring_path: str) -> None:
    writer = RingWriter(ring_path, "stream-é", 7, lanes=3, rows=128)
    writer.emit(READ, 0)
    writer.emit(record(1), 1)
    data = Path(ring_path).read_bytes()
    size = HEADER + 3 * (HEADER + 128 * ROW)
    assert len(data) == size
    assert stat.S_IMODE(os.stat(ring_path).st_mode) == 0o600
    assert struct.unpack_from("=8s4IQ", data) == (b"KVGRING1", 1, 3, 128, 64, size)
    assert abs(struct.unpack_from("=Q", data, 32)[0] / 1e9 - time.time()) < 60
    lane = data[HEADER:]
    pid, stream_bytes, taken_ns = struct.unpack_from("=iIQ", lane)
    assert pid == os.getpid()
    assert lane[1024 : 1024 + stream_bytes].decode() == "stream-é"
    assert abs(taken_ns / 1e9 - time.time()) < 60
    head, written, dropped = struct.unpack_from("=3Q", lane, 64)
    some = [encode(as_sent("stream-é", seq)) for seq in range(2)]
    rows = [-(-len(one) // ROW) for one in some]
    assert (head, written, dropped) == (sum(rows), 2, 0)
    assert lane[HEADER : HEADER + rows[0] * ROW] == some[0].ljust(rows[0] * ROW, b"\0")
    assert lane[HEADER + rows[0] * ROW :][: rows[1] * ROW] == some[1].ljust(rows[1] * ROW, b"\0")
    reader = RingReader(ring_path)
    assert len(reader.take()) == 2
    data = Path(ring_path).read_bytes()
    assert struct.unpack_from("=Q", data, 40) == (os.getpid(),)
    assert struct.unpack_from("=3Q", data, HEADER + 128) == (sum(rows), 2, 0)


def test_records_keep_their_order_over_the_lanes_end(ring_path: str) -> None:
    writer = RingWriter(ring_path, "s", 7, lanes=2, rows=64)
    reader = RingReader(ring_path)
    got: list[int] = []
    for seq in range(1000):
        assert writer.emit(record(seq), seq)
        got += seqs(reader.take()).get("s", [])
    assert got == list(range(1000))
    assert writer.written == 1000
    (lane,) = [lane for lane in reader.lanes() if lane.pid]
    assert (lane.index, lane.pid, lane.stream) == (0, os.getpid(), "s")
    assert (lane.written, lane.dropped, lane.broken, lane.waiting) == (1000, 0, 0, 0)


def test_a_full_lane_loses_what_finds_no_room_and_counts_it(ring_path: str) -> None:
    writer = RingWriter(ring_path, "s", 7, rows=64)
    kept = [seq for seq in range(100) if writer.emit(record(seq), seq)]
    assert 0 < len(kept) < 50
    assert (writer.written, writer.dropped) == (len(kept), 100 - len(kept))
    reader = RingReader(ring_path)
    assert seqs(reader.take())["s"] == kept
    assert reader.lanes()[0].dropped == 100 - len(kept)
    assert writer.emit(record(100), 100), "there is room again"
    assert seqs(reader.take())["s"] == [100]


def test_a_record_that_no_lane_holds_is_lost_like_others(ring_path: str) -> None:
    writer = RingWriter(ring_path, "s", 7, rows=64)
    large = Free(request="r", tenant="t", pages=PageSet.of(range(0, 2000, 2)))
    assert not writer.emit(large, 0)
    assert writer.dropped == 1
    assert writer.emit(record(1), 1)


def test_many_lanes_have_their_turn(ring_path: str) -> None:
    writers = [RingWriter(ring_path, f"s{i}", 7) for i in range(3)]
    for seq in range(500):
        for writer in writers:
            writer.emit(record(seq), seq)
    reader = RingReader(ring_path)
    some = seqs(reader.take(600))
    assert sum(map(len, some.values())) == 600
    assert all(len(found) >= 128 for found in some.values())
    rest = seqs(reader.take())
    assert all(some[stream] + rest[stream] == list(range(500)) for stream in some)


# Processes


def test_many_writers_in_processes_of_their_own(ring_path: str, start_writer: Start) -> None:
    reader = RingReader(ring_path)
    writers = [start_writer(f"w{i}", 20_000) for i in range(4)]
    for writer in writers:
        go(writer)
    found: dict[str, list[int]] = defaultdict(list)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        running = any(writer.poll() is None for writer in writers)
        rows = reader.take()
        for stream, some in seqs(rows).items():
            found[stream] += some
        if not len(rows):
            if not running:
                break
            reader.wait(0.05)
    for i, writer in enumerate(writers):
        assert writer.stdout is not None
        written, dropped = map(int, writer.stdout.read().split())
        assert written + dropped == 20_000
        assert len(found[f"w{i}"]) == written
        assert found[f"w{i}"] == sorted(set(found[f"w{i}"]))
    assert not any(lane.broken or lane.pid for lane in reader.lanes())


def test_a_writer_killed_at_any_moment_leaves_the_rest_readable(ring_path: str, start_writer: Start) -> None:
    seed = random.Random(3)
    reader = RingReader(ring_path, rows=256)
    for round_ in range(12):
        victims = [start_writer(f"v{round_}.{i}", 0, rows=256) for i in range(2)]
        for victim in victims:
            go(victim)
        found: dict[str, list[int]] = defaultdict(list)
        end = time.monotonic() + seed.uniform(0.0, 0.02)
        while time.monotonic() < end:
            for stream, some in seqs(reader.take()).items():
                found[stream] += some
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.wait(60)
        for stream, some in seqs(reader.take(1 << 20)).items():
            found[stream] += some
        assert all(some == sorted(set(some)) for some in found.values())
        lanes = reader.lanes()
        assert not any(lane.broken or lane.waiting for lane in lanes)
        assert not any(lane.pid for lane in lanes), "the lanes of the dead are free"
    assert len(reader.lanes()[2].stream) == 0, "and were taken again"
    RingWriter(ring_path, "after", 7).emit(READ, 0)
    assert seqs(reader.take()) == {"after": [0]}


READER = """
import sys
from guard.native._core import RingReader
reader = RingReader(sys.argv[1])
while True:
    rows = reader.take(50)
    for record in rows:
        print(record.seq, flush=True)
    reader.wait(1.0)
"""


def test_a_reader_killed_and_its_successor_read_everything_once(ring_path: str, start_writer: Start) -> None:
    writer = RingWriter(ring_path, "s", 7)
    read: list[int] = []
    emitted = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", READER, ring_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        for _ in range(300):
            writer.emit(record(emitted), emitted)
            emitted += 1
        for line in process.stdout:
            read.append(int(line))
            if read[-1] == emitted - 1:
                break
        # It has said all that it took. What is written between two readers waits for the second.
        process.kill()
        process.communicate(timeout=60)
        for _ in range(50):
            writer.emit(record(emitted), emitted)
            emitted += 1
    last = RingReader(ring_path)
    read += seqs(last.take())["s"]
    assert read == list(range(emitted))


def test_a_writer_goes_on_where_a_dead_one_stopped(ring_path: str, start_writer: Start) -> None:
    dead = start_writer("dead", 30, lanes=1)
    go(dead)
    dead.wait(60)
    writer = RingWriter(ring_path, "s", 7)
    writer.emit(record(0), 0)
    reader = RingReader(ring_path)
    assert seqs(reader.take()) == {"dead": list(range(30)), "s": [0]}
    assert [(lane.index, lane.stream, lane.written) for lane in reader.lanes()] == [(0, "s", 1)]


def test_more_writers_than_lanes(ring_path: str) -> None:
    writers = [RingWriter(ring_path, f"s{i}", 7, lanes=2) for i in range(2)]
    with pytest.raises(RuntimeError, match=f"ring {ring_path}: has no free lane: .* more lanes"):
        RingWriter(ring_path, "s2", 7)
    writers.pop().close()
    RingWriter(ring_path, "s2", 7).close()


def test_one_reader_a_ring(ring_path: str) -> None:
    reader = RingReader(ring_path)
    with pytest.raises(RuntimeError, match=f"ring {ring_path}: is read by another guard .process {os.getpid()}"):
        RingReader(ring_path)
    reader.close()
    RingReader(ring_path).close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.take()


def test_whoever_comes_first_makes_it_and_all_meet(ring_path: str) -> None:
    script = "import sys; from guard.native._core import RingWriter; RingWriter(sys.argv[1], sys.argv[2], 1).skip()"
    for _ in range(3):
        makers = [subprocess.Popen([sys.executable, "-c", script, ring_path, f"s{i}"], cwd=ROOT) for i in range(6)]
        assert [maker.wait(30) for maker in makers] == [0] * 6
        assert os.listdir(os.path.dirname(ring_path)) == ["ring"]
        os.unlink(ring_path)


def test_a_forked_child_has_no_lane(ring_path: str) -> None:
    script = """
import os, sys
from guard.native._core import RingWriter
from guard.records import Free, PageSet
record = Free(request="r", tenant="t", pages=PageSet.parse("1"))
writer = RingWriter(sys.argv[1], "s", 7, lanes=1)
writer.send(record)
child = os.fork()
if child == 0:
    ok = not writer.on and writer.send(record) == writer.skip() == -1 and writer.emit(record, 5) is False
    sys.stdin.readline()
    os._exit(0 if ok else 1)
assert writer.send(record) == 1
print(child, flush=True)
os._exit(0)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, ring_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.wait(60)
    # The child lives and does not keep its parent's lane.
    RingWriter(ring_path, "s2", 7).close()
    assert [one.seq for one in RingReader(ring_path).take()] == [0, 1]
    parent.communicate("end\n", timeout=60)


# Waiting


def test_a_sleeping_reader_is_woken(ring_path: str, start_writer: Start) -> None:
    reader = RingReader(ring_path)
    writer = start_writer("s", 1)
    clock = time.monotonic()
    threading.Timer(0.1, go, [writer]).start()
    reader.wait(30)
    assert len(reader.take()) == 1
    assert time.monotonic() - clock < 20


def test_a_reader_waits_no_longer_than_it_is_told_and_can_be_called(ring_path: str) -> None:
    reader = RingReader(ring_path)
    clock = time.monotonic()
    reader.wait(0.05)
    assert 0.04 < time.monotonic() - clock < 10
    threading.Timer(0.05, reader.wake).start()
    reader.wait(30)
    reader.wake()
    reader.wait(30)
    assert time.monotonic() - clock < 20
    writer = RingWriter(ring_path, "s", 7)
    writer.emit(READ, 0)
    reader.wait(30)
    assert len(reader.take()) == 1
    # Right after a record it looks for the next without sleeping, and then sleeps.
    reader.wait(0.05)
    assert time.monotonic() - clock < 20


def test_no_wake_up_is_lost(ring_path: str, start_writer: Start) -> None:
    """Each record is written once the one before was read, so that the reader is about to sleep every time."""
    ping, pong = RingWriter(ring_path, "ping", 7), ring_path + "2"
    reader = RingReader(ring_path)
    back_writer, back = RingWriter(pong, "pong", 7), RingReader(pong)

    def answer() -> None:
        for seq in range(300):
            while not len(reader.take()):
                reader.wait(60)
            if seq % 3 == 0:
                time.sleep(0.003)  # past the time in which the other looks without sleeping
            back_writer.emit(record(seq), seq)

    thread = threading.Thread(target=answer)
    clock = time.monotonic()
    thread.start()
    for seq in range(300):
        ping.emit(record(seq), seq)
        while not len(back.take()):
            back.wait(60)
    thread.join()
    assert time.monotonic() - clock < 60, "a lost wake-up takes a minute"


# Directly


def test_send_numbers_records_and_never_raises(ring_path: str) -> None:
    told: list[str] = []
    writer = RingWriter(ring_path, "s", 7, tell=told.append)
    assert [writer.send(record(0)), writer.skip(), writer.send(None), writer.send(record(3))] == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert writer.send(Free(request="\ud800", tenant="t", pages=PageSet())) == 4
    assert (writer.written, writer.dropped, writer.failed) == (2, 0, 2)
    assert told == ["a NoneType is no record"]
    assert [got.seq for got in RingReader(ring_path).take()] == [0, 3]
    writer.close()
    assert writer.send(record(0)) == writer.skip() == -1
    assert not writer.on


def test_a_teller_that_raises_is_only_a_nuisance(ring_path: str) -> None:
    writer = RingWriter(ring_path, "s", 7, tell=lambda text: 1 / 0)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        assert writer.send(None) == 0  # type: ignore[arg-type]
    finally:
        sys.unraisablehook = hook


def test_times(ring_path: str) -> None:
    writer, reader = RingWriter(ring_path, "s", 7), RingReader(ring_path)
    record_ = Free(request="r", tenant="t", pages=PageSet.parse("1"))
    before = time.time_ns()
    writer.emit(record_, 0)
    writer.emit(record_, 1, 5)
    writer.emit(record(0), 2)
    got = [one.time_ns for one in reader.take()]
    assert before <= got[0] <= time.time_ns()
    assert got[1:] == [5, 1]
    with pytest.raises(ValueError, match="not within"):
        writer.emit(record_, 2**63)


def test_the_signal_that_ends_a_writer_does_not_matter(ring_path: str, start_writer: Start) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV):
        victim = start_writer(f"v{number}", 0)
        go(victim)
        victim.send_signal(number)
        victim.wait(60)
        reader = RingReader(ring_path)
        assert not any(lane.pid for lane in reader.lanes())
        reader.close()
