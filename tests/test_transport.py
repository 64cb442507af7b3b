from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport.link import Batch, Fate, Kind, Link, Receiver, TransferError, connect, listen
from engine.transport.tcp import TcpReceiver

PAGE_BYTES = 4096
KEY = bytes(range(32))
DIGESTER = PageDigester(KEY)
FRAME = struct.Struct("<BHQqqq")


def segment(pages: int = 8, page_bytes: int = PAGE_BYTES) -> Segment:
    path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}")
    return Segment.create(path, pages, page_bytes)


@pytest.fixture
def pool() -> Iterator[Segment]:
    made = segment()
    yield made
    made.unlink()


@pytest.fixture
def source() -> Iterator[Segment]:
    """Page n is full of n + 1."""
    made = segment()
    made.data[:] = torch.arange(1, 9, dtype=torch.uint8)[:, None]
    yield made
    made.unlink()


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """What needs no library; for the others see test_transport_libraries.py."""
    which: Kind = request.param
    return which


@pytest.fixture
def receiver(kind: Kind, pool: Segment) -> Iterator[Receiver]:
    receiver = listen(kind, pool, DIGESTER)
    yield receiver
    receiver.close()


@pytest.fixture
def tcp(pool: Segment) -> Iterator[TcpReceiver]:
    receiver = TcpReceiver(pool, DIGESTER)
    yield receiver
    receiver.close()


def tags(*generations: int) -> Tensor:
    return torch.tensor([[11, -22, generation] for generation in generations])


def batch(sources: Sequence[int], destination: Sequence[int], *generations: int, transfer: str = "x") -> Batch:
    return Batch(transfer, sources, destination, tags(*generations).numpy())


def fate(link: Link, posted: Batch | None = None) -> Fate:
    """What becomes of the batch in the end."""
    if posted is not None:
        link.post(posted)
    while (found := link.poll(0.1)) is Fate.MOVING:
        pass
    return found


def test_pages_arrive_with_their_tags(kind: Kind, receiver: Receiver, pool: Segment, source: Segment) -> None:
    address = receiver.register("p/1", "x", [5, 2, 3], [1, 7, 8])
    link = connect(kind, address, source, DIGESTER)
    assert fate(link, batch([0, 1, 2], [5, 2, 3], 1, 7, 8)) is Fate.DONE
    assert pool.data[[5, 2, 3], -1].tolist() == [1, 2, 3]
    assert pool.tags[[5, 2, 3]].tolist() == tags(1, 7, 8).tolist()
    assert not pool.tags[[0, 1, 4, 6, 7]].any()
    assert not pool.data[[0, 1, 4, 6, 7]].any()
    assert fate(link, batch([7], [5], 1)) is Fate.DONE
    assert pool.data[5].eq(8).all()
    link.close()
    assert receiver.confirm("x", clean=True)
    assert receiver.confirm("x", clean=False), "what is not known is over"


@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_runs_are_the_batch_in_pieces(pairs: list[tuple[int, int]]) -> None:
    from_, to = zip(*pairs, strict=True)
    runs = list(Batch("x", from_, to, np.zeros((len(pairs), 3), dtype=np.int64)).runs())
    assert [(run.source + n, run.destination + n) for run in runs for n in range(run.count)] == pairs
    assert [place for run in runs for place in range(run.start, run.start + run.count)] == list(range(len(pairs)))
    joins = [b.source == a.source + a.count and b.destination == a.destination + a.count for a, b in pairwise(runs)]
    assert not any(joins)


