from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport.link import Link, Receiver, TransferError, connect, listen
from engine.transport.sender import Sender, Transfer
from engine.transport.tcp import TcpReceiver
from guard.records import TransferStatus
from hooks.emit import NULL

PAGE_BYTES = 4096
KEY = bytes(range(32))
NONCE = bytes(range(16))
DIGESTER = PageDigester(KEY)
FRAME = struct.Struct("<BHQqqq")


@pytest.fixture
def pool() -> Iterator[Segment]:
    path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}")
    segment = Segment.create(path, 8, PAGE_BYTES)
    yield segment
    segment.unlink()


@pytest.fixture(params=["shm", "tcp"])
def receiver(request: pytest.FixtureRequest, pool: Segment) -> Iterator[Receiver]:
    kind: Literal["shm", "tcp"] = request.param
    receiver = listen(kind, pool, DIGESTER)
    yield receiver
    receiver.close()


@pytest.fixture
def tcp(pool: Segment) -> Iterator[TcpReceiver]:
    receiver = TcpReceiver(pool, DIGESTER)
    yield receiver
    receiver.close()


def page(value: int) -> Tensor:
    return torch.full((PAGE_BYTES,), value, dtype=torch.uint8)


def tag(generation: int) -> Tensor:
    return torch.tensor([11, -22, generation])


def test_pages_arrive_with_their_tags(receiver: Receiver, pool: Segment) -> None:
    receiver.grant("x", [5, 2], [1, 7])
    link = connect(receiver.address, PAGE_BYTES, DIGESTER)
    link.put("x", 5, page(1), tag(1))
    link.put("x", 2, page(2), tag(7))
    link.flush("x", 2)
    assert pool.data[5].eq(1).all()
    assert pool.data[2].eq(2).all()
    assert pool.tags[[5, 2]].tolist() == [[11, -22, 1], [11, -22, 7]]
    assert not pool.tags[[0, 1, 3, 4, 6, 7]].any()
    link.put("x", 5, page(3), tag(1))
    link.flush("x", 1)  # counts start anew
    link.close()


def test_an_address_that_is_none(tmp_path: Path) -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    for address in ("", "ftp:x", f"shm:{tmp_path}/none", "tcp:127.0.0.1:x", f"tcp:127.0.0.1:{port}", "tcp:1:99999999"):
        with pytest.raises(TransferError):
            connect(address, PAGE_BYTES, DIGESTER)


def test_sides_with_other_page_sizes_do_not_meet(receiver: Receiver) -> None:
    with pytest.raises(TransferError):
        connect(receiver.address, PAGE_BYTES * 2, DIGESTER)


def test_shm_knows_the_pools_end(pool: Segment) -> None:
    link = connect(f"shm:{pool.path}", PAGE_BYTES, DIGESTER)
    for index in (8, -1):
        with pytest.raises(TransferError, match="pool of 8"):
            link.put("x", index, page(1), tag(1))


# TCP: only what was granted


@pytest.mark.parametrize(
    ("transfer", "index", "generation"),
    [("other", 3, 1), ("x", 4, 1), ("x", 3, 2), ("x", 1 << 63, 1)],
    ids=["transfer", "page", "generation", "index"],
)
def test_what_was_not_granted_is_not_written(
    tcp: TcpReceiver, pool: Segment, transfer: str, index: int, generation: int
) -> None:
    tcp.grant("x", [3], [1])
    link = connect(tcp.address, PAGE_BYTES, DIGESTER)
    link.put(transfer, index, page(9), tag(generation))
    with pytest.raises(TransferError, match="took 0 of 1"):
        link.flush(transfer, 1)
    assert not pool.data.any()
    assert not pool.tags.any()
    assert tcp.refused_pages == 1
    link.put("x", 3, page(9), tag(1))
    link.flush("x", 1)  # the connection is not worse for it
    assert pool.data[3].all()
    link.close()


def test_after_revoke_nothing_is_written(tcp: TcpReceiver, pool: Segment) -> None:
    tcp.grant("x", [3], [1])
    link = connect(tcp.address, PAGE_BYTES, DIGESTER)
    link.put("x", 3, page(1), tag(1))
    link.flush("x", 1)
    tcp.revoke("x")
    tcp.revoke("x")
    link.put("x", 3, page(2), tag(1))
    with pytest.raises(TransferError):
        link.flush("x", 1)
    assert pool.data[3].eq(1).all()
    link.close()


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


