from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import GuardConfig
from engine.gate import Gate, Refuse, Release
from guard.act.board import Verdict
from guard.native._core import BoardWriter

STREAM, EPOCH = "decode-0", 7


class Guarded:
    """A gate on a board that the test writes, and a clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.writer = self.new_board()

    def new_board(self) -> BoardWriter:
        writer = BoardWriter.create(self.path, requests=64, streams=8)
        writer.heartbeat(time.monotonic_ns())
        return writer

    def gate(self, gate: str = "sync", **fields: Any) -> Gate:
        config = GuardConfig(board=str(self.path), gate=gate, **fields)  # type: ignore[arg-type]
        return Gate(config, STREAM, EPOCH, clock=lambda: self.now)

    def judge(self, seq: int) -> None:
        self.writer.advance(STREAM, EPOCH, seq)
        self.writer.heartbeat(time.monotonic_ns())


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path / "board")
    yield guarded
    guarded.writer.close()


@pytest.mark.parametrize("config", [GuardConfig(), GuardConfig(gate="off", board="/nonexistent/board")])
def test_switched_off_everything_leaves_at_once(config: GuardConfig) -> None:
    gate = Gate(config, STREAM, EPOCH)
    gate.put("r", [1], bar=99)
    gate.put("r", [2, 3], finish="stop")
    gate.put("s", [])
    assert gate.poll() == [Release("r", [1, 2, 3], "stop"), Release("s", [], None)]
    assert gate.poll() == []
    assert gate.verdict("r") is Verdict.ALLOW


def test_a_token_waits_for_its_bar_and_those_behind_it_wait_too(guarded: Guarded) -> None:
    gate = guarded.gate()
    gate.put("r", [1], bar=4)
    gate.put("r", [2])
    gate.put("r", [3], bar=9)
    gate.put("r", [4], finish="length")
    assert gate.poll() == []
    guarded.judge(3)
    assert gate.poll() == []
    guarded.judge(4)
    assert gate.poll() == [Release("r", [1, 2], None)]
    guarded.judge(9)
    assert gate.poll() == [Release("r", [3, 4], "length")]
    assert gate.waits == 2
    assert gate.timeouts == 0


def test_one_that_waits_holds_up_nobody_else(guarded: Guarded) -> None:
    gate = guarded.gate()
    guarded.judge(5)
    gate.put("slow", [1], bar=50)
    gate.put("quick", [2], bar=5)
    gate.put("free", [3])
    assert gate.poll() == [Release("quick", [2], None), Release("free", [3], None)]
    guarded.judge(50)
    assert gate.poll() == [Release("slow", [1], None)]


def test_async_does_not_wait(guarded: Guarded) -> None:
    gate = guarded.gate("async")
    gate.put("r", [1], bar=50)
    assert gate.poll() == [Release("r", [1], None)]


def test_the_watermark_of_another_epoch_or_stream_does_not_count(guarded: Guarded) -> None:
    gate = guarded.gate()
    guarded.writer.advance(STREAM, EPOCH - 1, 100)
    guarded.writer.advance("decode-1", EPOCH, 100)
    gate.put("r", [1], bar=0)
    assert gate.poll() == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_request_gives_no_further_token(guarded: Guarded, mode: str) -> None:
    gate = guarded.gate(mode)
    guarded.judge(5)
    guarded.writer.set_verdict("bad", Verdict.KILL, "inc-1")
    guarded.writer.set_verdict("stained", Verdict.QUARANTINE, "inc-2")
    gate.put("bad", [1], bar=2)
    gate.put("stained", [3])
    gate.put("good", [2])
    assert gate.poll() == [
        Refuse("bad", "kv_guard_killed", "inc-1"),
        Release("stained", [3], None),
        Release("good", [2], None),
    ]
    assert gate.poll() == []
    assert gate.verdict("stained") is Verdict.QUARANTINE


def test_a_kill_ends_the_wait(guarded: Guarded) -> None:
    gate = guarded.gate()
    gate.put("r", [1], bar=50)
    assert gate.poll() == []
    guarded.writer.set_verdict("r", Verdict.KILL)
    assert gate.poll() == [Refuse("r", "kv_guard_killed", None)]


@pytest.mark.parametrize(
    ("on_timeout", "decision"),
    [("open", Release("r", [1, 2], None)), ("closed", Refuse("r", "kv_guard_unavailable"))],
)
def test_a_wait_that_runs_out(guarded: Guarded, on_timeout: str, decision: Release | Refuse) -> None:
    gate = guarded.gate(wait_ms=200, on_timeout=on_timeout)
    gate.put("r", [1], bar=50)
    gate.put("r", [2])
    assert gate.poll() == []
    guarded.now = 0.19
    assert gate.poll() == []
    guarded.now = 0.21
    assert gate.poll() == [decision]
    assert gate.timeouts == 1
    assert gate.poll() == []


def test_the_next_bar_has_a_wait_of_its_own(guarded: Guarded) -> None:
    gate = guarded.gate(wait_ms=200, on_timeout="closed")
    gate.put("r", [1], bar=1)
    gate.put("r", [2], bar=50)
    assert gate.poll() == []
    guarded.now = 0.15
    guarded.judge(1)
    assert gate.poll() == [Release("r", [1], None)]
    guarded.now = 0.3
    assert gate.poll() == []
    guarded.now = 0.36
    assert gate.poll() == [Refuse("r", "kv_guard_unavailable")]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("gone", ["never", "stopped"])
@pytest.mark.parametrize(
    ("on_timeout", "decision"),
    [("open", Release("r", [1], None)), ("closed", Refuse("r", "kv_guard_unavailable"))],
)
def test_without_a_guard_nobody_waits(
    guarded: Guarded, mode: str, gone: str, on_timeout: str, decision: Release | Refuse
) -> None:
    if gone == "never":
        guarded.path.unlink()
    else:
        guarded.writer.close()
    gate = guarded.gate(mode, on_timeout=on_timeout)
    gate.put("r", [1], bar=1)
    assert gate.poll() == [decision]
    assert gate.timeouts == 1


def test_a_guard_that_comes_later_is_found(guarded: Guarded) -> None:
    guarded.path.unlink()
    gate = guarded.gate(on_timeout="open")
    gate.put("r", [1], bar=1)
    assert gate.poll() == [Release("r", [1], None)]
    guarded.writer = guarded.new_board()
    guarded.now = 0.2
    gate.put("r", [2], bar=1)
    assert gate.poll() == []
    guarded.judge(1)
    assert gate.poll() == [Release("r", [2], None)]


def test_what_waits_of_a_request_that_is_over_is_dropped(guarded: Guarded) -> None:
    gate = guarded.gate()
    gate.put("r", [1], bar=1)
    gate.drop("r")
    gate.drop("r")
    guarded.judge(1)
    assert gate.poll() == []
    gate.close()


def test_patience_is_short_at_first_and_grows_while_nothing_leaves(guarded: Guarded) -> None:
    gate = guarded.gate()
    assert gate.patience_ms() == 100.0
    gate.put("r", [1], bar=1)
    waits = [gate.patience_ms() for _ in range(8)]
    assert waits == sorted(waits)
    assert waits[0] <= 0.1
    assert waits[-1] == 1.0
    gate.drop("r")
    assert gate.patience_ms() == 100.0
