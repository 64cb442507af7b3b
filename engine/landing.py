"""Where prompts' pages arrive: reserved at prefill, written by the transport, checked, or given up."""

from __future__ import annotations

import secrets

from engine.answer import Answer
from engine.faults import Fault
from engine.host import Host
from engine.messages import Handoff, Reserve, StopTransfer
from engine.transport.link import Receiver
from guard.records import Side, TransferEnd, TransferStatus
from hooks.digest import NONCE_BYTES

_BELIEVED = frozenset({Fault.SWALLOWED_REJECT, Fault.PARTIAL_TRANSFER})
"""Faults from engines that took the sender's word for how much had arrived."""


class Landing:
    """The decode worker's side of transfers.

    Args:
        host: The worker's means.
        receiver: Of the worker's pool.
    """

    def __init__(self, host: Host, receiver: Receiver) -> None:
        self._host = host
        self._pool = host.pool
        self._receiver = receiver
        self._faults = host.config.faults

    def reserve(self, request: Answer) -> None:
        """Tells prefill where the prompt's pages go."""
        host, message, pool = self._host, request.message, self._pool
        request.landing = request.sequence.pages[: pool.pages_for(len(message.prompt))]
        request.nonce = secrets.token_bytes(NONCE_BYTES)
        generations = [pool.generation(page) for page in request.landing]
        self._receiver.grant(request.transfer, request.landing, generations)
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
                address=self._receiver.address,
            ),
        )

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
        """Checks and records what arrived.

        Returns:
            The record's place in the stream, and what is wrong with the pages; empty if nothing is.
        """
        digests = None
        if self._host.config.digests:
            tenant, pages = request.sequence.tenant, handoff.pages
            # The first one, unless a fault sent other pages.
            first = request.landing.index(pages[0]) if pages and pages[0] in request.landing else 0
            digests = self._host.digester.pages(
                self._pool.segment.data, tenant, request.name, pages, first,
                generations=[self._pool.generation(page) for page in pages], nonce=request.nonce,
            )  # fmt: skip
        problem = self._problem(request, handoff, digests)
        status = TransferStatus.FAILED if problem else TransferStatus.OK
        return self.ended(request, status, handoff.pages, handoff.tokens, digests), problem

    def ended(
        self,
        request: Answer,
        status: TransferStatus,
        pages: list[int],
        tokens: int,
        digests: list[str] | None = None,
    ) -> int:
        """Records that the transfer is over on this side. Returns the record's place in the stream."""
        return self._host.emit(
            TransferEnd,
            request.sequence,
            pages,
            transfer=request.transfer,
            side=Side.RECV,
            tokens=tokens,
            status=status,
            digests=None if digests is None else tuple(digests),
        )

    def let_go(self, request: Answer) -> None:
        """The pages wait for the transfer no longer."""
        self._receiver.revoke(request.transfer)
        for pages in self._pool.unhold(request.transfer).values():
            self._host.freed(request.sequence, pages)

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
