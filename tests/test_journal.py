"""The journal: what was flushed is known to the next guard, whatever is done to the file."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guard.native._core import Journal, Restored

LIMIT = 1 << 20
HEAD = 8
"""Bytes of the magic."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lib" / "journal")


def reopened(path: str, limit: int = LIMIT) -> tuple[Restored, list[bytes]]:
    """What is in the file, once nobody has it."""
    _, before, incidents = Journal.open(path, limit)
    return before, incidents


def fill(journal: Journal) -> None:
    journal.pool("d-pool", "d", 16, 4, 1)
    journal.request("a1", "d", "tenant-a")
    journal.request("a1", "p", "tenant-a")
    journal.request("b1", "d", "tenant-b")
    journal.ended("a1", "p")
    journal.watermark("d", 7, 41, 1000)
    journal.watermark("p", 2, -1, 0)
    journal.incident("inc-1", b'{"id": "inc-1"}')
    journal.incident("inc-2", b'{"id": "inc-2"}')
    journal.settled("inc-1")


def test_what_was_flushed_is_known_to_the_next(path: str) -> None:
    journal, before, incidents = Journal.open(path, LIMIT)
    assert (before.streams, before.pools, before.requests, incidents) == ([], [], [], [])
    fill(journal)
    assert journal.flush()
    del journal
    before, incidents = reopened(path)
    assert before.streams == [("d", 7, 41, 1000, []), ("p", 2, -1, 0, [])]
    assert before.pools == [("d-pool", "d", 16, 4, 1)]
    assert before.requests == [
        ("a1", "d", "tenant-a", False),
        ("a1", "p", "tenant-a", True),
        ("b1", "d", "tenant-b", False),
    ]
    assert incidents == [b'{"id": "inc-2"}']
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700