def test_an_address_that_is_none(tmp_path: Path, source: Segment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    kinds: list[tuple[Kind, str, str]] = [
        ("shm", "", "must start with shm:"),
        ("shm", "tcp:127.0.0.1:1", "must start with shm:"),
        ("tcp", f"shm:{tmp_path}", "must start with tcp:"),
        ("shm", f"shm:{tmp_path}/none", "has its worker ended"),
        ("tcp", "tcp:127.0.0.1:x", "127.0.0.1:x"),
        ("tcp", f"tcp:127.0.0.1:{port}", "refused"),
        ("tcp", "tcp:1:99999999", "1:99999999"),
        ("shm", "shm:" + "x" * 4096, "4100 bytes"),
    ]
    for kind, address, reason in kinds:
        with pytest.raises(TransferError, match=reason):
            connect(kind, address, source, DIGESTER)


def test_sides_with_other_page_sizes_do_not_meet(kind: Kind, receiver: Receiver) -> None:
    other = segment(page_bytes=2 * PAGE_BYTES)
    other.unlink()
    with pytest.raises(TransferError):
        connect(kind, receiver.register("p/1", "x", [0], [1]), other, DIGESTER)


@pytest.mark.parametrize(
    ("posted", "reason"),
    [
        (batch([8], [0], 1), "source page 8 of a pool of 8"),
        (batch([0, -1], [0, 1], 1, 1), "source page -1"),
        (batch([0], [-1], 1), "destination page -1"),
        (batch([0], [1 << 63], 1), "destination page"),
        (batch([], []), "a batch of no pages"),
        (batch([0], [], 1), "1 source pages, 0 destination"),
        (batch([0], [0], 1, 2), "1 source pages, 1 destination pages and 2 tags"),
    ],
)
def test_what_is_no_batch_does_not_begin(
    kind: Kind, receiver: Receiver, pool: Segment, source: Segment, posted: Batch, reason: str
) -> None:
    link = connect(kind, receiver.register("p/1", "x", [0], [1]), source, DIGESTER)
    with pytest.raises(TransferError, match=reason):
        link.post(posted)
    assert not pool.data.any()
    assert fate(link, batch([0], [0], 1)) is Fate.DONE
    link.close()


def test_what_is_aborted_is_over_when_a_poll_says_so(kind: Kind, receiver: Receiver, source: Segment) -> None:
    link = connect(kind, receiver.register("p/1", "x", [0], [1]), source, DIGESTER)
    link.post(batch([0], [0], 1))
    link.abort()
    assert fate(link) is Fate.FAILED
    assert "aborted" in link.error
    link.close()


# TCP: only what was registered


@pytest.mark.parametrize(
    ("transfer", "index", "generation"),
    [("other", 3, 1), ("x", 4, 1), ("x", 3, 2), ("x", (1 << 63) - 1, 1)],
    ids=["transfer", "page", "generation", "index"],
)
def test_what_was_not_registered_is_not_written(
    tcp: TcpReceiver, pool: Segment, source: Segment, transfer: str, index: int, generation: int
) -> None:
    tcp.register("p/1", "x", [3], [1])
    link = connect("tcp", tcp.address, source, DIGESTER)
    assert fate(link, batch([0], [index], generation, transfer=transfer)) is Fate.FAILED
    assert "took 0 of 1" in link.error
    assert not pool.data.any()
    assert not pool.tags.any()
    assert tcp.refused_pages == 1
    another = connect("tcp", tcp.address, source, DIGESTER)
    assert fate(another, batch([0], [3], 1)) is Fate.DONE
    another.close()


def test_after_confirm_nothing_is_written(tcp: TcpReceiver, pool: Segment, source: Segment) -> None:
    tcp.register("p/1", "x", [3], [1])
    link = connect("tcp", tcp.address, source, DIGESTER)
    assert fate(link, batch([0], [3], 1)) is Fate.DONE
    assert tcp.confirm("x", clean=False)
    assert fate(link, batch([1], [3], 1)) is Fate.FAILED
    assert pool.data[3].eq(1).all()


def test_a_transfers_id_has_to_be_one(tcp: TcpReceiver, source: Segment) -> None:
    link = connect("tcp", tcp.address, source, DIGESTER)
    for name in ("", "x" * 1025):
        with pytest.raises(TransferError, match="transfer id"):
            link.post(batch([0], [0], 1, transfer=name))
    link.close()


def test_a_receiver_that_takes_nothing_is_waited_for_until_the_link_is_aborted(source: Segment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []

        def greet() -> None:
            connection, _ = server.accept()
            connection.sendall(b"KVG1" + bytes(32))
            connection.recv(36, socket.MSG_WAITALL)
            connection.sendall(b"K")
            accepted.append(connection)

        thread = threading.Thread(target=greet)
        thread.start()
        link = connect("tcp", f"tcp:127.0.0.1:{server.getsockname()[1]}", source, DIGESTER)
        thread.join()
        link.post(batch([0] * 4000, range(4000), *range(4000)))
        assert [link.poll(0.01) for _ in range(5)] == [Fate.MOVING] * 5
        link.abort()
        assert link.poll(0.0) is Fate.FAILED
        accepted[0].close()


# TCP: hostile peers


def raw(tcp: TcpReceiver) -> tuple[socket.socket, bytes]:
    """A connection that was greeted."""
    host, _, port = tcp.address.removeprefix("tcp:").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    greeting = b""
    while len(greeting) < 36:
        greeting += connection.recv(36 - len(greeting))
    assert greeting[:4] == b"KVG1"
    return connection, greeting[4:]


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def authenticated(tcp: TcpReceiver) -> socket.socket:
    connection, challenge = raw(tcp)
    connection.sendall(DIGESTER.authenticator(challenge) + struct.pack("<I", PAGE_BYTES))
    assert connection.recv(1) == b"K"
    return connection


def test_without_the_key_nobody_gets_in(tcp: TcpReceiver, source: Segment) -> None:
    with pytest.raises(TransferError, match="digest_key"):
        connect("tcp", tcp.address, source, PageDigester(bytes(32)))
    connection, challenge = raw(tcp)
    other, _ = raw(tcp)
    proof = DIGESTER.authenticator(challenge)
    other.sendall(proof + struct.pack("<I", PAGE_BYTES))  # somebody else's challenge
    assert is_closed(other)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(32))
    assert is_closed(connection)


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.pack(3, 1, 0, 0, 0, 0) + b"x",
        FRAME.pack(0, 1, 0, 0, 0, 0) + b"x",
        FRAME.pack(1, 0, 0, 0, 0, 0),
        FRAME.pack(2, 1025, 0, 0, 0, 0) + bytes(1025),
        FRAME.pack(1, 1, 0, 0, 0, 0) + b"\xff" + bytes(PAGE_BYTES),
        b"\xff" * FRAME.size,
    ],
    ids=["kind", "zeros", "no-id", "long-id", "not-utf8", "ones"],
)
def test_what_is_no_frame_closes_the_connection_and_harms_nobody(
    tcp: TcpReceiver, pool: Segment, source: Segment, frame: bytes
) -> None:
    tcp.register("p/1", "x", [0], [1])
    link = connect("tcp", tcp.address, source, DIGESTER)
    hostile = authenticated(tcp)
    hostile.sendall(frame)
    assert is_closed(hostile)
    assert fate(link, batch([0], [0], 1)) is Fate.DONE
    link.close()
    assert pool.data[0].all()
    assert not pool.data[1:].any()


