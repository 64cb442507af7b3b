from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_rig import ROOT, record

from guard.native._core import RingReader, RingWriter
from guard.records import PageSet, Record

HEADER, ROW = 4096, 64


def offset(lane: int, rows: int) -> int:
    """Of a lane in the file."""
    return HEADER + lane * (HEADER + rows * ROW)


# What is no ring, or is spoilt


def test_what_is_no_ring_is_refused_with_a_remedy(ring_path: str) -> None:
    RingWriter(ring_path, "s", 7, lanes=1, rows=64).close()
    good = Path(ring_path).read_bytes()

    def refuses(says: str) -> None:
        for make in (lambda: RingWriter(ring_path, "s", 7), lambda: RingReader(ring_path)):
            with pytest.raises(RuntimeError, match=says) as raised:
                make()
            assert ring_path in str(raised.value)

    def with_bytes(at: int, layout: str, *values: object) -> None:
        data = bytearray(good)
        struct.pack_into(layout, data, at, *values)
        Path(ring_path).write_bytes(data)

    with_bytes(0, "=8s", b"KVGBOARD")
    refuses("is no ring")
    with_bytes(8, "=I", 2)
    refuses("another version: run the same release")
    for at, value in [(12, 2), (12, 0), (12, 2**32 - 1), (16, 128), (16, 65), (16, 2**31), (20, 32), (24, 5)]:
        with_bytes(at, "=I", value)
        refuses("not of the size")
    Path(ring_path).write_bytes(good[:-1])
    refuses("not of the size")
    Path(ring_path).write_bytes(good[:100])
    refuses("is no ring")
    Path(ring_path).write_bytes(good)
    for mode in (0o604, 0o620, 0o640, 0o666):
        os.chmod(ring_path, mode)
        refuses("mode must be 0600")
    os.unlink(ring_path)
    os.symlink("/dev/null", ring_path)
    refuses("cannot be opened")
    os.unlink(ring_path)
    os.mkdir(ring_path)
    refuses("cannot be opened")
    os.rmdir(ring_path)
    ring_path = f"{ring_path}/none/ring"
    refuses("cannot be made")


def test_sizes_that_no_ring_has(ring_path: str) -> None:
    for lanes, rows in [(0, 64), (1025, 64), (1, 32), (1, 100), (1, 1 << 25)]:
        with pytest.raises(RuntimeError, match="needs 1 to 1024 lanes"):
            RingReader(ring_path, lanes, rows)
    with pytest.raises(RuntimeError, match="NUL"):
        RingReader(ring_path + "\0x")
    for stream in ("", "s" * 257, "\ud800"):
        with pytest.raises((RuntimeError, ValueError), match="stream"):
            RingWriter(ring_path, stream, 7)
    with pytest.raises(ValueError, match="epoch"):
        RingWriter(ring_path, "s", 2**63)


