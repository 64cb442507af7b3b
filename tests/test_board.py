from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from guard.act.board import BoardError, BoardReader, Verdict, layout
from guard.native._core import BoardWriter


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kvguard" / "board")


def test_verdicts_and_incidents(path: str) -> None:
    writer = BoardWriter.create(path)
    reader = BoardReader.open(path)
    assert reader.verdict("r1") is Verdict.ALLOW
    assert reader.incident("r1") == ""
    writer.set_verdict("r1", Verdict.KILL, "inc-abcdefghij")
    writer.set_verdict("r2", Verdict.QUARANTINE)
    assert (reader.verdict("r1"), reader.incident("r1")) == (Verdict.KILL, "inc-abcdefghij")
    assert (reader.verdict("r2"), reader.incident("r2")) == (Verdict.QUARANTINE, "")
    writer.clear("r1")
    assert reader.verdict("r1") is Verdict.ALLOW
    assert reader.verdict("r2") is Verdict.QUARANTINE


def test_a_verdict_is_never_weakened(path: str) -> None:
    writer = BoardWriter.create(path)
    reader = BoardReader.open(path)
    writer.set_verdict("r1", Verdict.KILL, "inc-1")
    writer.set_verdict("r1", Verdict.QUARANTINE, "inc-2")
    writer.set_verdict("r1", Verdict.ALLOW)
    assert (reader.verdict("r1"), reader.incident("r1")) == (Verdict.KILL, "inc-1")


def test_watermarks(path: str) -> None:
    writer = BoardWriter.create(path)
    reader = BoardReader.open(path)
    assert reader.watermark("decode-0", 7) == -1
    writer.advance("decode-0", 7, -1)
    assert reader.watermark("decode-0", 7) == -1
    writer.advance("decode-0", 7, 41)
    assert reader.watermark("decode-0", 7) == 41
    assert reader.watermark("decode-0", 8) == -1, "an epoch that nothing is known of"
    writer.advance("decode-0", 1_790_000_000_000, 2**62)
    assert reader.watermark("decode-0", 1_790_000_000_000) == 2**62
    assert reader.watermark("decode-0", 7) == -1
    writer.forget_stream("decode-0")
    assert reader.watermark("decode-0", 1_790_000_000_000) == -1


def test_alive_follows_the_heartbeat(path: str) -> None:
    writer = BoardWriter.create(path)
    reader = BoardReader.open(path)
    writer.heartbeat(10_000_000_000)
    assert reader.alive(10_900_000_000)
    assert not reader.alive(11_100_000_000)
    assert reader.alive(11_100_000_000, max_age_s=2)
    assert not reader.alive(1_000_000_000), "a heartbeat of before the machine was started anew"
    writer.heartbeat()
    assert reader.alive()


def test_a_full_board_is_not_alive_until_the_verdict_has_its_row(path: str) -> None:
    writer = BoardWriter.create(path, requests=8, streams=8)
    reader = BoardReader.open(path)
    for n in range(7):
        writer.set_verdict(f"r{n}", Verdict.KILL, f"inc-{n}")
    assert reader.alive()
    writer.set_verdict("r7", Verdict.QUARANTINE, "inc-6")
    writer.set_verdict("r7", Verdict.KILL, "inc-7")
    assert writer.saturated == 1
    assert not reader.alive()
    writer.set_verdict("r0", Verdict.KILL, "inc-0")  # a row that is there can still be written
    writer.clear("r3")
    assert writer.saturated == 0
    assert reader.alive()
    assert (reader.verdict("r7"), reader.incident("r7")) == (Verdict.KILL, "inc-7")
    assert reader.verdict("r3") is Verdict.ALLOW
    assert reader.verdict("never heard of") is Verdict.ALLOW


def test_too_many_streams_are_counted(path: str) -> None:
    writer = BoardWriter.create(path, requests=8, streams=8)
    reader = BoardReader.open(path)
    for n in range(9):
        writer.advance(f"s{n}", 1, n)
    assert writer.streams_without_row == 2
    assert [reader.watermark(f"s{n}", 1) for n in range(9)] == [0, 1, 2, 3, 4, 5, 6, -1, -1]


