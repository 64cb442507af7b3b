"""Each transport between two real processes, against the bare library on the same buffers.

A pool's worth of SmolLM2's pages (fp32, 16 tokens) is moved from one process's segment into another's, the pages of
both in an order of no pattern, 1 MiB to 256 MiB at a time. Ours is the whole way that the engine's transfers go: a
`Sender`, its threads, batches, the tags, the transport's confirmation. Bare is the least that moves the same pages and
knows that they are there: a copy a page into the mapping, a plain socket with a word back, a NIXL agent with one
request made of descriptors that were prepared once for all pages, one Mooncake batch a 1,024 pages. With digests both
sides compute them, one after the other, as in the engine; the message in which they go, which there is anyway, is not
counted. The variants take turns, round by round.

What ours adds is mostly the same whatever the size: the caller hands the transfer to a thread and is woken again by it,
and what Python that takes runs on cold caches. So the table also gives the difference of the medians in microseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

from bench import QUICK

PAGE_TOKENS = 16
NONCE = bytes(16)
PAGE_BYTES = 30 * 2 * PAGE_TOKENS * 3 * 64 * 4
"""30 layers, keys and values, 3 KV heads of 64 numbers of 4 bytes."""
SIZES_MIB = (1, 4) if QUICK else (1, 4, 16, 64, 256)
ROUNDS = 1 if QUICK else 15
BAR = 0.8
"""NIXL and Mooncake without digests, against the bare library."""
BARRED = ("nixl", "mooncake")
VARIANTS = ("bare", "ours", "ours + digests")
_BATCH = 1024

Figures = dict[int, dict[str, list[float]]]
"""Seconds by MiB and variant, a figure a round."""


def main() -> int:
    """Prints a table a kind."""
    from engine.transport.link import Kind, MissingError, load

    failed = 0
    for kind in get_args(Kind):
        try:
            load(kind)
        except MissingError as error:
            print(f"  {kind}: not measured: {error}")
            continue
        figures = measure(kind)
        if figures is None:
            print(f"  {kind}: failed, see above")
            failed = 1
        else:
            table(kind, figures)
    return failed


def table(kind: str, figures: Figures) -> None:
    bar = f"; bar {BAR}" if kind in BARRED else ""
    print(f"  {kind}: GB/s, median (lowest to highest) of {ROUNDS}; pages of {PAGE_BYTES:,} bytes{bar}")
    for mib, variants in figures.items():
        moved = pages_of(mib) * PAGE_BYTES
        cells = []
        for name in VARIANTS:
            rates = sorted(moved / seconds / 1e9 for seconds in variants[name])
            cells.append(f"{name} {statistics.median(rates):5.2f} ({rates[0]:.2f} to {rates[-1]:.2f})")
        plain, digested = (
            statistics.median(a / b for a, b in zip(variants["bare"], variants[ours], strict=True))
            for ours in VARIANTS[1:]
        )
        # What else the machine does only ever takes time; where it does much, the best rounds say more.
        best = min(variants["bare"]) / min(variants["ours"])
        added = 1e6 * (statistics.median(variants["ours"]) - statistics.median(variants["bare"]))
        print(
            f"    {mib:4d} MiB, {pages_of(mib):3d} pages: {', '.join(cells)}; "
            f"ours / bare {plain:.2f} (best rounds {best:.2f}, {added:+.0f} µs), with digests {digested:.2f}",
            flush=True,
        )


def pages_of(mib: int) -> int:
    return max(1, round((mib << 20) / PAGE_BYTES))


def measure(kind: str) -> Figures | None:
    """One kind's figures; None if a process failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    results, there = context.Pipe()
    processes = [
        context.Process(target=run, args=(receive, kind, theirs)),
        context.Process(target=run, args=(send, kind, ours, there)),
    ]
    for process in processes:
        process.start()
    for end in (ours, theirs, there):
        end.close()
    try:
        figures: Figures | None = results.recv()
    except EOFError:
        figures = None
    for process in processes:
        process.join(20)
        process.kill()
    return figures


