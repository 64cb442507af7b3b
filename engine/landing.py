"""Where prompts' pages arrive: reserved at prefill, written by the transport, checked, or given up."""

from __future__ import annotations

import secrets

from engine.answer import Answer
from engine.faults import Fault
from engine.host import Host
from engine.messages import Handoff, Reserve, StopTransfer
from engine.sequence import Sequence
from engine.transport.link import Receiver, TransferError
from guard.records import Side, TransferEnd, TransferStatus
from hooks.digest import NONCE_BYTES

_BELIEVED = frozenset({Fault.SWALLOWED_REJECT, Fault.PARTIAL_TRANSFER})
"""Faults from engines that took the sender's word for how much had arrived."""


class Landing:
    """The decode worker's side of transfers.

    Pages wait for a transfer until its sender has said that it is over, or is dead, and the transport has confirmed
    that nothing is written any more; nothing here goes by a clock. The end of every transfer passes `_over`.

    Args:
        host: The worker's means.
        receiver: Of the worker's pool.
    """

    def __init__(self, host: Host, receiver: Receiver) -> None:
        self._host = host
        self._pool = host.pool
        self._receiver = receiver
        self._faults = host.config.faults
        self._unconfirmed: dict[str, tuple[Sequence, TransferStatus, list[int]]] = {}

    @property
    def unconfirmed(self) -> int:
        """Transfers that their senders know nothing of any more and the transport has not confirmed to be over."""
        return len(self._unconfirmed)

    def reserve(self, request: Answer) -> str:
        """Tells prefill where the prompt's pages go. Returns why it cannot; empty if it could."""
        host, message, pool = self._host, request.message, self._pool
        request.landing = request.sequence.pages[: pool.pages_for(len(message.prompt))]
        request.nonce = secrets.token_bytes(NONCE_BYTES)
        generations = [pool.generation(page) for page in request.landing]
        request.generations = dict(zip(request.landing, generations, strict=True))
        peer = _peer(message.prefill, message.prefill_epoch)
        try:
            address = self._receiver.register(peer, request.transfer, request.landing, generations)
        except TransferError as error:
            return f"No pages can be received: {error}"
        if Fault.EARLY_FREE not in self._faults:
            pool.hold(request.transfer, request.landing)
        host.mailbox.send(
            message.prefill,
            Reserve(
                request=request.name,
                epoch=message.prefill_epoch,
                decode=host.name,
                decode_epoch=host.epoch,
                transfer=request.transfer,
                pages=request.landing,
                generations=generations,
                nonce=request.nonce,
                address=address,
            ),
        )
        return ""

    def stop(self, request: Answer) -> None:
        """Asks prefill to write no more, and to say so."""
        message = request.message
        self._host.mailbox.send(
            message.prefill,
            StopTransfer(
                request=request.name,
                epoch=message.prefill_epoch,
                decode=self._host.name,
                decode_epoch=self._host.epoch,
                transfer=request.transfer,
            ),
        )

    def arrived(self, request: Answer, handoff: Handoff) -> tuple[int, str]:
        """Checks and records what arrived whole, by the sender's word.

        Returns:
            The record's place in the stream, and what is wrong with the pages; empty if nothing is.
        """
        self._receiver.confirm(request.transfer, clean=True)
        self._let_go(request.transfer, request.sequence)
        digests = None
        if self._host.config.digests:
            tenant, pages = request.sequence.tenant, handoff.pages
            # The first one, unless a fault sent other pages.
            first = request.landing.index(pages[0]) if pages and pages[0] in request.landing else 0
            # As they were granted: whether a page is still the request's, its tag tells at the read.
            generations = [request.generations.get(page, self._pool.generation(page)) for page in pages]
            digests = self._host.digester.pages(
                self._pool.segment.data, tenant, request.name, pages, first,
                generations=generations, nonce=request.nonce,
            )  # fmt: skip
        problem = self._problem(request, handoff, digests)
        status = TransferStatus.FAILED if problem else TransferStatus.OK
        sequence = request.sequence
        return self._over(request.transfer, sequence, status, handoff.pages, handoff.tokens, digests), problem

    def ended(self, request: Answer, status: TransferStatus, pages: list[int], *, clean: bool) -> None:
        """The sender says that the transfer is over, or its process has ended; not everything arrived.

        Its pages come back, and its end is recorded, when the transport confirms it: now or in a later `settle`.

        Args:
            request: Which.
            status: For the record.
            pages: That may have been written; none: nothing was begun, and nothing is recorded.
            clean: See `engine.transport.link.Receiver.confirm`.
        """
        if clean:
            self._receiver.confirm(request.transfer, clean=True)
            self._close(request.transfer, request.sequence, status, pages)
        else:
            self._unconfirmed[request.transfer] = request.sequence, status, pages
            self.settle()

    def settle(self) -> None:
        """Takes note of what the transport has confirmed by now."""
        for transfer, (sequence, status, pages) in list(self._unconfirmed.items()):
            if self._receiver.confirm(transfer, clean=False):
                del self._unconfirmed[transfer]
                self._close(transfer, sequence, status, pages)

    def forget(self, worker: str, epoch: int) -> None:
        """That worker's process has ended."""
        self._receiver.forget(_peer(worker, epoch))

    def close(self) -> None:
        """Lets go of the transport."""
        self._receiver.close()

    def _close(self, transfer: str, sequence: Sequence, status: TransferStatus, pages: list[int]) -> None:
        if pages:
            self._over(transfer, sequence, status, pages, 0)
        self._let_go(transfer, sequence)

    def _over(
        self,
        transfer: str,
        sequence: Sequence,
        status: TransferStatus,
        pages: list[int],
        tokens: int,
        digests: list[str] | None = None,
    ) -> int:
        """Records that the transfer is over on this side. Returns the record's place in the stream."""
        return self._host.emit(
            TransferEnd,
            sequence,
            pages,
            transfer=transfer,
            side=Side.RECV,
            tokens=tokens,
            status=status,
            digests=None if digests is None else tuple(digests),
        )

    def _let_go(self, transfer: str, sequence: Sequence) -> None:
        """The pages wait for the transfer no longer."""
        for pages in self._pool.unhold(transfer).values():
            self._host.freed(sequence, pages)

    def _problem(self, request: Answer, handoff: Handoff, digests: list[str] | None) -> str:
        """What is wrong with what arrived; empty if nothing is."""
        whole = handoff.pages == request.landing and handoff.tokens == len(request.message.prompt)
        if handoff.first_token is None:
            return "The hand-off has no first token."
        if not whole and not _BELIEVED.intersection(self._faults):
            return (
                f"{handoff.tokens} tokens in {len(handoff.pages)} pages arrived of "
                f"{len(request.message.prompt)} in {len(request.landing)}."
            )
        differs = handoff.digests is not None and digests is not None and handoff.digests != digests
        if differs and Fault.ARRIVE_BEFORE_VISIBLE not in self._faults:
            return "The bytes that arrived are not those that were sent."
        return ""


def _peer(worker: str, epoch: int) -> str:
    return f"{worker}/{epoch}"