def test_rows_are_found_through_any_order_of_setting_and_clearing(path: str) -> None:
    """Against a dict, on a small board, where every search runs into others' rows and cleared ones."""
    import random

    writer = BoardWriter.create(path, requests=16, streams=8)
    reader = BoardReader.open(path)
    truth: dict[str, Verdict] = {}
    choose = random.Random(7)
    for _ in range(5000):
        request = f"r{choose.randrange(40)}"
        if choose.random() < 0.5 and len(truth) < 14:
            verdict = choose.choice([Verdict.QUARANTINE, Verdict.KILL])
            writer.set_verdict(request, verdict)
            truth[request] = max(verdict, truth.get(request, Verdict.ALLOW))
        else:
            writer.clear(request)
            truth.pop(request, None)
        assert all(reader.verdict(f"r{n}") is truth.get(f"r{n}", Verdict.ALLOW) for n in range(40))
    for request in list(truth):
        writer.clear(request)
    words = reader._open[0]
    assert all(words[layout.HEADER_WORDS + row * 8 + 3] == 0 for row in range(16)), "all rows are never-used again"


def test_a_restarted_guard_takes_the_path_over(path: str) -> None:
    first = BoardWriter.create(path)
    first.set_verdict("r1", Verdict.KILL, "inc-1")
    reader = BoardReader.open(path)
    second = BoardWriter.create(path)  # the first was killed: it never closed its board
    assert reader.closed
    second.set_verdict("r2", Verdict.KILL, "inc-2")
    assert reader.verdict("r2") is Verdict.KILL, "the reader found the new board by itself"
    assert (reader.verdict("r1"), reader.incident("r1")) == (Verdict.KILL, "inc-1"), "carried over"
    assert not reader.closed
    assert second.expire(time.time_ns()) == 2
    assert reader.verdict("r1") is Verdict.ALLOW
    first.heartbeat()  # the old mapping is still there, whoever holds it


def test_a_closed_board_keeps_its_verdicts_and_is_not_alive(path: str) -> None:
    writer = BoardWriter.create(path)
    writer.set_verdict("r1", Verdict.KILL)
    reader = BoardReader.open(path)
    writer.close()
    writer.close()
    assert not reader.alive()
    assert reader.verdict("r1") is Verdict.KILL
    assert reader.refresh() is False
    BoardWriter.create(path)
    assert reader.refresh() is True
    assert reader.alive()


def test_another_process_reads_it(path: str) -> None:
    writer = BoardWriter.create(path)
    writer.set_verdict("r\u00e9", Verdict.KILL, "inc-1")
    writer.advance("decode-0", 3, 12)
    code = (
        "import sys; from guard.act.board import BoardReader; r = BoardReader.open(sys.argv[1]);"
        "q = 'r\u00e9'; print(int(r.verdict(q)), r.incident(q), r.watermark('decode-0', 3), r.alive(None, 9))"
    )
    out = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["2", "inc-1", "12", "True"]


def test_a_reader_never_sees_half_a_row(path: str) -> None:
    """The writer sets rows whose parts belong together; every read in another process must give a pair that does."""
    writer = BoardWriter.create(path, requests=8, streams=8)
    code = (
        "import sys; from guard.act.board import BoardReader; r = BoardReader.open(sys.argv[1]);"
        "seen = {r._request('r1') for _ in range(100_000)};"
        "print(*sorted(f'{int(verdict)}{incident}' for verdict, incident in seen))"
    )
    reader = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    while reader.poll() is None:
        writer.set_verdict("r1", Verdict.QUARANTINE, "q" * 24)
        writer.set_verdict("r1", Verdict.KILL, "k" * 24)
        writer.clear("r1")
    assert reader.stdout is not None
    with reader.stdout:
        seen = reader.stdout.read().split()
    assert reader.returncode == 0
    assert seen
    assert set(seen) <= {"0", "1" + "q" * 24, "2" + "k" * 24}


