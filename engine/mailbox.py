"""A process's inbox and its way to the inboxes of others; see `engine.messages` for who says what to whom."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
import zmq

from engine.messages import AnyMessage, Message, decode, encode, inbox

_QUEUE = 65_536
_TAKE = 256
"""Messages taken at once, so that a flood cannot keep a worker from its step."""


class Mailbox:
    """Typed messages over ZeroMQ. Only `wake` may be called from another thread, or from a signal.

    Args:
        run_dir: Where all inboxes are.
        name: Whose inbox this is.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir = run_dir
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(_QUEUE)
        self._inbox.bind(inbox(run_dir, name))
        self._out: dict[str, zmq.Socket[bytes]] = {}
        self._wake_read, self.wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self.unreadable = 0
        """Messages that were none."""
        self.undelivered = 0
        """Messages given up because a receiver takes none."""

    def send(self, to: str, message: Message) -> None:
        """Queues a message for a process; it need not be up yet. Never blocks."""
        socket = self._out.get(to)
        if socket is None:
            socket = self._out[to] = self._context.socket(zmq.PUSH)
            socket.set_hwm(_QUEUE)
            socket.connect(inbox(self._run_dir, to))
        try:
            socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self.undelivered += 1

    def receive(self, timeout_ms: float) -> list[AnyMessage]:
        """The messages that are there; waits for the first one up to `timeout_ms`, or until `wake`."""
        ready = dict(self._poller.poll(int(timeout_ms)))
        if not ready and 0 < timeout_ms < 1:
            time.sleep(timeout_ms / 1000)  # the poller knows whole milliseconds only
            ready = dict(self._poller.poll(0))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        messages: list[AnyMessage] = []
        if self._inbox in ready:
            with contextlib.suppress(zmq.Again):
                for _ in range(_TAKE):
                    data = self._inbox.recv(zmq.DONTWAIT)
                    try:
                        messages.append(decode(data))
                    except msgspec.MsgspecError:
                        self.unreadable += 1
        return messages

    def wake(self) -> None:
        """Ends the wait of `receive`, this one or the next."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.wake_fd, b"\0")

    def close(self) -> None:
        """Closes; what is queued for others has 200 ms to leave."""
        for socket in (self._inbox, *self._out.values()):
            socket.close(linger=200)
        self._context.term()
        os.close(self._wake_read)
        os.close(self.wake_fd)