def test_what_was_not_flushed_is_not(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    journal.request("a1", "d", "tenant-a")
    del journal
    assert reopened(path)[0].requests == []


def test_a_new_epoch_ends_what_was_on_the_stream(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    fill(journal)
    journal.epoch("d", 8)
    journal.request("c1", "d", "tenant-c")
    journal.watermark("d", 8, 3, 2000)
    journal.watermark("d", 8, 2, 1500)  # never back
    assert journal.requests == 2
    journal.flush()
    del journal
    before, _ = reopened(path)
    assert before.streams[0] == ("d", 8, 3, 2000, [7])
    assert before.requests == [("a1", "p", "tenant-a", True), ("c1", "d", "tenant-c", False)]
    assert before.pools == [("d-pool", "d", 16, 4, 1)]


def test_past_epochs_are_bounded(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    for epoch in range(100):
        journal.epoch("d", epoch)
    journal.flush()
    del journal
    assert reopened(path)[0].streams == [("d", 99, -1, 0, list(range(35, 99)))]


def test_a_request_that_comes_again_is_live_again(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    journal.request("a1", "d", "tenant-a")
    journal.ended("a1", "d")
    journal.request("a1", "d", "tenant-b")
    journal.request("b1", "d", "tenant-b")
    journal.retired("b1")
    journal.flush()
    del journal
    assert reopened(path)[0].requests == [("a1", "d", "tenant-b", False)]


def test_the_file_is_written_anew_when_it_is_too_long(path: str) -> None:
    journal, *_ = Journal.open(path, 1 << 16)
    fill(journal)
    for n in range(20_000):
        journal.request(f"r{n}", "d", "tenant-a")
        journal.retired(f"r{n}")
        if n % 100 == 0:
            assert journal.flush()
            assert journal.bytes <= 1 << 16
    assert journal.flush()
    assert journal.rewrites > 3
    assert not os.path.exists(f"{path}.new")
    assert os.path.getsize(path) == journal.bytes
    del journal
    before, incidents = reopened(path)
    assert [r[0] for r in before.requests] == ["a1", "a1", "b1"]
    assert len(incidents) == 1


def test_more_than_the_limit_that_is_live_is_not_written_anew_again_and_again(path: str) -> None:
    journal, *_ = Journal.open(path, 1 << 12)
    for n in range(3000):
        journal.request(f"request-{n}", "d", "tenant-a")
        journal.flush()
    assert journal.rewrites < 12
    del journal
    assert len(reopened(path)[0].requests) == 3000


def test_a_request_outlives_eight_guards_at_most(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    journal.request("stuck", "d", "tenant-a")
    journal.flush()
    del journal
    known = [len(reopened(path)[0].requests) for _ in range(10)]
    assert known == [1] * 8 + [0, 0]


@pytest.mark.parametrize("tail", [b"\0", b"\x10\0\0\0", b"\x10\0\0\0abcd", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0hello"])
def test_a_torn_end_is_cut_off(path: str, tail: bytes) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    fill(journal)
    journal.flush()
    del journal
    with open(path, "ab") as file:
        file.write(tail)
    journal, before, _ = Journal.open(path, LIMIT)
    assert journal.cut_off == len(tail)
    assert len(before.requests) == 3
    journal.request("c1", "d", "tenant-c")
    journal.flush()
    del journal
    assert len(reopened(path)[0].requests) == 4


def test_wherever_it_is_cut_what_stands_before_is_known(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    ends = [journal.bytes]
    for n in range(5):
        journal.request(f"r{n}", "d", "tenant-a")
        journal.flush()
        ends.append(journal.bytes)
    del journal
    whole = Path(path).read_bytes()
    for cut in range(len(whole) + 1):
        Path(path).write_bytes(whole[:cut])
        before, _ = reopened(path)
        assert len(before.requests) == max(0, sum(end <= cut for end in ends) - 1)


def test_another_programs_file_is_left_alone(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(b"something else altogether")
    with pytest.raises(RuntimeError, match=r"journal .*: is not this guard's journal: move it away, or give another"):
        Journal.open(path, LIMIT)
    assert Path(path).read_bytes() == b"something else altogether"


def test_a_second_guard_is_refused(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    fill(journal)
    with pytest.raises(RuntimeError, match="another guard has it"):
        Journal.open(path, LIMIT)
    assert journal.flush()


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"its directory cannot be made|cannot be opened"):
        Journal.open(str(tmp_path / "file" / "journal"), LIMIT)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        Journal.open(str(tmp_path), LIMIT)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 20))
def test_a_broken_file_never_harms(tmp_path: Path, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    path = str(tmp_path / f"j{seed}")
    journal, *_ = Journal.open(path, LIMIT)
    for n in range(5):
        fill(journal)
        journal.request(f"r{n}", "d", "tenant-a")
        journal.flush()
    del journal
    content = bytearray(Path(path).read_bytes())
    for _ in range(changes):
        content[rng.randrange(HEAD, len(content))] = rng.randrange(256)
    Path(path).write_bytes(content)
    before, _ = reopened(path)
    assert len(before.requests) <= 8
    os.unlink(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(payloads=st.lists(st.binary(max_size=60), max_size=4))
def test_what_passes_the_check_and_says_nonsense_never_harms(tmp_path: Path, payloads: list[bytes]) -> None:
    path = tmp_path / "nonsense"
    path.write_bytes(b"kvgjrnl1" + b"".join(map(frame, payloads)))
    reopened(str(path))
    path.unlink()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x05\x01\x01\x01\x01",  # a watermark of a stream that was never named
        b"\x01\x01d\x05\x00" + b"\xff" * 9 + b"\x7f\x01\x01",  # a number of more than 64 bits
        b"\x01\x01d\x05\x00" + b"\xff" * 9 + b"\x01\x01\x01",  # an epoch of 2**64 - 1
        b"\x01\xff\xff\xff\xff\x0fd",  # a name of 4 GiB
        b"\x01\x02\xff\xfe",  # a name that is not UTF-8
        b"\x01\x00",  # no name
        b"\x01\x01d\x02\x01x\x00\x01\x01\x09",  # a role that there is not
        b"\x63",
    ],
)
def test_nonsense_ends_what_is_believed(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"kvgjrnl1" + frame(b"\x01\x01s\x05\x00\x03\x05\x09") + frame(payload) + frame(b"\x01\x01z"))
    before, incidents = reopened(str(path))
    assert before.streams == [("s", 3, 4, 9, [])]
    assert (before.pools, before.requests, incidents) == ([], [], [])


def frame(payload: bytes) -> bytes:
    length = len(payload).to_bytes(4, sys.byteorder)
    return length + crc32c(length + payload).to_bytes(4, sys.byteorder) + payload


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_check_is_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


FULL = """
import resource, signal, sys
from guard.native._core import Journal
path = sys.argv[1]
journal, *_ = Journal.open(path, 1 << 20)
journal.request("before", "d", "tenant-a")
assert journal.flush()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that may grow no more is a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (journal.bytes + 50, resource.RLIM_INFINITY))
for n in range(int(sys.argv[2])):
    journal.request(f"while-full-{n}", "d", "tenant-a")
    if n % 1000 == 0:
        journal.flush()
assert not journal.flush()
assert journal.failures
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
import time
deadline = time.monotonic() + 60
while not journal.flush():
    assert time.monotonic() < deadline
    time.sleep(0.05)
print(journal.requests)
"""


@pytest.mark.parametrize("requests", [5, 400_000])
def test_what_a_full_disk_does_not_take_is_tried_again(path: str, requests: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, path, str(requests)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    before, _ = reopened(path, 1 << 20)
    assert len(before.requests) == requests + 1


def test_incidents_that_wait_are_bounded(path: str) -> None:
    journal, *_ = Journal.open(path, LIMIT)
    text = b"x" * (1 << 20)
    for n in range(40):
        journal.incident(f"inc-{n}", text)
    assert journal.flush()
    assert journal.unsettled == 31
    assert journal.dropped == 9


def test_streams_are_bounded(path: str) -> None:
    journal, *_ = Journal.open(path, 64 << 20)
    for n in range(70_000):
        journal.watermark(f"s{n}", 1, 1, 1)
    assert journal.dropped == 70_000 - 65_536
    assert journal.flush()
    del journal
    assert len(reopened(path)[0].streams) == 65_536
