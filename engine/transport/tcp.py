"""Transfers over TCP on the loopback interface.

The receiver speaks first: ``KVG1`` and a challenge of 32 bytes. The sender answers with 32 bytes that only the
key gives and its page size (u32); the receiver says ``K``. Then come frames, little-endian:

======  =====  ==========================================================
offset  bytes  frame
======  =====  ==========================================================
0       1      1 page, 2 flush
1       2      length of the transfer's id, 1 to 1024
3       8      page: index in the destination pool; flush: pages since the last flush
11      24     page: the owner tag, three words; flush: zeros
35             the id, UTF-8
               page: the page's bytes
======  =====  ==========================================================

A flush is answered with the number of pages (u64) that were written since the last flush. A page that the transfer
was not granted, or not in this generation, is read and thrown away, and missing in that number. Anything that is
no frame, or stops in the middle of one, closes the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport.link import Batch, Fate, TransferError

_MAGIC = b"KVG1"
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_FRAME = struct.Struct("<BHQqqq")
_HELLO = struct.Struct(f"<{_PROOF_BYTES}sI")
_COUNT = struct.Struct("<Q")
_PAGE, _FLUSH = 1, 2
_MAX_ID_BYTES = 1024
_MAX_CONNECTIONS = 64
_TIMEOUT_S = 10.0
"""For what the other side owes us at once: the handshake, and to a receiver the rest of a frame."""


class TcpLink:
    """See `engine.transport.link.Link`. Nothing is sent but by `poll`, and nothing is waited for longer than it may.

    When it fails, the kernel has its own copies of what was sent; the source is read no more.
    """

    def __init__(self, address: str, segment: Segment, digester: PageDigester) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        except (OSError, ValueError, OverflowError) as error:
            raise TransferError(f"transfer to {address!r:.100}: {error}") from error
        self._address = address
        self._segment = segment
        self._bytes = segment.data.numpy()
        self._steps: Iterator[int] = iter(())
        self.error = ""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shake_hands(digester)
            self._socket.setblocking(False)
        except (OSError, EOFError) as error:
            self.close()
            raise TransferError(f"transfer to {address}: {_why(error)}") from error
        except TransferError:
            self.close()
            raise

    def post(self, batch: Batch) -> None:
        """Nothing is sent yet."""
        batch.check(self._segment.pages, 1 << 63)
        self._steps = self._move(batch, _id(batch.transfer))

    def poll(self, wait_s: float) -> Fate:
        """Sends and receives as the socket is ready for it."""
        deadline = time.monotonic() + wait_s
        try:
            # What the steps give is what the socket has to be ready for.
            while (event := next(self._steps, 0)) != 0:
                left = deadline - time.monotonic()
                if not _ready(self._socket, event, max(0.0, left)) or left < 0:
                    return Fate.MOVING
        except (OSError, EOFError, TransferError) as error:
            self.error = f"transfer to {self._address}: {_why(error)}"
            self.close()
            self._steps = self._failed()
            return Fate.FAILED
        return Fate.DONE

    def abort(self) -> None:
        """Closes the connection."""
        self.close()
        self._steps = self._failed()

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _failed(self) -> Iterator[int]:
        raise TransferError(self.error or "aborted")
        yield 0  # it is a generator

    def _shake_hands(self, digester: PageDigester) -> None:
        greeting = bytearray(len(_MAGIC) + _CHALLENGE_BYTES)
        _read_into(self._socket, memoryview(greeting))
        if not greeting.startswith(_MAGIC):
            raise TransferError(f"transfer to {self._address}: what listens there is no kvguard decode worker")
        proof = digester.authenticator(bytes(greeting[len(_MAGIC) :]))
        self._socket.sendall(_HELLO.pack(proof, self._segment.page_bytes))
        _read_into(self._socket, memoryview(bytearray(1)))

    def _move(self, batch: Batch, name: bytes) -> Iterator[int]:
        """Sends the pages and a flush, and reads the answer to it; gives what it waits for."""
        flush = memoryview(_FRAME.pack(_FLUSH, len(name), len(batch.source), 0, 0, 0) + name)
        left = len(batch.source)
        for source, page, tag in zip(batch.source, batch.destination, batch.tags.tolist(), strict=True):
            left -= 1
            head = memoryview(_FRAME.pack(_PAGE, len(name), page, *tag) + name)
            yield from self._send([head, self._bytes[source].data, *([] if left else [flush])])
        answer = b""
        while len(answer) < _COUNT.size:
            try:
                part = self._socket.recv(_COUNT.size - len(answer))
            except BlockingIOError:
                yield select.POLLIN
                continue
            if not part:
                raise EOFError
            answer += part
        (written,) = _COUNT.unpack(answer)
        if written != len(batch.source):
            raise TransferError(f"{batch.transfer}: it took {written} of {len(batch.source)} pages")

    def _send(self, parts: list[memoryview]) -> Iterator[int]:
        while parts:
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                yield select.POLLOUT
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]


class TcpReceiver:
    """See `engine.transport.link.Receiver`. One thread accepts, one more reads each connection."""

    def __init__(self, segment: Segment, digester: PageDigester) -> None:
        self._segment = segment
        self._digester = digester
        self._lock = threading.Lock()
        self._grants: dict[str, dict[int, int]] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.refused_connections = 0
        """Connections that were closed because of what they sent."""
        self.refused_pages = 0
        """Pages that were not granted."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def register(self, peer: str, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> str:
        """From now on the transfer may write these pages."""
        with self._lock:
            self._grants[transfer] = dict(zip(pages, generations, strict=True))
        return self.address

    def confirm(self, transfer: str, *, clean: bool) -> bool:
        """Pages are written by this side's own threads, under the lock: from now on they write none of these."""
        with self._lock:
            self._grants.pop(transfer, None)
        return True

    def forget(self, peer: str) -> None:
        """Its connections ended with it."""

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._closed = True
            self._grants.clear()
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            # shutdown, unlike close, wakes the thread that waits on it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                full = self._closed or len(self._connections) >= _MAX_CONNECTIONS
                if not full:
                    self._connections.add(connection)
            if full:
                connection.close()
            else:
                threading.Thread(target=self._serve, args=(connection,), name="kv-recv", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_TIMEOUT_S)
            self._handshake(connection)
            self._frames(connection)
        except (OSError, EOFError, ValueError):
            self.refused_connections += not self._closed
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _handshake(self, connection: socket.socket) -> None:
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        connection.sendall(_MAGIC + challenge)
        hello = bytearray(_HELLO.size)
        _read_into(connection, memoryview(hello))
        proof, page_bytes = _HELLO.unpack(hello)
        if not hmac.compare_digest(proof, self._digester.authenticator(challenge)):
            raise ValueError("the proof is wrong")
        if page_bytes != self._segment.page_bytes:
            raise ValueError(f"pages of {page_bytes} bytes, the pool has {self._segment.page_bytes}")
        connection.sendall(b"K")

    def _frames(self, connection: socket.socket) -> None:
        head = memoryview(bytearray(_FRAME.size))
        page_data = torch.empty(self._segment.page_bytes, dtype=torch.uint8)
        written: dict[str, int] = {}
        while self._wait_for_frame(connection):
            _read_into(connection, head)
            kind, length, number, *tag = _FRAME.unpack(head)
            if kind not in (_PAGE, _FLUSH) or not 1 <= length <= _MAX_ID_BYTES:
                raise ValueError(f"no frame: kind {kind}, id of {length} bytes")
            name = bytearray(length)
            _read_into(connection, memoryview(name))
            transfer = name.decode()
            if kind == _FLUSH:
                connection.sendall(_COUNT.pack(written.pop(transfer, 0)))
                continue
            _read_into(connection, page_data.numpy().data)
            # Under the lock, so that after `confirm` nothing is written; the page is read aside first, so that
            # a slow sender does not hold the lock.
            with self._lock:
                if self._grants.get(transfer, {}).get(number) == tag[2]:
                    self._segment.put(number, page_data, np.array(tag, dtype=np.int64))
                    written[transfer] = written.get(transfer, 0) + 1
                else:
                    self.refused_pages += 1

    def _wait_for_frame(self, connection: socket.socket) -> bool:
        """Waits as long as it takes; False at the end of the stream."""
        connection.settimeout(None)
        more = bool(connection.recv(1, socket.MSG_PEEK))
        connection.settimeout(_TIMEOUT_S)
        return more


def _id(transfer: str) -> bytes:
    name = transfer.encode()
    if not 1 <= len(name) <= _MAX_ID_BYTES:
        raise TransferError(f"transfer id of {len(name)} bytes; 1 to {_MAX_ID_BYTES} can be sent")
    return name


def _ready(connection: socket.socket, event: int, wait_s: float) -> bool:
    poller = select.poll()
    poller.register(connection, event)
    return bool(poller.poll(wait_s * 1000))


def _why(error: Exception) -> str:
    return str(error) or "closed by the other side; do digest_key and page size agree?"


def _read_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills the buffer.

    Raises:
        EOFError: The stream ended before.
        OSError: The connection broke or timed out.
    """
    done = 0
    while done < len(buffer):
        size = connection.recv_into(buffer[done:])
        if not size:
            raise EOFError
        done += size
