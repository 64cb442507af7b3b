from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport import sender as sender_module
from engine.transport.link import Batch, Fate, Kind, Link, Receiver, TransferError, listen
from engine.transport.sender import Sender, Transfer
from guard.records import TransferEnd, TransferStatus
from hooks.emit import NULL

PAGE_BYTES = 4096
DIGESTER = PageDigester(bytes(range(32)))
NONCE = bytes(range(16))


def segment(pages: int) -> Segment:
    path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}")
    return Segment.create(path, pages, PAGE_BYTES)


@pytest.fixture
def pool() -> Iterator[Segment]:
    made = segment(8)
    yield made
    made.unlink()


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> Kind:
    which: Kind = request.param
    return which


@pytest.fixture
def receiver(kind: Kind, pool: Segment) -> Iterator[Receiver]:
    receiver = listen(kind, pool, DIGESTER)
    yield receiver
    receiver.close()


class Sending:
    """A sender over a source pool, and what came of its transfers."""

    def __init__(self, kind: Kind, patience_s: float = 60.0, threads: int = 4) -> None:
        self.source = segment(4)
        self.source.unlink()
        self.source.data[:] = torch.arange(1, 5, dtype=torch.uint8)[:, None]
        self.woken = threading.Semaphore(0)
        self.sender = Sender(
            kind, self.source, 4, DIGESTER, NULL, digests=True, wake=self.woken.release, patience_s=patience_s,
            threads=threads,
        )  # fmt: skip

    def run(self, transfer: Transfer) -> Transfer:
        self.sender.start(transfer)
        assert self.woken.acquire(timeout=20)
        return self.sender.ended.popleft()


@pytest.fixture
def send() -> Iterator[Callable[..., Sending]]:
    made: list[Sending] = []

    def start(kind: Kind, **how: float) -> Sending:
        made.append(Sending(kind, **how))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for sending in made:
        sending.sender.close()


def transfer(address: str) -> Transfer:
    return Transfer(
        id="x", grant="x", request="r", tenant="t", context=None, source=[3, 1], destination=[0, 6],
        generations=[1, 2], nonce=NONCE,
        tags=np.array([[1, 1, 1], [1, 1, 2]]), first=0, tokens=7, pool="decode-0", address=address,
    )  # fmt: skip


def test_a_transfer_copies_and_digests_what_it_copies(
    kind: Kind, receiver: Receiver, pool: Segment, send: Callable[..., Sending]
) -> None:
    done = send(kind).run(transfer(receiver.register("p/1", "x", [0, 6], [1, 2])))
    assert (done.status, done.begun, done.error) == (TransferStatus.OK, True, "")
    assert pool.data[[0, 6], 0].tolist() == [4, 2]
    assert pool.tags[[0, 6], 2].tolist() == [1, 2]
    assert done.digests == DIGESTER.pages(pool.data, "t", "r", [0, 6], generations=[1, 2], nonce=NONCE)


def test_a_transfer_that_was_cancelled_in_time_never_begins(
    kind: Kind, receiver: Receiver, pool: Segment, send: Callable[..., Sending]
) -> None:
    cancelled = transfer(receiver.address)
    cancelled.cancel()
    done = send(kind).run(cancelled)
    assert (done.status, done.begun) == (TransferStatus.ABORTED, False)
    assert not pool.data.any()


def test_a_transfer_to_nobody_fails_and_says_why_and_the_next_one_is_fine(
    kind: Kind, receiver: Receiver, send: Callable[..., Sending]
) -> None:
    sending = send(kind)
    done = sending.run(transfer("tcp:127.0.0.1:1"))
    assert done.status is TransferStatus.FAILED
    assert "127.0.0.1:1" in done.error
    address = receiver.register("p/1", "x", [0, 6], [1, 2])
    assert sending.run(transfer(address)).status is TransferStatus.OK


