"""The two ends of a transfer, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from engine.digest import PageDigester
from engine.segment import Segment


class TransferError(RuntimeError):
    """Pages could not be put where they belong; the message says why."""


class Link(Protocol):
    """A sender's way to one destination pool. Used by one thread at a time."""

    def put(self, transfer: str, page: int, data: Tensor, tag: Tensor) -> None:
        """Puts one page, [page bytes] uint8, and its tag, [3] int64, there.

        Raises:
            TransferError: It cannot be done; the link is of no further use.
        """

    def flush(self, transfer: str, pages: int) -> None:
        """Returns when the pages put since the last flush are visible in the destination.

        Raises:
            TransferError: The receiver took fewer than `pages`, or does not answer.
        """

    def close(self) -> None:
        """Lets go."""


class Receiver(Protocol):
    """The destination pool's side."""

    address: str
    """What `connect` takes."""

    def grant(self, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Lets the transfer write these pages, as these generations of theirs."""

    def revoke(self, transfer: str) -> None:
        """When this returns, no byte of the transfer is written any more, as far as the transport can see to it."""

    def close(self) -> None:
        """Lets go of everything."""


def connect(address: str, page_bytes: int, digester: PageDigester) -> Link:
    """A link to the pool at an address.

    Args:
        address: Of a `Receiver`.
        page_bytes: Of this side; the other must have the same.
        digester: Has the key that both sides know.

    Raises:
        TransferError: The address is none, nobody is there, or the two sides do not fit.
    """
    from engine.transport.shm import ShmLink
    from engine.transport.tcp import TcpLink

    kind, _, rest = address.partition(":")
    if kind == "shm":
        return ShmLink(rest, page_bytes)
    if kind == "tcp":
        return TcpLink(rest, page_bytes, digester)
    raise TransferError(f"transfer address {address!r:.100}: must start with shm: or tcp:")


def listen(kind: Literal["shm", "tcp"], segment: Segment, digester: PageDigester) -> Receiver:
    """The receiver of a pool."""
    from engine.transport.shm import ShmReceiver
    from engine.transport.tcp import TcpReceiver

    return ShmReceiver(segment) if kind == "shm" else TcpReceiver(segment, digester)