def run(job: Callable[..., None], *arguments: Any) -> None:
    """A process; it ends without the destructors of libraries, one of which crashes (see `engine.worker.leave`)."""
    try:
        job(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@contextmanager
def pool(pages: int) -> Iterator[Any]:
    """A segment of so many pages."""
    from engine.segment import Segment

    segment = Segment.create(Path(f"/dev/shm/kvguard-bench-{os.getpid()}"), pages, PAGE_BYTES)
    try:
        yield segment
    finally:
        segment.unlink()


def digester() -> Any:
    from engine.digest import PageDigester

    return PageDigester(bytes(range(32)))


# The receiving process


def receive(kind: str, pipe: Connection) -> None:
    """Opens the pool both ways, and computes digests when it is asked to."""
    from engine.transport.link import listen

    count = pages_of(max(SIZES_MIB))
    with pool(count) as segment:
        receiver = listen(kind, segment, digester())  # type: ignore[arg-type]
        address = receiver.register("bench/1", "bench", range(count), [1] * count)
        bare: Any = globals()[f"open_{kind}"](segment)
        pipe.send((address, segment.address, bare[0]))
        ours = digester()
        while (pages := pipe.recv()) is not None:
            started = time.perf_counter()
            ones = [1] * len(pages)
            found = ours.pages(segment.data, "tenant", "request", pages, generations=ones, nonce=NONCE)
            pipe.send((found, time.perf_counter() - started))
        receiver.close()


def open_shm(segment: Any) -> tuple[Any, ...]:
    return (str(segment.path),)


def open_tcp(segment: Any) -> tuple[Any, ...]:
    listener = socket.create_server(("127.0.0.1", 0))

    def take() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = segment.data.numpy()
        head = memoryview(bytearray(8))
        while fill(connection, head):
            page = int.from_bytes(head, "little")
            if page == _SAY_SO:
                connection.sendall(b"k")
            else:
                fill(connection, memory[page].data)

    threading.Thread(target=take, daemon=True).start()
    return listener.getsockname(), listener


def open_nixl(segment: Any) -> tuple[Any, ...]:
    from nixl._api import nixl_agent, nixl_agent_config

    # Its own progress thread would take a core from everybody else's measurement.
    agent = nixl_agent("bare-recv", nixl_agent_config(False, False, 0, backends=["UCX"]))
    agent.register_memory([(segment.address, segment.size, 0, "")], mem_type="DRAM")

    def progress() -> None:
        while True:
            agent.get_new_notifs()
            time.sleep(0.0001)

    metadata = agent.get_agent_metadata()
    threading.Thread(target=progress, daemon=True).start()
    return metadata, agent


def open_mooncake(segment: Any) -> tuple[Any, ...]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(segment.address, segment.size) == 0
    return f"127.0.0.1:{engine.get_rpc_port()}", engine


_SAY_SO = (1 << 64) - 1


def fill(connection: socket.socket, buffer: memoryview) -> bool:
    done = 0
    while done < len(buffer):
        size = connection.recv_into(buffer[done:])
        if not size:
            return False
        done += size
    return True


# The sending process


def send(kind: str, pipe: Connection, results: Connection) -> None:
    """Measures all variants, and sends what they took."""
    import numpy as np
    import torch

    from engine.transport.sender import Sender, Transfer
    from guard.records import TransferStatus
    from hooks.emit import NULL

    count = pages_of(max(SIZES_MIB))
    with pool(count) as segment:
        segment.data.view(torch.int64).copy_(torch.randint(1 << 62, (count, PAGE_BYTES // 8)))
        address, base, handle = pipe.recv()
        bare: Callable[[list[int], list[int]], None] = globals()[f"bare_{kind}"](segment, base, handle)
        woken = threading.Semaphore(0)
        tags, generations = np.ones((count, 3), dtype=np.int64), [1] * count

        def sender(with_digests: bool) -> Sender:
            return Sender(
                kind,  # type: ignore[arg-type]
                segment, PAGE_TOKENS, digester(), NULL, digests=with_digests, wake=woken.release, threads=1,
            )  # fmt: skip

        senders = {"ours": sender(False), "ours + digests": sender(True)}

        def ours(name: str, source: list[int], destination: list[int]) -> float:
            """Seconds, with what the receiver's digests take there but without the way there and back."""
            started = time.perf_counter()
            transfer = Transfer(
                id="bench", grant="bench", request="request", tenant="tenant", context=None, source=source,
                destination=destination, generations=generations[: len(source)], nonce=NONCE,
                tags=tags[: len(source)], first=0,
                tokens=len(source) * PAGE_TOKENS, pool="decode-0", address=address,
            )  # fmt: skip
            senders[name].start(transfer)
            woken.acquire()
            senders[name].ended.popleft()
            seconds = time.perf_counter() - started
            assert transfer.status is TransferStatus.OK, transfer.error
            if transfer.digests is not None:
                pipe.send(destination)
                arrived, took = pipe.recv()
                assert arrived == transfer.digests, "what arrived is not what was sent"
                seconds += took
            return seconds

        figures: Figures = {mib: {name: [] for name in VARIANTS} for mib in SIZES_MIB}
        rng = random.Random(5)
        for number in range(ROUNDS + 1):
            for mib in SIZES_MIB:
                pages = pages_of(mib)
                source, destination = rng.sample(range(count), pages), rng.sample(range(count), pages)
                for name in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                    if name == "bare":
                        started = time.perf_counter()
                        bare(source, destination)
                        seconds = time.perf_counter() - started
                    else:
                        seconds = ours(name, source, destination)
                    if number:  # the first warms up
                        figures[mib][name].append(seconds)
        for each in senders.values():
            each.close()
        pipe.send(None)
        results.send(figures)


def bare_shm(segment: Any, _base: int, path: str) -> Callable[[list[int], list[int]], None]:
    from engine.segment import Segment

    there = Segment.open(Path(path), PAGE_BYTES).data.numpy()
    here = segment.data.numpy()

    def move(source: list[int], destination: list[int]) -> None:
        for a, b in zip(source, destination, strict=True):
            there[b] = here[a]

    return move


def bare_tcp(segment: Any, _base: int, address: tuple[str, int]) -> Callable[[list[int], list[int]], None]:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    here = segment.data.numpy()

    def move(source: list[int], destination: list[int]) -> None:
        for a, b in zip(source, destination, strict=True):
            connection.sendall(b.to_bytes(8, "little"))
            connection.sendall(here[a].data)
        connection.sendall(_SAY_SO.to_bytes(8, "little"))
        assert connection.recv(1) == b"k"

    return move


def bare_nixl(segment: Any, base: int, metadata: bytes) -> Callable[[list[int], list[int]], None]:
    import numpy as np
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("bare-send", nixl_agent_config(False, False, 0, backends=["UCX"]))
    agent.register_memory([(segment.address, segment.size, 0, "")], mem_type="DRAM")

    def prepare(name: str, address: int) -> Any:
        pages = [(address + page * PAGE_BYTES, PAGE_BYTES, 0) for page in range(segment.pages)]
        return agent.prep_xfer_dlist(name, pages, mem_type="DRAM")

    here, there = prepare("", segment.address), prepare(agent.add_remote_agent(metadata), base)

    def move(source: list[int], destination: list[int]) -> None:
        handle = agent.make_prepped_xfer(
            "WRITE", here, np.array(source, dtype=np.int32), there, np.array(destination, dtype=np.int32)
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    return move


def bare_mooncake(segment: Any, base: int, peer: str) -> Callable[[list[int], list[int]], None]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(segment.address, segment.size) == 0
    assert engine.transfer_sync_write(peer, segment.address, base, 8) == 0

    def move(source: list[int], destination: list[int]) -> None:
        for start in range(0, len(source), _BATCH):
            here = [segment.address + a * PAGE_BYTES for a in source[start : start + _BATCH]]
            there = [base + b * PAGE_BYTES for b in destination[start : start + _BATCH]]
            assert engine.batch_transfer_sync_write(peer, here, there, [PAGE_BYTES] * len(here)) == 0

    return move


if __name__ == "__main__":
    raise SystemExit(main())