FIELDS = st.sampled_from([0, 8, 64, 72, 80, 128, 136, 144]) | st.integers(0, 511).map(lambda word: 8 * word)
WORDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 63, 64, 65, 127, 2**31, 2**32, 2**63, 2**64 - 1])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), FIELDS, WORDS), max_size=12),
    st.lists(st.tuples(st.integers(0, 64 * 64 - 4), st.integers(0, 2**32 - 1) | st.integers(0, 4200)), max_size=30),
    st.integers(0, 80),
)
def test_a_spoilt_ring_harms_nobody(words: list[tuple[bool, int, int]], rows: list[tuple[int, int]], head: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvg-ring-", dir="/dev/shm") as directory:
        ring_path = f"{directory}/ring"
        writer, other = (RingWriter(ring_path, stream, 7, lanes=2, rows=64) for stream in ("s", "other"))
        reader = RingReader(ring_path)
        for seq in range(8):
            writer.emit(record(3 * seq), 3 * seq)
        with open(ring_path, "r+b") as file:
            file.seek(offset(0, 64) + 64)
            file.write(struct.pack("=Q", head))
            for at, value in rows:
                file.seek(offset(0, 64) + HEADER + at // 4 * 4)
                file.write(struct.pack("=I", value))
            for in_header, at, value in words:
                if in_header and at < 64:
                    continue  # what the ring is was looked at when it was opened
                file.seek((0 if in_header else offset(0, 64)) + at)
                file.write(struct.pack("=Q", value))
        for _ in range(3):
            assert all(isinstance(got, Record) for got in reader.take())
        reader.wait(0)
        for lane in reader.lanes():
            assert lane.waiting <= 64
        # The other lane is whole, and this one heals by what its writer writes.
        other.emit(record(0), 0)
        assert [got.seq for got in reader.take() if got.stream == "other"] == [0]
        writer.emit(record(0), 1000)
        reader.take()
        writer.close()
        healed = RingWriter(ring_path, "healed", 7)
        assert healed.emit(record(0), 0)
        assert [got.stream for got in reader.take()][-1:] == ["healed"]
        reader.close()
        assert len(RingReader(ring_path).take()) == 0
        other.close()
        healed.close()


def test_a_writer_that_changes_its_rows_while_they_are_read(ring_path: str) -> None:
    script = """
import mmap, os, random, struct, sys
with open(sys.argv[1], "r+b") as file:
    data = mmap.mmap(file.fileno(), 0)
seed = random.Random(1)
print("ready", flush=True)
head = 0
while True:
    lane = 4096 + seed.randrange(2) * (4096 + 64 * 64)
    for _ in range(20):
        at = lane + 4096 + seed.randrange(64 * 64 // 4) * 4
        struct.pack_into("=I", data, at, seed.choice([0, 64, 80, 128, 1 << 20, 1 << 31, 0xffffffff, seed.getrandbits(32)]))
    head += seed.choice([0, 1, 2, 40, 64])
    struct.pack_into("=Q", data, lane + 64, seed.choice([head, head, head, seed.getrandbits(64)]))
"""  # noqa: E501
    reader = RingReader(ring_path, 2, 64)
    hostile = subprocess.Popen([sys.executable, "-c", script, ring_path], stdout=subprocess.PIPE, text=True)
    assert hostile.stdout is not None
    assert hostile.stdout.readline() == "ready\n"
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert all(isinstance(got, Record) for got in reader.take())
        reader.wait(0.001)
    hostile.kill()
    hostile.communicate(timeout=60)
    assert sum(lane.broken for lane in reader.lanes()) > 0


# From C


C_WRITER = r"""
#include "kvguard/ring.h"

int main(int argc, char **argv) {
    struct kvg_ring_writer writer;
    const char *wrong = argc == 2 ? kvg_ring_enter(&writer, argv[1], 2, 64, "agent", 5) : "usage";
    if (wrong != NULL) {
        fprintf(stderr, "%s\n", wrong);
        return 1;
    }
    for (uint64_t seq = 0; seq < 100; ++seq) {
        char row[256];
        struct kvg_record record;
        memset(&record, 0, sizeof record);
        memset(row, 0, sizeof row);
        const uint32_t counts[4] = {1, 0, 0, 0};
        const uint64_t run = kvg_run(seq, 2);
        record.version = KVG_RECORD_VERSION;
        record.kind = KVG_SCRUB;
        record.bytes = 64 + 8 + 16 + 8;
        record.time_ns = seq + 1;
        record.epoch = 7;
        record.seq = seq;
        record.stream_bytes = 5;
        memcpy(row, &record, sizeof record);
        memcpy(row + 64, "agent", 5);
        memcpy(row + 72, counts, sizeof counts);
        memcpy(row + 88, &run, sizeof run);
        if (!kvg_ring_put(&writer, row, record.bytes)) break;
    }
    printf("%llu %llu\n", (unsigned long long)writer.written, (unsigned long long)writer.dropped);
    kvg_ring_leave(&writer);
    return 0;
}
"""


@pytest.mark.parametrize(
    "compiler", [["cc", "-std=c11", "-x", "c"], ["c++", "-std=c++20", "-x", "c++"]], ids=["c", "c++"]
)
def test_an_agent_in_c(ring_path: str, tmp_path: Path, compiler: list[str]) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]}")
    program = tmp_path / "agent"
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2"]
    include = ROOT / "guard/native/include"
    subprocess.run(
        [*compiler, "-", *warnings, f"-I{include}", "-o", program], input=C_WRITER, text=True, check=True, timeout=60
    )
    done = subprocess.run([program, ring_path], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "32 1\n", "64 rows hold 32 records of two"
    reader = RingReader(ring_path)
    got = list(reader.take())
    assert [one.seq for one in got] == list(range(32))
    assert got[5].pages == PageSet.parse("5-6")  # type: ignore[attr-defined]
    (lane, _) = reader.lanes()
    assert (lane.pid, lane.stream, lane.written, lane.dropped, lane.broken) == (0, "agent", 32, 1, 0)


def test_the_lock_is_what_says_that_a_lane_is_taken(ring_path: str) -> None:
    """As documented, so that other programs can do likewise."""
    writer = RingWriter(ring_path, "s", 7, lanes=1, rows=64)
    with open(ring_path, "r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, offset(0, 64), 1, 0)
        with pytest.raises(OSError):
            fcntl.fcntl(file, 37, lock)
        writer.close()
        fcntl.fcntl(file, 37, lock)
        reader = RingReader(ring_path)
        assert reader.lanes()[0].pid == -1
        with pytest.raises(RuntimeError, match="no free lane"):
            RingWriter(ring_path, "s", 7)
