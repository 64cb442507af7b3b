"""``transport_pair.py KIND``: a receiver and a sender in two processes, and what must hold between them.

In processes of their own, because NIXL's wheel crashes at the end of an interpreter that used it. Says ``ok`` at the
end; what does not hold is an assertion's traceback and a status that is not 0.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport.link import Batch, Fate, Kind, Link, TransferError, connect, listen

PAGES, PAGE_BYTES = 2000, 4096
KEY = bytes(range(32))
DIGESTER = PageDigester(KEY)


def segment(name: str, page_bytes: int = PAGE_BYTES) -> Segment:
    made = Segment.create(Path(f"/dev/shm/kvguard-test-{os.getpid()}-{name}"), PAGES, page_bytes)
    if name != "pool":
        made.unlink()
    return made


def batch(source: list[int], destination: list[int], transfer: str = "x") -> Batch:
    return Batch(transfer, source, destination, np.array([[1, 2, page] for page in destination]))


def fate(link: Link, posted: Batch) -> Fate:
    link.post(posted)
    while (found := link.poll(0.1)) is Fate.MOVING:
        pass
    return found


def refusal(kind: Kind, address: str, source: Segment, key: bytes = KEY) -> str:
    try:
        connect(kind, address, source, PageDigester(key))
    except TransferError as error:
        return str(error)
    raise AssertionError(f"{address:.60} was let in")


def send(kind: Kind, pipe: Connection) -> None:
    """The sender's process: does what it is told."""
    source = segment("source")
    source.data[:] = (torch.arange(PAGES) % 251 + 1).to(torch.uint8)[:, None]
    links: dict[str, Link] = {}
    while (order := pipe.recv()) is not None:
        word, address, *pages = order
        if word == "refused":
            pipe.send([refusal(kind, address, source, *pages)])
        elif word == "other pages":
            pipe.send([refusal(kind, address, segment("other", 2 * PAGE_BYTES))])
        elif word == "abort":
            link = links.pop(address)
            link.post(batch([0], [0]))
            link.abort()
            found = [link.poll(20.0), link.poll(0.0)]
            pipe.send([str(found), link.error])
        else:
            if address not in links:
                links[address] = connect(kind, address, source, DIGESTER)
            found_one = fate(links[address], batch(*pages))
            pipe.send([found_one.name, links[address].error])
            if found_one is not Fate.DONE:
                del links[address]
    for link in links.values():
        link.close()


def receive(kind: Kind, ask: Any) -> None:
    """The receiver's process: what must hold."""
    pool = segment("pool")
    receiver = listen(kind, pool, DIGESTER)
    try:
        address = receiver.register("p/1", "x", range(PAGES), [1] * PAGES)
        assert len(address) < 4096
        # Only who has the key, and pages of the same size, is given an address's word.
        assert "not made with this digest_key" in ask("refused", address, bytes(32))[0]
        forged = address[:-1] + ("0" if address[-1] != "0" else "1")
        assert "not made with this digest_key" in ask("refused", forged)[0]
        body, _, proof = address.rpartition(":")
        assert "not made with this digest_key" in ask("refused", f"{body}0:{proof}")[0]
        assert "pages of 8192 bytes here and of 4096 there" in ask("other pages", address)[0]
        assert "must start with" in ask("refused", "tcp:127.0.0.1:1")[0]

        assert ask("send", address, [0, 1, 2, 700], [9, 10, 3, 5])[0] == "DONE"
        assert pool.data[[9, 10, 3, 5], -1].tolist() == [1, 2, 3, 700 % 251 + 1]
        assert pool.tags[[9, 10, 3, 5]].tolist() == [[1, 2, 9], [1, 2, 10], [1, 2, 3], [1, 2, 5]]
        assert int(pool.tags.any(dim=1).sum()) == int(pool.data.any(dim=1).sum()) == 4
        # As many as may go together, not one beside another.
        places = [page * 7 % PAGES for page in range(1024)]
        assert ask("send", address, list(range(1024)), places)[0] == "DONE"
        assert pool.data[places, 0].tolist() == [page % 251 + 1 for page in range(1024)]
        assert pool.tags[places, 2].tolist() == places

        # What ended well is over; what did not is over when the writer's access is closed, and then it is for good.
        assert receiver.confirm("x", clean=True)
        receiver.register("p/1", "y", [0], [1])
        other = receiver.register("p/2", "z", [0], [1])
        assert other != address
        while not receiver.confirm("y", clean=False):
            pass
        before = pool.data[0].clone(), pool.tags.clone()
        found, why = ask("send", address, [5], [0])
        assert found == "FAILED", found
        assert why, "it says why"
        assert torch.equal(pool.data[0], before[0])
        assert torch.equal(pool.tags, before[1])
        assert ask("send", other, [6], [0])[0] == "DONE", "the others are not the worse for it"
        again = receiver.register("p/1", "w", [1], [1])
        assert again not in (address, other)
        assert ask("send", again, [7], [1])[0] == "DONE"
        receiver.forget("p/1")
        while not receiver.confirm("w", clean=False):
            pass
        assert ask("send", again, [8], [1])[0] == "FAILED"
        assert pool.data[1].eq(8).all()
        assert ask("abort", other)[0] == str([Fate.FAILED] * 2)
    finally:
        receiver.close()
        pool.unlink()


def main() -> int:
    kind: Kind = sys.argv[1]  # type: ignore[assignment]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=child_main, args=(kind, theirs), daemon=True)
    child.start()
    theirs.close()

    def ask(*order: Any) -> Any:
        ours.send(order)
        return ours.recv()

    try:
        receive(kind, ask)
        ours.send(None)
        child.join(20)
        assert child.exitcode == 0, child.exitcode
    except BaseException:
        traceback.print_exc()
        return 1
    print("ok", flush=True)
    return 0


def child_main(kind: Kind, pipe: Connection) -> NoReturn:
    try:
        send(kind, pipe)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    os._exit(main())