def poke(path: str, request: str, word: int, change: Callable[[int], int]) -> None:
    """Changes a word of the request's row in the file, behind the writer's back."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped).cast("Q") as words:
        key = layout.key_of(request)
        (base,) = (
            base
            for base in range(layout.HEADER_WORDS, len(words), layout.ROW_WORDS)
            if (words[base + 1], words[base + 2]) == key
        )
        words[base + word] = change(words[base + word])


def test_a_row_that_a_dead_guard_left_half_written_is_taken_as_it_is(path: str) -> None:
    writer = BoardWriter.create(path)
    writer.set_verdict("r1", Verdict.KILL, "inc-1")
    poke(path, "r1", 0, lambda version: version | 1)
    assert BoardReader.open(path).verdict("r1") is Verdict.KILL


def test_an_unknown_verdict_kills(path: str) -> None:
    writer = BoardWriter.create(path)
    writer.set_verdict("r1", Verdict.QUARANTINE)
    poke(path, "r1", 3, lambda _state: 11)
    assert BoardReader.open(path).verdict("r1") is Verdict.KILL


def test_ids_of_every_length_are_found(path: str) -> None:
    """The reader's digest is Python's own; blocks of BLAKE2b have 128 bytes."""
    writer = BoardWriter.create(path)
    reader = BoardReader.open(path)
    ids = ["é" * 300, *("x" * n for n in (*range(1, 20), 63, 64, 127, 128, 129, 255, 256, 257, 384, 1024))]
    for name in ids:
        writer.set_verdict(name, Verdict.KILL, "inc-1")
    assert all(reader.verdict(name) is Verdict.KILL for name in ids)
    assert reader.verdict("x" * 20) is Verdict.ALLOW


def test_a_closed_writer_says_so(path: str) -> None:
    writer = BoardWriter.create(path)
    writer.close()
    for call in (
        writer.heartbeat,
        lambda: writer.set_verdict("r", Verdict.KILL),
        lambda: writer.clear("r"),
        lambda: writer.advance("s", 1, 1),
        lambda: writer.forget_stream("s"),
        lambda: writer.expire(1),
    ):
        with pytest.raises(BoardError, match="is closed"):
            call()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"KVGBOARD" + bytes(2000), "too short"),
        (bytes(8192), "does not begin with KVGBOARD"),
        (layout.MAGIC.to_bytes(8, sys.byteorder) + (2).to_bytes(8, sys.byteorder) + bytes(8176), "version 2"),
        (
            layout.MAGIC.to_bytes(8, sys.byteorder)
            + (1).to_bytes(8, sys.byteorder)
            + (1 << 40).to_bytes(8, sys.byteorder) * 2
            + bytes(8160),
            "too short for 1099511627776",
        ),
        (
            layout.MAGIC.to_bytes(8, sys.byteorder) + (1).to_bytes(8, sys.byteorder) + bytes(8176),
            "powers of two",
        ),
        (bytes(8191), "cannot be mapped"),
    ],
)
def test_what_is_no_board_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "board"
    path.write_bytes(content)
    with pytest.raises(BoardError, match=message) as error:
        BoardReader.open(path)
    assert str(path) in str(error.value)
    BoardWriter.create(path).close()  # and a guard puts a good one in its place
    BoardReader.open(path)


def test_absent_and_unsafe_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BoardError, match="is guardd running"):
        BoardReader.open(tmp_path / "none")
    path = tmp_path / "board"
    BoardWriter.create(path)
    path.chmod(0o666)
    with pytest.raises(BoardError, match="others than its owner"):
        BoardReader.open(path)
    with pytest.raises(BoardError, match="not a regular file"):
        BoardReader.open(tmp_path)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(BoardError, match="mode 0755"):
        BoardWriter.create(open_to_all / "board")
    (tmp_path / "file").write_text("")
    with pytest.raises(BoardError, match="cannot be made"):
        BoardWriter.create(tmp_path / "file" / "board")


def test_the_file_can_be_read_by_all_and_written_by_its_owner(path: str) -> None:
    BoardWriter.create(path)
    assert os.stat(path).st_mode & 0o777 == 0o644


def test_bad_arguments(path: str) -> None:
    with pytest.raises(ValueError, match="requests is 100"):
        BoardWriter.create(path, requests=100)
    writer = BoardWriter.create(path)
    with pytest.raises(ValueError, match="longer than 24"):
        writer.set_verdict("r", Verdict.KILL, "i" * 25)
    with pytest.raises(ValueError, match="not ASCII"):
        writer.set_verdict("r", Verdict.KILL, "\u00e9")
    with pytest.raises(ValueError, match="no such verdict"):
        writer.set_verdict("r", 3)


def test_it_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import guard.act.board;"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["guard"]