def test_without_the_key_nobody_gets_in(tcp: TcpReceiver) -> None:
    with pytest.raises(TransferError, match="digest_key"):
        connect(tcp.address, PAGE_BYTES, PageDigester(bytes(32)))
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
def test_what_is_no_frame_closes_the_connection_and_harms_nobody(tcp: TcpReceiver, pool: Segment, frame: bytes) -> None:
    tcp.grant("x", [0], [1])
    link = connect(tcp.address, PAGE_BYTES, DIGESTER)
    hostile = authenticated(tcp)
    hostile.sendall(frame)
    assert is_closed(hostile)
    link.put("x", 0, page(1), tag(1))
    link.flush("x", 1)
    link.close()
    assert pool.data[0].all()
    assert not pool.data[1:].any()


def test_a_page_that_stops_in_the_middle_is_not_written(tcp: TcpReceiver, pool: Segment) -> None:
    tcp.grant("x", [0], [1])
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


def test_close_ends_connections_and_the_listener(pool: Segment) -> None:
    receiver = TcpReceiver(pool, DIGESTER)
    connection = authenticated(receiver)
    receiver.close()
    assert is_closed(connection)
    with pytest.raises(TransferError):
        connect(receiver.address, PAGE_BYTES, DIGESTER)


def test_what_listens_there_may_be_no_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 something else altogether")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferError, match="no kvguard decode worker"):
            connect(f"tcp:127.0.0.1:{server.getsockname()[1]}", PAGE_BYTES, DIGESTER)
        thread.join()


# The sending side


class Sending:
    """A sender over a source pool, and what came of its transfers."""

    def __init__(self, source: Segment) -> None:
        self.ended = threading.Semaphore(0)
        self.sender = Sender(source, 4, DIGESTER, NULL, digests=True, wake=self.ended.release)

    def run(self, transfer: Transfer) -> Transfer:
        self.sender.start(transfer)
        assert self.ended.acquire(timeout=20)
        return self.sender.ended.popleft()


@pytest.fixture
def sending(pool: Segment) -> Iterator[Sending]:
    path = pool.path.with_name(pool.path.name + "-source")
    source = Segment.create(path, 4, PAGE_BYTES)
    source.data[:] = torch.arange(1, 5, dtype=torch.uint8)[:, None]
    sending = Sending(source)
    yield sending
    sending.sender.close()
    source.unlink()


def transfer(address: str) -> Transfer:
    return Transfer(
        id="x", grant="x", request="r", tenant="t", context=None, source=[3, 1], destination=[0, 6],
        generations=[1, 2], nonce=NONCE,
        tags=torch.stack((tag(1), tag(2))), first=0, tokens=7, pool="decode-0", address=address,
    )  # fmt: skip


def test_a_transfer_copies_and_digests_what_it_copies(receiver: Receiver, pool: Segment, sending: Sending) -> None:
    receiver.grant("x", [0, 6], [1, 2])
    done = sending.run(transfer(receiver.address))
    assert (done.status, done.begun, done.error) == (TransferStatus.OK, True, "")
    assert pool.data[[0, 6], 0].tolist() == [4, 2]
    assert done.digests == DIGESTER.pages(pool.data, "t", "r", [0, 6], generations=[1, 2], nonce=NONCE)


def test_a_transfer_that_was_cancelled_in_time_never_begins(
    receiver: Receiver, pool: Segment, sending: Sending
) -> None:
    cancelled = transfer(receiver.address)
    cancelled.cancel()
    done = sending.run(cancelled)
    assert (done.status, done.begun) == (TransferStatus.ABORTED, False)
    assert not pool.data.any()


def test_a_transfer_to_nobody_fails_and_says_why_and_the_next_one_is_fine(
    receiver: Receiver, pool: Segment, sending: Sending
) -> None:
    done = sending.run(transfer("tcp:127.0.0.1:1"))
    assert done.status is TransferStatus.FAILED
    assert "127.0.0.1:1" in done.error
    receiver.grant("x", [0, 6], [1, 2])
    assert sending.run(transfer(receiver.address)).status is TransferStatus.OK


def test_a_link_to_a_worker_that_died_is_made_anew(tcp: TcpReceiver, pool: Segment, sending: Sending) -> None:
    tcp.grant("x", [0, 6], [1, 2])
    for _ in range(8):  # so that more than one thread has a link
        assert sending.run(transfer(tcp.address)).status is TransferStatus.OK
    sending.sender.forget(tcp.address)
    assert sending.run(transfer(tcp.address)).status is TransferStatus.OK


def test_links_are_what_the_protocol_says(tcp: TcpReceiver) -> None:
    link: Link = connect(tcp.address, PAGE_BYTES, DIGESTER)
    for name in ("", "x" * 1025):
        with pytest.raises(TransferError, match="transfer id"):
            link.put(name, 0, page(0), tag(0))
    with pytest.raises(TransferError, match="the link carries"):
        link.put("x", 0, page(0)[:8], tag(0))
    link.close()
