"""A TCP proxy that does harm to what a sender sends, once, at a given place in the stream."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

SPAN = 1000
"""Bytes that a fault is about."""


def _flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 4]) + data[1:]


def _reorder(data: bytes) -> bytes:
    return data[SPAN // 2 :] + data[: SPAN // 2]


FAULTS: dict[str, Callable[[bytes], bytes | None]] = {
    "none": lambda data: data,
    "delay": lambda data: data,
    "flip": _flip,
    "reorder": _reorder,
    "drop": lambda _: b"",
    "duplicate": lambda data: data + data,
    "cut": lambda _: None,
}
"""What becomes of the span; None: the connection ends."""


class Proxy:
    """Stands between a sender and a receiver for one connection.

    Args:
        address: ``tcp:HOST:PORT`` of the receiver.
        fault: Of `FAULTS`.
        at: Where the span begins, in bytes from the sender.

    Attributes:
        address: What the sender is told instead.
        reached: Set when the span has come.
        go_on: With the fault ``delay``, nothing of the span goes on before this is set.
    """

    def __init__(self, address: str, fault: str, at: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._fault, self._at = fault, at
        if fault != "delay":
            self.go_on.set()
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends everything."""
        self.go_on.set()
        for end in (self._listener, *self._ends):
            _shut(end)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            sender, _ = self._listener.accept()
        except OSError:
            return
        receiver = socket.create_connection(self._target)
        self._ends = [sender, receiver]
        back = threading.Thread(target=self._back, args=(receiver, sender))
        back.start()
        with suppress(OSError):
            self._forth(sender, receiver)
        _shut(receiver)
        _shut(sender)
        back.join()

    def _back(self, receiver: socket.socket, sender: socket.socket) -> None:
        with suppress(OSError):
            while data := receiver.recv(65_536):
                sender.sendall(data)
        _shut(sender)

    def _forth(self, sender: socket.socket, receiver: socket.socket) -> None:
        passed = 0
        while passed < self._at:
            data = sender.recv(min(65_536, self._at - passed))
            if not data:
                return
            passed += len(data)
            receiver.sendall(data)
        span = b""
        while len(span) < SPAN:
            data = sender.recv(SPAN - len(span))
            if not data:
                break
            span += data
        self.reached.set()
        self.go_on.wait()
        harmed = FAULTS[self._fault](span)
        if harmed is None:
            return
        receiver.sendall(harmed)
        while data := sender.recv(65_536):
            receiver.sendall(data)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
