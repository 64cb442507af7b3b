"""The two ends of a transfer, whatever carries it: the verbs, and the kinds that there are."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.digest import PageDigester
from engine.segment import Segment

Kind = Literal["shm", "tcp", "nixl", "mooncake"]
EXTRAS: dict[str, str] = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}
"""Kinds that need an extra of the same name, and the module that it brings."""
MAX_ADDRESS_BYTES = 4096
_SPIN_S, _PAUSE_S = 500e-6, 20e-6


class TransferError(RuntimeError):
    """Pages could not be put where they belong; the message says why."""


class MissingError(TransferError):
    """The library that carries this kind cannot be loaded; the message names the extra that brings it."""


class Fate(Enum):
    """What has become of a batch, as far as the sender's side of the transport knows."""

    MOVING = auto()
    """Bytes may be moving, and the source is read."""
    DONE = auto()
    """Every page's bytes, and after them its tag, are in the destination."""
    FAILED = auto()
    """Over: the source is read no more. Of what was under way to the destination, only the receiver can tell."""


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that follow one another on both sides."""

    source: int
    destination: int
    start: int
    """The first one's place in the batch."""
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pages that are posted together.

    Attributes:
        transfer: What the receiver registered the destination for.
        source: Pages of the sender's pool.
        destination: Pages of the receiver's pool, in the same order.
        tags: [pages, 3] int64, the owner tags that the destination gets. (numpy: torch takes tens of microseconds for
            what little is done with them here, when its code is not in the cache.)
    """

    transfer: str
    source: Sequence[int]
    destination: Sequence[int]
    tags: NDArray[np.int64]

    def runs(self) -> Iterator[Run]:
        """The batch in as few pieces as there are breaks in either side's order."""
        pairs = list(zip(self.source, self.destination, strict=True))
        breaks = [n for n, ((a, b), (c, d)) in enumerate(pairwise(pairs), 1) if (c, d) != (a + 1, b + 1)]
        for start, stop in pairwise([0, *breaks, len(pairs)]):
            yield Run(*pairs[start], start, stop - start)

    def check(self, source_pages: int, destination_pages: int) -> None:
        """That the batch fits pools of those sizes.

        Raises:
            TransferError: A page is outside, or there is none; nothing must be posted.
        """
        if not self.source:
            raise TransferError(f"{self.transfer}: a batch of no pages")
        for side, pages, size in (
            ("source", self.source, source_pages),
            ("destination", self.destination, destination_pages),
        ):
            # min and max, since a loop here takes as long as the posting.
            if not 0 <= min(pages, default=0) <= max(pages, default=0) < size:
                outside = next(page for page in pages if not 0 <= page < size)
                raise TransferError(f"{self.transfer}: {side} page {outside} of a pool of {size}")
        if not len(self.source) == len(self.destination) == len(self.tags):
            raise TransferError(
                f"{self.transfer}: {len(self.source)} source pages, {len(self.destination)} destination pages and "
                f"{len(self.tags)} tags"
            )


class Link(Protocol):
    """A sender's way from its pool to one other. Used by one thread at a time; carries one batch at a time."""

    error: str
    """Why the last batch failed."""

    def post(self, batch: Batch) -> None:
        """Begins to move a batch.

        Raises:
            TransferError: It is none that can be moved; nothing has begun.
        """

    def poll(self, wait_s: float) -> Fate:
        """Moves the batch on, or waits for it, about `wait_s` at most; what has become of it by then."""

    def abort(self) -> None:
        """Asks for the end of the batch. The link is of no further use; `poll` says when the end has come."""

    def close(self) -> None:
        """Lets go; only while no batch is moving."""


