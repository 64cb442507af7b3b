"""The receiving end where the other side writes into the pool by itself, as with RDMA.

Nothing stands between such a writer and the pool that could refuse a page. So each life of a worker that may write
gets an *access* of its own: an instance of the library with the pool registered in it. What the writer's process does
to the pool by itself ends with its word that it does no more, or with its life. What is left is what this process's
library would still do for it, out of a socket's buffer for instance. After a transfer that ended well there is nothing
of that, which is what the writer's library has confirmed; after any other, and after the writer's death, the instance
is destroyed, which joins its threads. That takes up to a second, so it is done aside.

The address of an access is `KIND:BODY:PROOF`. The proof is made with the key that both sides have, over the body, so
that a library is never given an address that this engine did not make.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.digest import PageDigester
from engine.transport.link import MAX_ADDRESS_BYTES, TransferError


def seal(kind: str, body: str, digester: PageDigester) -> str:
    """The address with that body."""
    address = f"{kind}:{body}:{_proof(kind, body, digester)}"
    if len(address.encode()) > MAX_ADDRESS_BYTES:
        raise TransferError(f"transport {kind}: an address of {len(address)} bytes; {MAX_ADDRESS_BYTES} can be sent")
    return address


def unseal(kind: str, rest: str, digester: PageDigester) -> list[str]:
    """The fields, separated by colons, of an address's body.

    Args:
        kind: Of the address.
        rest: The address without its kind.
        digester: Has the key.

    Raises:
        TransferError: The proof is not the body's.
    """
    body, _, proof = rest.rpartition(":")
    if not hmac.compare_digest(proof.encode(), _proof(kind, body, digester).encode()):
        raise TransferError(f"transfer address {kind}:{rest!r:.100}: not made with this digest_key")
    return body.split(":")


def check_page_bytes(kind: str, theirs: int, ours: int) -> None:
    """That both sides have pages of one size.

    Raises:
        TransferError: They have not.
    """
    if theirs != ours:
        raise TransferError(
            f"transport {kind}: pages of {ours} bytes here and of {theirs} there; the workers must agree on model, "
            "dtype and page_tokens"
        )


def _proof(kind: str, body: str, digester: PageDigester) -> str:
    return digester.authenticator(f"{kind} address {body}".encode()).hex()


class Access(Protocol):
    """What one writer writes through."""

    address: str

    def expect(self, transfers: int) -> None:
        """So many transfers go through it now."""

    def close(self) -> None:
        """When this returns, nothing is written through it any more."""


class _Opened:
    """An access, and how far its end has come."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.transfers = 0
        self.closing = False
        self.closed = threading.Event()

    def count(self, change: int) -> None:
        """So many transfers more, or less, go through it."""
        self.transfers += change
        if not self.closing:
            self.access.expect(self.transfers)

    def close(self, wake: Callable[[], None]) -> None:
        """Begins to close it, unless that was begun already."""
        if self.closing:
            return
        self.closing = True

        def close() -> None:
            self.access.close()
            self.closed.set()
            wake()

        # Not a daemon: a library that is torn down under the interpreter's end crashes.
        threading.Thread(target=close, name="kv-close").start()


class AccessReceiver:
    """See `engine.transport.link.Receiver`, and the module.

    Args:
        open_access: Makes one.
        wake: Called when one is closed.
    """

    def __init__(self, open_access: Callable[[], Access], wake: Callable[[], None]) -> None:
        self.address = ""
        self._open = open_access
        self._wake = wake
        self._by_peer: dict[str, _Opened] = {}
        self._by_transfer: dict[str, _Opened] = {}

    def register(self, peer: str, transfer: str, pages: Sequence[int], generations: Sequence[int]) -> str:
        """The writer can write everywhere in the pool, through its own access."""
        opened = self._by_peer.get(peer)
        if opened is None or opened.closing:
            opened = self._by_peer[peer] = _Opened(self._open())
        self._by_transfer[transfer] = opened
        opened.count(1)
        return opened.access.address

    def confirm(self, transfer: str, *, clean: bool) -> bool:
        """A doubtful transfer is over when the access that it went through is closed."""
        opened = self._by_transfer.get(transfer)
        if opened is None:
            return True
        if not clean:
            opened.close(self._wake)
            if not opened.closed.is_set():
                return False
        del self._by_transfer[transfer]
        opened.count(-1)
        return True

    def forget(self, peer: str) -> None:
        """Its access is closed."""
        opened = self._by_peer.pop(peer, None)
        if opened is not None:
            opened.close(self._wake)

    def close(self) -> None:
        """Closes all, and waits for it."""
        opened = {*self._by_peer.values(), *self._by_transfer.values()}
        self._by_peer.clear()
        self._by_transfer.clear()
        for each in opened:
            each.close(self._wake)
        for each in opened:
            each.closed.wait()