def test_a_link_to_a_worker_that_died_is_made_anew(
    kind: Kind, receiver: Receiver, send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Link] = []
    connect = sender_module.connect

    def count(*arguments: object) -> Link:
        made.append(connect(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(sender_module, "connect", count)
    address = receiver.register("p/1", "x", [0, 6], [1, 2])
    sending = send(kind)
    for _ in range(3):
        assert sending.run(transfer(address)).status is TransferStatus.OK
    assert len(made) == 1
    sending.sender.forget(address)
    assert sending.run(transfer(address)).status is TransferStatus.OK
    assert len(made) == 2


# Ends that only the transport can tell


class StuckLink:
    """A wire that says nothing, whatever it is asked, until the test lets it."""

    def __init__(self) -> None:
        self.posted = threading.Event()
        self.aborted = threading.Event()
        self.over = threading.Event()
        self.error = ""
        self.closed = False

    def post(self, batch: Batch) -> None:
        self.posted.set()

    def poll(self, wait_s: float) -> Fate:
        if not self.over.wait(0.001):
            return Fate.MOVING
        self.error = "it broke"
        return Fate.FAILED

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> StuckLink:
    link = StuckLink()
    monkeypatch.setattr(sender_module, "connect", lambda *_: link)
    return link


def test_a_time_that_is_over_ends_no_transfer(stuck: StuckLink, send: Callable[..., Sending]) -> None:
    sending = send("tcp", patience_s=0.01)
    sending.sender.start(transfer("tcp:nowhere"))
    assert sending.woken.acquire(timeout=20)
    [late] = sending.sender.late
    assert late.overdue
    assert stuck.aborted.wait(20)
    assert not sending.sender.ended, "an abort is a wish, and so is a clock"
    assert not stuck.closed
    stuck.over.set()
    assert sending.woken.acquire(timeout=20)
    done = sending.sender.ended.popleft()
    assert (done.status, done.error) == (TransferStatus.FAILED, "took too long")
    assert stuck.closed


def test_nor_does_the_other_sides_death(stuck: StuckLink, send: Callable[..., Sending]) -> None:
    sending = send("tcp")
    sending.sender.start(transfer("tcp:nowhere"))
    assert stuck.posted.wait(20)
    sending.sender.forget("tcp:nowhere")
    assert stuck.aborted.wait(20)
    assert not sending.sender.ended
    stuck.over.set()
    assert sending.woken.acquire(timeout=20)
    assert sending.sender.ended.popleft().error == "it broke"
    assert not sending.sender.late


def test_a_cancelled_transfer_waits_for_what_is_under_way(stuck: StuckLink, send: Callable[..., Sending]) -> None:
    sending = send("tcp")
    cancelled = transfer("tcp:nowhere")
    sending.sender.start(cancelled)
    assert stuck.posted.wait(20)
    cancelled.cancel()
    assert not sending.woken.acquire(timeout=0.05), "it is not over"
    assert not stuck.aborted.is_set()
    stuck.over.set()
    assert sending.woken.acquire(timeout=20)
    assert sending.sender.ended


def test_a_long_transfer_goes_in_batches(
    kind: Kind, receiver: Receiver, pool: Segment, send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[int] = []
    connect = sender_module.connect

    class Counting:
        def __init__(self, link: Link) -> None:
            self._link = link
            self.poll, self.abort, self.close, self.error = link.poll, link.abort, link.close, ""

        def post(self, batch: Batch) -> None:
            posted.append(len(batch.source))
            self._link.post(batch)

    monkeypatch.setattr(sender_module, "connect", lambda *arguments: Counting(connect(*arguments)))
    monkeypatch.setattr(sender_module, "_BATCH_PAGES", 3)
    sending = send(kind)
    long = transfer(receiver.register("p/1", "x", range(8), [1] * 8))
    long.generations = [1] * 8
    long.source, long.destination, long.tags = [0, 1, 2, 3] * 2, list(range(8)), np.array([[1, 1, 1]] * 8)
    assert sending.run(long).status is TransferStatus.OK
    assert posted == [3, 3, 2]
    assert pool.data[:, 0].tolist() == [1, 2, 3, 4] * 2


def test_a_connection_that_cannot_be_made_fails_the_transfer(
    send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Link:
        raise TransferError("nobody is there")

    monkeypatch.setattr(sender_module, "connect", refuse)
    done = send("tcp").run(transfer("tcp:x"))
    assert (done.status, done.error) == (TransferStatus.FAILED, "nobody is there")


# Bugs of ours


class BuggyLink:
    """Raises what no link should, in one of its verbs, and else says that all is well."""

    error = ""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self.closed = False

    def post(self, batch: Batch) -> None:
        self._reach("post")

    def poll(self, wait_s: float) -> Fate:
        self._reach("poll")
        return Fate.DONE

    def abort(self) -> None:
        raise AssertionError("nobody asked for it")

    def close(self) -> None:
        self.closed = True
        self._reach("close")

    def _reach(self, verb: str) -> None:
        if verb == self._verb:
            raise KeyError("a bug")


def tracebacks(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.exc_info is not None for record in caplog.records)


def test_a_bug_before_anything_is_posted_fails_the_transfer_and_the_thread_goes_on(
    kind: Kind, receiver: Receiver, send: Callable[..., Sending], caplog: pytest.LogCaptureFixture
) -> None:
    sending = send(kind, threads=1)
    address = receiver.register("p/1", "x", [0, 6], [1, 2])
    broken = transfer(address)
    broken.generations = [1]  # two pages: no digests can be made
    done = sending.run(broken)
    assert (done.status, done.begun, done.overdue) == (TransferStatus.FAILED, False, False)
    assert done.error == "unexpected ValueError, see the log"
    assert sending.run(transfer(address)).status is TransferStatus.OK
    assert (sending.sender.crashes, tracebacks(caplog)) == (1, 1)
    assert not sending.sender.late


def test_a_bug_between_batches_closes_the_link(
    kind: Kind, receiver: Receiver, send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = BuggyLink("none")
    monkeypatch.setattr(sender_module, "connect", lambda *_: link)
    sending = send(kind, threads=1)
    broken = transfer("tcp:nowhere")
    broken.tags = None  # type: ignore[assignment]
    done = sending.run(broken)
    assert (done.status, done.begun, link.closed) == (TransferStatus.FAILED, True, True)


@pytest.mark.parametrize("verb", ["post", "poll"])
def test_a_bug_when_something_may_be_under_way_leaves_the_transfer_unconfirmed(
    send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    links = [BuggyLink(verb), BuggyLink("none")]
    left = list(links)
    monkeypatch.setattr(sender_module, "connect", lambda *_: left.pop(0))
    sending = send("tcp", threads=1)
    sending.sender.start(transfer("tcp:nowhere"))
    assert sending.woken.acquire(timeout=20)
    [stuck] = sending.sender.late
    assert (stuck.overdue, stuck.error) == (True, "unexpected KeyError, see the log")
    # The thread goes on, over another link; the first one keeps the memory that it may be reading.
    assert sending.run(transfer("tcp:nowhere")).status is TransferStatus.OK
    assert not sending.sender.ended, "nobody knows that it is over"
    assert len(sending.sender.late) == 1
    assert (sending.sender.crashes, tracebacks(caplog)) == (1, 1)
    assert not links[0].closed


def test_a_record_that_cannot_be_written_does_not_keep_a_transfer_from_being_over(
    kind: Kind, receiver: Receiver, send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    sending = send(kind, threads=1)

    def emit(record: object, context: object) -> int:
        if isinstance(record, TransferEnd):
            raise OSError("no space")
        return 0

    monkeypatch.setattr(sending.sender, "_emitter", SimpleNamespace(emit=emit))
    done = sending.run(transfer(receiver.register("p/1", "x", [0, 6], [1, 2])))
    assert done.status is TransferStatus.OK
    assert (sending.sender.crashes, tracebacks(caplog)) == (1, 1)


def test_a_link_whose_close_fails_does_not_end_the_thread(
    send: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    links = [BuggyLink("close"), BuggyLink("none")]
    left = list(links)
    monkeypatch.setattr(sender_module, "connect", lambda *_: left.pop(0))
    sending = send("tcp", threads=1)
    assert sending.run(transfer("tcp:nowhere")).status is TransferStatus.OK
    sending.sender.forget("tcp:nowhere")
    assert sending.run(transfer("tcp:nowhere")).status is TransferStatus.OK
    assert (links[0].closed, sending.sender.crashes, tracebacks(caplog)) == (True, 1, 1)
