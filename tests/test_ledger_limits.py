"""What the ledger keeps at most, and what it says when that is not enough."""

from __future__ import annotations

from pathlib import Path

from guard_process import until
from ledger_rig import Rig, both_ledgers

from guard.config import load
from guard.findings import Kind
from guard.incidents.recorder import Recorder
from guard.native._core import BoardWriter, Rows
from guard.runtime import Runtime

pytestmark = both_ledgers


def test_a_stream_holds_back_only_so_much() -> None:
    rig = Rig(window_ms=1e9, max_held=10)
    rig.lose("d")
    for _ in range(10):
        rig.admit("d", "a1")
    assert rig.ledger.sizes["records_held"] == 10
    assert rig.found == []
    rig.admit("d", "a1")
    assert rig.ledger.sizes["records_held"] == 0
    assert rig.kinds() == {"stream-gap"}


def test_the_limit_on_what_is_held_counts_epochs_to_come() -> None:
    rig = Rig(window_ms=1e9, max_held=10)
    for epoch in range(2, 40):
        rig.restart("d", epoch=epoch)
    assert rig.ledger.sizes["records_held"] <= 10


def test_records_of_streams_beyond_the_limit_are_dropped_and_told_of_once() -> None:
    rig = Rig(pools="p d", max_streams=2)
    rig.left_behind("d", "a1", "0")
    for number in range(5):
        rig.alloc(f"d{number}", "b1", "0")
        rig.read(f"d{number}", "b1", "0")
    assert set(rig.ledger.streams) == {"p", "d"}
    assert rig.ledger.dropped == 10
    finding = rig.one(Kind.STREAM_GAP)
    assert (finding.request, finding.pool, finding.stream) == (None, None, "d0")
    assert "more than 2 streams" in finding.reason
    assert "max_streams" in finding.reason
    rig.alloc("d", "b1", "0")  # the streams that are followed go on
    rig.read("d", "b1", "0")
    rig.end()
    assert rig.one(Kind.FOREIGN_READ).stream == "d"
    assert rig.ledger.watermark("d0") == (-1, -1)


def test_requests_that_are_over_are_forgotten_in_turn() -> None:
    rig = Rig(max_ended=3)
    for number in range(10):
        rig.left_behind("d", f"a{number}", "0")
    assert [r.id for r in rig.retired] == [f"a{n}" for n in range(7)]
    assert set(rig.ledger.requests) == {"a7", "a8", "a9"}
    assert rig.ledger.sizes["requests_ended"] == 3
    assert rig.end() == []


def test_a_live_request_is_not_forgotten() -> None:
    rig = Rig(max_ended=1)
    rig.alloc("d", "b1", "5")
    for number in range(10):
        rig.left_behind("d", f"a{number}", "0")
    assert "b1" in rig.ledger.requests
    assert rig.ledger.sizes["requests_live"] == 1


def test_a_request_that_still_owns_pages_is_not_forgotten() -> None:
    rig = Rig(max_ended=1)
    rig.alloc("d", "b1", "5")
    rig.over("d", "b1", "aborted")
    for number in range(10):
        rig.left_behind("d", f"a{number}", "0")
    rig.free("d", "b1", "5")
    rig.left_behind("d", "a10", "0")
    assert rig.end() == []
    assert "b1" not in rig.ledger.requests
    assert rig.ledger.sizes["requests_live"] == 0


def test_pages_beyond_the_limit_are_not_kept() -> None:
    rig = Rig(pools="", max_pool_pages=100)
    rig.alloc("d", "a1", "0-999999")
    assert rig.ledger.sizes["pages"] == 100


def test_the_guards_counters_are_the_ledgers(tmp_path: Path) -> None:
    rig = Rig()
    for page in range(3):
        rig.lose("d")
        rig.alloc("d", "a1", str(page))
    for stream in ("d2", "d3"):
        rig.admit(stream, "a1")
    board = BoardWriter.create(tmp_path / "board")
    config = load(
        environ={}, settings=["ledger.max_streams=2", "ledger.reorder_window_ms=0", "ring.on=false", "journal.on=false"]
    )
    runtime = Runtime(config, board, Recorder(str(tmp_path / "incidents.db")))
    rows = Rows()
    for record in rig.log:
        rows.append(record)
    assert runtime.inbox.put(rows, 1)
    runtime.start()
    until(lambda: runtime.stats().gaps == 3)
    assert runtime.stats().dropped["streams"] == 2
    runtime.stop()
    board.close()


def test_a_receiver_whose_sender_died_before_its_begin_is_believed() -> None:
    rig = Rig(window_ms=200)
    rig.admit("d", "a1")
    rig.alloc("d", "a1", "0-1")
    rig.over("d", "a1", "aborted")
    rig.ended("d", "recv", "a1", "0-1", status="aborted")
    rig.free("d", "a1", "0-1")
    rig.advance(250)
    assert rig.kinds() == set()
    # Should the begin have been on its way all the same: it is over at the receiver.
    rig.prefilled("a1")
    rig.begin("a1", "0-1", "0-1")
    rig.advance(250)
    assert rig.kinds() == set()


def test_another_streams_word_gives_no_transfer_up() -> None:
    rig = Rig(window_ms=200, pools="p d u")
    rig.ended("u", "recv", "a1", "0-1", status="aborted")
    rig.advance(250)
    rig.handed_over("a1")
    rig.read("d", "a1", "0-1")
    assert rig.kinds() == set()
