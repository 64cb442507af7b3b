"""A sender's process, a TCP proxy that does harm, and a receiver; and what the guard makes of what both record."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from ledger_rig import Rig
from test_ledger_properties import interleaved
from wire_proxy import FAULTS, Proxy
from worker_rig import judge

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport.link import Batch, Fate, connect
from engine.transport.tcp import TcpReceiver
from guard.findings import Kind
from guard.records import TransferBegin, TransferEnd

PAGE_BYTES, PAGES = 8192, 4
DIGESTER = PageDigester(bytes(range(32)))
MIDDLE = 36 + 2 * (35 + 1 + PAGE_BYTES) + 500
"""In the third page's bytes: after the handshake and two frames."""
TAGS = torch.tensor([[7, 7, page + 1] for page in range(PAGES)])


def segment(name: str, pages: int) -> Segment:
    path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}-{name}")
    made = Segment.create(path, pages, PAGE_BYTES)
    made.unlink()
    return made


def content(page: int) -> torch.Tensor:
    """What page n of the source holds; no byte of it begins a frame."""
    return (torch.arange(PAGE_BYTES) * (page + 3) % 251 + 4).to(torch.uint8)


def send(pipe: Connection) -> None:
    """The sender's process."""
    source = segment("source", PAGES)
    for page in range(PAGES):
        source.data[page] = content(page)
    while (address := pipe.recv()) is not None:
        link = connect("tcp", address, source, DIGESTER)
        link.post(Batch("x1", range(PAGES), range(PAGES), TAGS.numpy()))
        while (fate := link.poll(0.05)) is Fate.MOVING:
            pass
        pipe.send((fate.name, link.error))
        link.close()


@pytest.fixture(scope="module")
def sender() -> Iterator[Any]:
    """Gives what became of the transfer when it is told an address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(20)
    assert process.exitcode == 0


def digests(pages: Iterator[bytes]) -> str:
    return ",".join(hashlib.sha256(page).hexdigest()[:32] for page in pages)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_wire(sender: Any, fault: str) -> None:
    pool = segment("pool", PAGES)
    pool.data[:] = 99  # somebody else's
    receiver = TcpReceiver(pool, DIGESTER)
    with closing(receiver), closing(Proxy(receiver.address, fault, MIDDLE)) as proxy:
        receiver.register("p/1", "x1", range(PAGES), [page + 1 for page in range(PAGES)])
        sender.send(proxy.address)
        assert proxy.reached.wait(20)
        if fault == "delay":
            assert not sender.poll(0.2), "nothing is said of what is not there"
            assert not pool.tags[3].any()
            proxy.go_on.set()
        fate, error = sender.recv()
        # What is on its way, if anything is, is nobody's any more.
        assert receiver.confirm("x1", clean=fate == "DONE")
        arrived = bool(pool.tags.all())
        assert (fate == "DONE") == arrived == (fault not in ("drop", "duplicate", "cut")), error
        for page in range(2):
            whole = pool.data[page].equal(content(page)) and pool.tags[page].equal(TAGS[page])
            nothing = not arrived and pool.data[page].eq(99).all() and not pool.tags[page].any()
            assert whole or nothing
        if not arrived:
            assert error
            assert not pool.tags[3].any(), "what did not arrive whole has no tag, and so is not read"
        tell(fault, fate, pool)
        after = segment("after", 1)
        link = connect("tcp", receiver.address, after, DIGESTER)
        link.post(Batch("x1", [0], [0], TAGS[:1].numpy()))
        while link.poll(0.05) is Fate.MOVING:
            pass
        assert "took 0 of 1" in link.error, "not even the transfer itself may write after that"
        assert not pool.data[0].equal(after.data[0])


def tell(fault: str, fate: str, pool: Segment) -> None:
    """Both sides' records of it, as sender and receiver make them, through the guard."""
    rig = Rig()
    rig.left_behind("d", "b1", "0-3")
    rig.prefilled("a1", "0-3")
    rig.alloc("d", "a1", "0-3")
    sent = digests(bytes(content(page).numpy()) for page in range(PAGES))
    rig.begin("a1", "0-3", "0-3", digests=sent)
    got = digests(bytes(pool.data[page].numpy()) for page in range(PAGES))
    if fate == "DONE":
        rig.ended("p", "send", "a1", "0-3")
        rig.ended("d", "recv", "a1", "0-3", status="ok" if got == sent else "failed", digests=got)
    else:
        rig.ended("p", "send", "a1", "0-3", status="failed")
        rig.ended("d", "recv", "a1", "0-3", status="failed", tokens=0)
    rig.over("d", "a1", "finished" if got == sent else "aborted")
    rig.free("d", "a1", "0-3")
    # The same in every order in which the two sides' records can arrive; all name the transfer.
    assert {r.transfer for r in rig.log if isinstance(r, TransferBegin | TransferEnd)} == {"x1"}
    expected = {(Kind.DIGEST_MISMATCH, "x1", "2")} if fault in ("flip", "reorder") else set()
    for order in [rig.log, *(interleaved(rig.log, seed) for seed in range(10))]:
        assert {(f.kind, f.transfer, str(f.pages)) for f in judge(order)} == expected
