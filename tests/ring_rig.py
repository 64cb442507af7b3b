"""What the ring's tests share, and, run as a program, a process that writes records into a ring:
``python ring_rig.py PATH STREAM COUNT LANES ROWS``.

COUNT 0 is until it is killed. It says ``ready`` once it has a lane, and starts when its standard input says anything.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from guard.native._core import RingWriter, Rows
from guard.records import PageSet, Read

ROOT = Path(__file__).parent.parent
EPOCH = 7
SIZES = [PageSet.parse("1"), PageSet.of(range(0, 40, 2)), PageSet.of(range(0, 400, 2))]
"""For records of 2, 5 and 28 rows or so: some wrap round the lane's end."""


class Start(Protocol):
    """Starts a writer that is ready."""

    def __call__(self, stream: str, count: int, lanes: int = ..., rows: int = ...) -> subprocess.Popen[str]: ...


def record(seq: int) -> Read:
    """The record at a place of each writer's stream; its token count is the place again."""
    return Read(request=f"request-{seq}", tenant="tenant", pages=SIZES[seq % 3], tokens=seq, time_ns=seq + 1)


def as_sent(stream: str, seq: int) -> Read:
    """The same record as it arrives."""
    return replace(record(seq), stream=stream, epoch=EPOCH, seq=seq)


def seqs(rows: Rows) -> dict[str, list[int]]:
    """The places of each stream's records, each of which is checked to be what its writer wrote."""
    found: dict[str, list[int]] = defaultdict(list)
    for got in rows:
        assert got == as_sent(got.stream, got.seq)
        found[got.stream].append(got.seq)
    return found


@contextlib.contextmanager
def writers(path: str) -> Iterator[Start]:
    """Starts writers; at the end they are killed if they still run."""
    processes = []

    def start(stream: str, count: int, lanes: int = 16, rows: int = 32768) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, path, stream, str(count), str(lanes), str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)


def go(process: subprocess.Popen[str]) -> None:
    """Lets a writer write."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def main() -> None:
    path, stream, count, lanes, rows = sys.argv[1:]
    writer = RingWriter(path, stream, EPOCH, int(lanes), int(rows))
    print("ready", flush=True)
    sys.stdin.readline()
    for seq in range(int(count)) if count != "0" else itertools.count():
        writer.emit(record(seq), seq)
    print(writer.written, writer.dropped, flush=True)


if __name__ == "__main__":
    main()
