"""The workers as the router knows them: who is there, how big, how busy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from engine.config import EngineConfig
from engine.messages import Hello, Message, Stats, encode
from guard.records import Role

ROUTER = "router-0"
SUPERVISOR = "supervisor"
"""Names of the inboxes that are no worker's."""

SEND_QUEUE = 10_000
"""Messages that may wait for one worker; one that leaves more lying is as good as dead."""


@dataclass
class Worker:
    """One life of a worker, from its `Hello` to its death."""

    hello: Hello
    socket: zmq.Socket[bytes]
    """To its inbox."""
    requests: set[str] = field(default_factory=set)
    """Requests that it still has work to do for."""
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, which a successor bears too."""
        return self.hello.worker

    @property
    def epoch(self) -> int:
        """Which life."""
        return self.hello.epoch

    @property
    def capacity(self) -> int:
        """Tokens that its pool holds."""
        return self.hello.pages * self.hello.page_tokens

    def send(self, message: Message) -> bool:
        """Sends without waiting; False if the worker has not taken its messages for long."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def names(config: EngineConfig) -> Iterator[tuple[str, Role]]:
    """Every worker that there should be, with its role."""
    for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        for number in range(pool.workers):
            yield f"{role.value}-{number}", role


class Fleet:
    """The workers that live.

    Args:
        config: Says which there should be.
        address: A worker's name → the address of its inbox.
        context: Where sockets come from.
    """

    def __init__(
        self, config: EngineConfig, addresses: dict[str, str], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._expected = dict(names(config))
        self._addresses = addresses
        self._context = context
        self._live: dict[str, Worker] = {}
        self.deaths: dict[str, int] = dict.fromkeys(self._expected, 0)
        """How often each died."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._live.values())

    @property
    def expected(self) -> Iterable[str]:
        """Names of the workers that there should be."""
        return self._expected.keys()

    @property
    def missing(self) -> list[str]:
        """Workers that there should be and are not."""
        return [name for name in self._expected if name not in self._live]

    def get(self, name: str, epoch: int) -> Worker | None:
        """The worker, if it still lives that life."""
        worker = self._live.get(name)
        return worker if worker is not None and worker.epoch == epoch else None

    def join(self, hello: Hello) -> Worker | None:
        """A worker is up.

        Returns:
            The worker of the same name that it replaces, if that was not known to be dead; a repeated `Hello`
            replaces nobody.
        """
        if hello.worker not in self._expected:
            return None
        before = self._live.get(hello.worker)
        if before is not None and before.epoch == hello.epoch:
            return None
        if before is not None:
            self.leave(before)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.connect(self._addresses[hello.worker])
        self._live[hello.worker] = Worker(hello, socket)
        return before

    def leave(self, worker: Worker) -> None:
        """A worker died."""
        if self._live.pop(worker.name, None) is not None:
            self.deaths[worker.name] += 1
            # What it had not read is meant for no successor.
            worker.socket.close(0)

    def measure(self, stats: Stats) -> None:
        """Keeps what a worker says about itself."""
        worker = self.get(stats.worker, stats.epoch)
        if worker is not None:
            worker.gauges, worker.counters = stats.gauges, stats.counters

    def least_loaded(self, role: Role) -> Worker | None:
        """The live worker of that role with the fewest requests; None if there is none."""
        candidates = [worker for worker in self if worker.hello.role is role]
        return min(candidates, key=lambda worker: len(worker.requests), default=None)

    def close(self) -> None:
        """Closes all sockets."""
        for worker in self:
            worker.socket.close(0)
        self._live.clear()