def test_a_page_that_stops_in_the_middle_is_not_written(tcp: TcpReceiver, pool: Segment) -> None:
    tcp.register("p/1", "x", [0], [1])
    connection = authenticated(tcp)
    connection.sendall(FRAME.pack(1, 1, 0, 1, 1, 1) + b"x" + bytes([9]) * (PAGE_BYTES - 1))
    connection.shutdown(socket.SHUT_WR)
    assert is_closed(connection)
    assert not pool.data.any()
    assert not pool.tags.any()


def test_too_many_connections_are_turned_away(tcp: TcpReceiver) -> None:
    held = [raw(tcp)[0] for _ in range(64)]
    host, _, port = tcp.address.removeprefix("tcp:").rpartition(":")
    extra = socket.create_connection((host, int(port)), timeout=20)
    assert is_closed(extra)
    for connection in held:
        connection.close()


def test_close_ends_connections_and_the_listener(pool: Segment, source: Segment) -> None:
    receiver = TcpReceiver(pool, DIGESTER)
    connection = authenticated(receiver)
    receiver.close()
    assert is_closed(connection)
    with pytest.raises(TransferError):
        connect("tcp", receiver.address, source, DIGESTER)


def test_what_listens_there_may_be_no_worker(source: Segment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 something else altogether")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferError, match="no kvguard decode worker"):
            connect("tcp", f"tcp:127.0.0.1:{server.getsockname()[1]}", source, DIGESTER)
        thread.join()
