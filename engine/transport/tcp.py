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
import socket
import struct
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.digest import PageDigester
from engine.segment import Segment
from engine.transport.link import TransferError

_MAGIC = b"KVG1"
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_FRAME = struct.Struct("<BHQqqq")
_HELLO = struct.Struct(f"<{_PROOF_BYTES}sI")
_COUNT = struct.Struct("<Q")
_PAGE, _FLUSH = 1, 2
_MAX_ID_BYTES = 1024
_MAX_CONNECTIONS = 64
_TIMEOUT_S = 10.0
"""For what the other side owes us at once: the handshake, the rest of a frame, the answer to a flush."""


class TcpLink:
    """See `engine.transport.link.Link`."""

    def __init__(self, address: str, page_bytes: int, digester: PageDigester) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        except (OSError, ValueError, OverflowError) as error:
            raise TransferError(f"transfer to {address!r:.100}: {error}") from error
        self._address = address
        self._page_bytes = page_bytes
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = self._read(len(_MAGIC) + _CHALLENGE_BYTES)
            if not greeting.startswith(_MAGIC):
                raise TransferError(f"transfer to {address}: what listens there is no kvguard decode worker")
            self._send(_HELLO.pack(digester.authenticator(greeting[len(_MAGIC) :]), page_bytes))
            self._read(1)
        except TransferError:
            self.close()
            raise

    def put(self, transfer: str, page: int, data: Tensor, tag: Tensor) -> None:
        """Sends the page."""
        if data.numel() != self._page_bytes:
            raise TransferError(f"{transfer}: a page of {data.numel()} bytes, the link carries {self._page_bytes}")
        self._send(_frame(_PAGE, transfer, page, tag.tolist()))
        self._send(data.numpy().data)

    def flush(self, transfer: str, pages: int) -> None:
        """Waits for the receiver's count."""
        self._send(_frame(_FLUSH, transfer, pages, (0, 0, 0)))
        (written,) = _COUNT.unpack(self._read(_COUNT.size))
        if written != pages:
            raise TransferError(f"{transfer}: {self._address} took {written} of {pages} pages")

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise TransferError(f"transfer to {self._address}: {error}") from error

    def _read(self, size: int) -> bytes:
        buffer = bytearray(size)
        try:
            _read_into(self._socket, memoryview(buffer))
        except (OSError, EOFError) as error:
            reason = str(error) or "closed by the other side; do digest_key and page size agree?"
            raise TransferError(f"transfer to {self._address}: {reason}") from error
        return bytes(buffer)


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

    def grant(self, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> None:
        """From now on the transfer may write these pages."""
        with self._lock:
            self._grants[transfer] = dict(zip(pages, generations, strict=True))

    def revoke(self, transfer: str) -> None:
        """From now on it may write none."""
        with self._lock:
            self._grants.pop(transfer, None)

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
            # Under the lock, so that after `revoke` nothing is written; the page is read aside first, so that
            # a slow sender does not hold the lock.
            with self._lock:
                if self._grants.get(transfer, {}).get(number) == tag[2]:
                    self._segment.put(number, page_data, torch.tensor(tag, dtype=torch.int64))
                    written[transfer] = written.get(transfer, 0) + 1
                else:
                    self.refused_pages += 1

    def _wait_for_frame(self, connection: socket.socket) -> bool:
        """Waits as long as it takes; False at the end of the stream."""
        connection.settimeout(None)
        more = bool(connection.recv(1, socket.MSG_PEEK))
        connection.settimeout(_TIMEOUT_S)
        return more


def _frame(kind: int, transfer: str, number: int, tag: Sequence[int]) -> bytes:
    name = transfer.encode()
    if not 1 <= len(name) <= _MAX_ID_BYTES:
        raise TransferError(f"transfer id of {len(name)} bytes; 1 to {_MAX_ID_BYTES} can be sent")
    return _FRAME.pack(kind, len(name), number, *tag) + name


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