class Receiver(Protocol):
    """The destination pool's side. Used by the worker's own thread."""

    address: str
    """Where the pool is; empty if each writer has an address of its own."""

    def register(self, peer: str, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> str:
        """Lets a worker write these pages, as these generations of theirs.

        Args:
            peer: The life of the worker that will write.
            transfer: The transfer's id.
            pages: Of this pool.
            generations: Of the pages, in the same order.

        Returns:
            The address, what that worker's `connect` takes.

        Raises:
            TransferError: Its access cannot be opened.
        """

    def confirm(self, transfer: str, *, clean: bool) -> bool:
        """Whether nothing of a transfer can be written from now on; to be asked again until it is so.

        Only to be asked when the writer has said that the transfer is over at its side, or its process has ended.

        Args:
            transfer: Which; one that is not known is over.
            clean: The writer's own transport has confirmed all that it posted. If not, the writer's access is closed,
                and with it the other transfers that it has under way.
        """

    def forget(self, peer: str) -> None:
        """That worker's process has ended: it is given nothing any more."""

    def close(self) -> None:
        """Lets go of everything."""


def ask(steps: Iterator[None], wait_s: float) -> Fate:
    """Asks a library that has to be asked, until a batch is done or the time is up.

    The first half of a millisecond whoever has to do something for it only gets the core in between; after that the
    library is also asked more seldom.

    Args:
        steps: Each looks once how far the batch is; over when it is done. What they raise goes on to the caller.
        wait_s: How long to wait at most.
    """
    started = time.perf_counter()
    while next(steps, steps) is not steps:
        waited = time.perf_counter() - started
        if waited > wait_s:
            return Fate.MOVING
        if waited < _SPIN_S:
            os.sched_yield()
        else:
            time.sleep(_PAUSE_S)
    return Fate.DONE


def load(kind: Kind) -> None:
    """Loads the library that carries a kind.

    Raises:
        MissingError: It is not installed, or does not load.
    """
    module = EXTRAS.get(kind)
    if module is None:
        return
    importlib.import_module(f"engine.transport.{kind}").prepare()
    try:
        importlib.import_module(module)
    except ImportError as error:
        remedy = f"pip install 'kvguard[{kind}]'" + (", and Debian's libibverbs1" if kind == "mooncake" else "")
        raise MissingError(f"transport {kind}: its library cannot be loaded ({error}); {remedy}") from error


def connect(kind: Kind, address: str, segment: Segment, digester: PageDigester) -> Link:
    """A link to the pool at an address.

    Args:
        kind: What this engine's transfers go over.
        address: From a `Receiver`.
        segment: The source pool, the only memory that is registered; the other must have pages of the same size.
        digester: Has the key that both sides know.

    Raises:
        TransferError: The address is none, or of another kind, nobody is there, or the two sides do not fit.
    """
    if len(address.encode()) > MAX_ADDRESS_BYTES:
        raise TransferError(
            f"transfer address of {len(address.encode())} bytes; none has more than {MAX_ADDRESS_BYTES}"
        )
    found, _, rest = address.partition(":")
    if found != kind:
        raise TransferError(
            f"transfer address {address!r:.100}: it must start with {kind}:, which both sides have to use"
        )
    if kind == "shm":
        from engine.transport.shm import ShmLink

        return ShmLink(rest, segment)
    if kind == "tcp":
        from engine.transport.tcp import TcpLink

        return TcpLink(rest, segment, digester)
    load(kind)
    if kind == "nixl":
        from engine.transport.nixl import NixlLink

        return NixlLink(rest, segment, digester)
    from engine.transport.mooncake import MooncakeLink

    return MooncakeLink(rest, segment, digester)


def listen(kind: Kind, segment: Segment, digester: PageDigester, wake: Callable[[], None] = lambda: None) -> Receiver:
    """The receiver of a pool.

    Args:
        kind: What this engine's transfers go over.
        segment: The pool.
        digester: Has the key that both sides know.
        wake: Called, from any thread, when a `confirm` that said no would say yes.

    Raises:
        MissingError: The kind's library cannot be loaded.
    """
    if kind == "shm":
        from engine.transport.shm import ShmReceiver

        return ShmReceiver(segment)
    if kind == "tcp":
        from engine.transport.tcp import TcpReceiver

        return TcpReceiver(segment, digester)
    load(kind)
    from engine.transport.access import AccessReceiver

    if kind == "nixl":
        from engine.transport.nixl import NixlAccess

        return AccessReceiver(lambda: NixlAccess(segment, digester), wake)
    from engine.transport.mooncake import MooncakeAccess

    return AccessReceiver(lambda: MooncakeAccess(segment, digester), wake)
