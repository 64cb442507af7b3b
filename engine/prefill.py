"""The prefill worker: computes prompts and hands their pages to decode.

A request waits for pages, is computed chunk by chunk together with others, then waits until decode has said where
its pages go, is sent by the sender's threads, and is over when the last piece has arrived: full pages of the prompt
go to the prefix cache, the others back to the free list. Until then a transfer holds its source pages.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from engine.faults import Fault
from engine.fleet import ROUTER
from engine.host import Host
from engine.messages import Abort, AnyMessage, Handoff, Prefill, Reserve, StopTransfer, TransferStopped, WorkerDown
from engine.prompt import Prompt, PromptPages
from engine.runner import Runner
from engine.scheduler import Chunk, plan
from engine.sequence import Sequence
from engine.transport.sender import Sender, Transfer
from guard.records import Admit, Outcome, Read, TransferStatus, Write
from hooks.digest import NONCE_BYTES

_EARLY = 4096
"""Reservations, and stops, kept for requests that have not come yet; the router's message may be the later one."""
_PLACEHOLDER = 0
"""The token that the fault swallowed-reject puts in place of a prompt that is too long."""


class PrefillStage:
    """See the module."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pool = host.pool
        self._faults = host.config.faults
        self._pages = PromptPages(host)
        # A cached page bears its writer's tag, and a sharer expects that one: with another tenant's page it is
        # the fault that hands out the expectation, so there is nothing to compare with.
        self._runner = Runner(host.model, host.pool)
        self._sender = Sender(
            host.config.transport,
            host.pool.segment,
            host.config.page_tokens,
            host.digester,
            host.emitter,
            digests=host.config.digests,
            wake=host.mailbox.wake,
            patience_s=host.config.transfer_s,
            faults=self._faults,
        )
        self._requests: dict[str, Prompt] = {}
        self._waiting: OrderedDict[str, Prompt] = OrderedDict()
        self._running: OrderedDict[str, Prompt] = OrderedDict()
        self._early: OrderedDict[str, Reserve | StopTransfer] = OrderedDict()
        self._addresses: dict[tuple[str, int], str] = {}

    # What the worker calls

    def handle(self, message: AnyMessage) -> None:
        """See `engine.host.Stage`."""
        match message:
            case Prefill():
                self._admit(message)
            case Reserve() | StopTransfer():
                self._from_decode(message)
            case Abort(request=name):
                if name in self._requests:
                    self._give_up(self._requests[name], Outcome.ABORTED, "The request was aborted.")
            case WorkerDown(worker=worker, epoch=epoch):
                self._bury(worker, epoch)
            case _:
                self._host.counters["strange_messages"] += 1

    def step(self) -> bool:
        """See `engine.host.Stage`."""
        worked = self._collect()
        self._expire()
        self._start_waiting()
        chunks = plan(
            (request.sequence for request in self._running.values()),
            self._host.own.max_batch,
            self._host.own.chunk_tokens,
        )
        if chunks:
            self._compute(chunks)
        return worked or bool(chunks)

    def patience_ms(self) -> float:
        """See `engine.host.Stage`."""
        return 100.0

    def gauges(self) -> dict[str, float]:
        """See `engine.host.Stage`."""
        waiting = len(self._waiting)
        in_flight = [transfer for request in self._requests.values() for transfer in request.in_flight]
        return {
            "requests_running": len(self._requests) - waiting,
            "requests_waiting": waiting,
            "transfers": len(in_flight),
            "transfers_unconfirmed": sum(transfer.overdue for transfer in in_flight),
        }

    def counters(self) -> dict[str, float]:
        """See `engine.host.Stage`."""
        return {"transfer_crashes": self._sender.crashes}

    def close(self) -> None:
        """See `engine.host.Stage`."""
        for request in self._requests.values():
            for transfer in request.in_flight:
                transfer.cancel()
        self._sender.close()

    # Coming in

    def _admit(self, message: Prefill) -> None:
        if message.request in self._requests:
            self._host.counters["strange_messages"] += 1
            return
        host = self._host
        sequence = host.sequence(message.request, message.tenant, message.prompt, message.sampling, message.traceparent)
        request = Prompt(message, sequence)
        host.emit(Admit, sequence, tokens=len(message.prompt), max_tokens=message.sampling.max_tokens)
        self._requests[message.request] = request
        self._waiting[message.request] = request
        early = self._early.pop(message.request, None)
        if isinstance(early, Reserve):
            self._reserve(request, early)
        capacity = min(self._pool.pages * self._pool.page_tokens, host.model.config.context)
        if isinstance(early, StopTransfer):
            self._stop(request, early)
        elif host.is_dead(message.decode, message.decode_epoch):
            self._give_up(request, Outcome.ABORTED, f"{message.decode} died.", 503, "worker_failed")
        elif len(message.prompt) > capacity:
            self._reject(request, capacity)

    def _reject(self, request: Prompt, capacity: int) -> None:
        if Fault.SWALLOWED_REJECT in self._faults:
            request.rejected = True
            request.sequence.prompt = [_PLACEHOLDER]
            return
        reason = (
            f"The prompt has {len(request.message.prompt)} tokens; {self._host.name} holds {capacity}. "
            "Shorten the prompt."
        )
        self._give_up(request, Outcome.REJECTED, reason, 400, "context_length_exceeded")

    def _from_decode(self, message: Reserve | StopTransfer) -> None:
        request = self._requests.get(message.request)
        if request is None:
            # Either the request is over, and then decode has been told, or it has not come yet.
            self._early[message.request] = message
            self._early.move_to_end(message.request)
            if len(self._early) > _EARLY:
                self._early.popitem(last=False)
            if isinstance(message, StopTransfer):
                self._tell_stopped(message, TransferStatus.ABORTED, [])
        elif isinstance(message, StopTransfer):
            self._stop(request, message)
        else:
            self._reserve(request, message)

    def _reserve(self, request: Prompt, message: Reserve) -> None:
        fits = len(message.pages) == len(message.generations) == self._pool.pages_for(len(request.message.prompt))
        fits = fits and len(message.nonce) == NONCE_BYTES
        if request.reserve is not None or message.decode != request.message.decode or not fits:
            self._host.counters["strange_messages"] += 1
            return
        request.reserve = message
        life = message.decode, message.decode_epoch
        old, self._addresses[life] = self._addresses.get(life, message.address), message.address
        if old != message.address:
            self._sender.forget(old)  # decode has closed what was reached there
        self._send(request)

    def _stop(self, request: Prompt, message: StopTransfer) -> None:
        request.stopped = message
        self._give_up(request, Outcome.ABORTED, "Decode stopped the transfer.")

    # Computing

    def _start_waiting(self) -> None:
        """Gives pages to the requests that wait, first come first served."""
        while self._waiting:
            name, request = next(iter(self._waiting.items()))
            if not self._pages.give(request):
                return
            del self._waiting[name]
            self._running[name] = request

    def _compute(self, chunks: list[Chunk]) -> None:
        # What is refused in time is announced to nobody: it is not read.
        step = self._runner.begin(chunks)
        self._mismatched(step.refused)
        for chunk in step.chunks:
            self._announce(chunk)
        chosen, late = step.compute()
        self._mismatched(late)
        for chunk in step.chunks:
            self._host.counters["tokens"] += chunk.count
            if chunk.sequence in late:
                continue
            request = self._requests[chunk.sequence.request]
            if chunk.sequence in chosen:
                request.first_token = chosen[chunk.sequence]
                request.computed_at = time.monotonic()
                del self._running[request.name]
            self._send(request)

    def _announce(self, chunk: Chunk) -> None:
        """Records what the chunk is about to read and write."""
        pages, size = chunk.sequence.pages, self._pool.page_tokens
        if chunk.start:
            self._host.emit(Read, chunk.sequence, pages[: self._pool.pages_for(chunk.start)], tokens=chunk.start)
        written = pages[chunk.start // size : self._pool.pages_for(chunk.stop)]
        self._host.emit(Write, chunk.sequence, written, tokens=chunk.stop)

    def _mismatched(self, refused: dict[Sequence, list[int]]) -> None:
        """Gives up the requests whose pages the runner refused."""
        for sequence, pages in refused.items():
            self._host.refused(sequence, pages)
            request, reason = self._requests[sequence.request], "A KV page was not the request's."
            self._give_up(request, Outcome.FAILED, reason, 500, "kv_page_mismatch")

    # Sending

    def _send(self, request: Prompt) -> None:
        for transfer in self._pages.pieces(request):
            self._sender.start(transfer)

    def _collect(self) -> bool:
        """Takes note of transfers that are over."""
        worked = False
        while self._sender.began:
            worked = True
            self._lose_lease(self._sender.began.popleft())
        while self._sender.late:
            worked = True
            self._overdue(self._sender.late.popleft())
        while self._sender.ended:
            worked = True
            transfer = self._sender.ended.popleft()
            request = self._requests.get(transfer.request)
            freed = self._pool.unhold(transfer.id)
            if request is None:
                continue
            for pages in freed.values():
                self._host.freed(request.sequence, pages)
            request.in_flight.remove(transfer)
            request.done.append(transfer)
            self._host.counters["transfers_" + transfer.status.value] += 1
            self._after_transfer(request, transfer)
        return worked

    def _overdue(self, transfer: Transfer) -> None:
        """Its request is failed now, and its pages stay until the transport says that it is over."""
        self._host.counters["transfers_overdue"] += 1
        request = self._requests.get(transfer.request)
        if request is not None:
            reason = (
                f"The KV pages could not be sent: {transfer.error}"
                if transfer.error
                else f"The KV pages had not arrived within {self._host.config.transfer_s} s."
            )
            self._give_up(request, Outcome.FAILED, reason, 500, "transfer_failed")

    def _after_transfer(self, request: Prompt, transfer: Transfer) -> None:
        if request.over is not None:
            self._settle(request)
        elif transfer.status is not TransferStatus.OK:
            reason = f"The KV pages could not be sent: {transfer.error}"
            self._give_up(request, Outcome.FAILED, reason, 500, "transfer_failed")
        elif request.sent_all:
            self._finish(request)

    def _finish(self, request: Prompt) -> None:
        """Everything has arrived: hands over to decode."""
        # Pieces may arrive in another order than they were started in.
        request.done.sort(key=lambda transfer: transfer.first)
        pages = [page for transfer in request.done for page in transfer.destination]
        digests = [digest for transfer in request.done for digest in transfer.digests or ()]
        self._tell_decode(
            request,
            TransferStatus.OK,
            pages,
            tokens=sum(transfer.tokens for transfer in request.done),
            digests=digests or None,
            first_token=request.first_token,
        )
        if not request.ended:  # under the fault lease-expiry it has
            self._end(request, Outcome.REJECTED if request.rejected else Outcome.FINISHED)
        self._forget(request)

    def _lose_lease(self, transfer: Transfer) -> None:
        """Fault lease-expiry: the source pages go while the transfer is under way."""
        request = self._requests.get(transfer.request)
        if request is not None and not request.ended and request.first_token is not None:
            self._end(request, Outcome.FINISHED)

    # Ending without a hand-off

    def _give_up(
        self, request: Prompt, outcome: Outcome, reason: str, status: int | None = None, code: str = ""
    ) -> None:
        """Ends a request that is not handed off.

        Args:
            request: Which.
            outcome: For the record.
            reason: For decode and, with `status`, for the client.
            status: HTTP status for the client; None: somebody else answers.
            code: The error's code.
        """
        if request.ended:
            return
        for transfer in request.in_flight:
            transfer.cancel()
        self._end(request, outcome)
        if status is not None:
            self._host.fail(request.name, status, code, reason)
        request.over = code, reason
        self._settle(request)

    def _settle(self, request: Prompt) -> None:
        """Once no transfer is in flight, tells decode that no byte will come any more, and forgets the request."""
        if request.in_flight or request.over is None:
            return
        # After a piece that failed, decode has to see for itself that nothing is on its way any more.
        statuses = {piece.status for piece in request.done}
        status = TransferStatus.FAILED if TransferStatus.FAILED in statuses else TransferStatus.ABORTED
        if request.stopped is None:
            code, reason = request.over
            self._tell_decode(request, status, request.touched, code=code, reason=reason)
        else:
            stopped = TransferStatus.OK if statuses == {TransferStatus.OK} else status
            self._tell_stopped(request.stopped, stopped, request.touched)
        self._forget(request)

    def _end(self, request: Prompt, outcome: Outcome) -> None:
        """Records the end and gives pages back."""
        request.ended = True
        self._waiting.pop(request.name, None)
        self._running.pop(request.name, None)
        self._host.end(request.sequence, outcome)
        keep = outcome is Outcome.FINISHED and Fault.LEASE_EXPIRY not in self._faults
        self._pages.take_back(request, keep=keep)

    def _forget(self, request: Prompt) -> None:
        self._pages.forget(request)
        del self._requests[request.name]

    def _expire(self) -> None:
        """Ends requests whose decode has not said in time where their pages go."""
        limit = time.monotonic() - self._host.config.lease_s
        for request in list(self._requests.values()):
            if request.first_token is not None and request.reserve is None and request.computed_at < limit:
                reason = f"{request.message.decode} had no pages within {self._host.config.lease_s} s."
                self._give_up(request, Outcome.ABORTED, reason, 503, "no_capacity")

    def _bury(self, worker: str, epoch: int) -> None:
        address = self._addresses.pop((worker, epoch), None)
        if address is not None:
            self._sender.forget(address)
        for request in list(self._requests.values()):
            theirs = request.message.decode == worker and request.message.decode_epoch <= epoch
            if theirs or worker == ROUTER:
                self._give_up(request, Outcome.ABORTED, f"{worker} died.")

    # Telling decode

    def _tell_decode(self, request: Prompt, status: TransferStatus, pages: list[int], **more: Any) -> None:
        """Hands off; `more` are further fields of the message."""
        message = request.message
        if self._host.is_dead(message.decode, message.decode_epoch):
            return
        self._host.mailbox.send(
            message.decode,
            Handoff(
                request=message.request,
                epoch=message.decode_epoch,
                transfer=request.reserve.transfer if request.reserve else "",
                status=status,
                pages=pages,
                **more,
            ),
        )

    def _tell_stopped(self, stop: StopTransfer, status: TransferStatus, pages: list[int]) -> None:
        if self._host.is_dead(stop.decode, stop.decode_epoch):
            return
        self._host.mailbox.send(
            stop.decode,
            TransferStopped(
                request=stop.request,
                epoch=stop.decode_epoch,
                transfer=stop.transfer,
                status=status,
                pages=pages,
            ),
        )
