"""The decode worker: takes over computed prompts and writes the answers.

A request waits for pages, reserves them at the prefill worker, runs once its prompt's pages have arrived and are
what was sent, and gives its pages back when its last token has left through the gate. When pages run out, the
request that came last is preempted: it gives its pages back and computes everything again later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from engine.answer import Answer, State
from engine.faults import UNTAGGED, Fault
from engine.fleet import ROUTER
from engine.gate import Gate, Refuse, Release
from engine.host import Host
from engine.landing import Landing
from engine.messages import Abort, AnyMessage, Generate, Handoff, Tokens, TransferStopped, WorkerDown
from engine.runner import Runner
from engine.scheduler import Chunk, plan
from engine.sequence import Sequence
from engine.transport.link import Receiver
from guard.act.board import Verdict
from guard.records import Admit, Alloc, Outcome, Read, Respond, TransferStatus, Write

_EARLY = 4096
"""Hand-offs kept for requests that have not come yet."""


class DecodeStage:
    """See the module.

    Args:
        host: The worker's means.
        receiver: Of the worker's pool.
    """

    def __init__(self, host: Host, receiver: Receiver) -> None:
        self._host = host
        self._pool = host.pool
        self._faults = host.config.faults
        self._landing = Landing(host, receiver)
        self._gate = Gate(host.config.guard, host.name, host.epoch)
        self._refusals: list[Refuse] = []
        tagged = not UNTAGGED.intersection(self._faults)
        self._runner = Runner(host.model, host.pool, check_tags=tagged, between_layers=self._let_out)
        self._limit = min(host.pool.pages * host.pool.page_tokens, host.model.config.context)
        self._requests: dict[str, Answer] = {}
        self._waiting: OrderedDict[str, Answer] = OrderedDict()
        self._early: OrderedDict[str, Handoff] = OrderedDict()
        self._old_tables: list[list[int]] = []

    # What the worker calls

    def handle(self, message: AnyMessage) -> None:
        """See `engine.host.Stage`."""
        match message:
            case Generate():
                self._admit(message)
            case Handoff():
                self._take_over(message)
            case TransferStopped(request=name):
                request = self._requests.get(name)
                if request is not None and request.state is State.STOPPING:
                    self._stopped(request, message.status, message.pages)
            case Abort(request=name, outcome=outcome):
                if name in self._requests:
                    self._abort(self._requests[name], outcome)
            case WorkerDown(worker=worker, epoch=epoch):
                self._bury(worker, epoch)
            case _:
                self._host.counters["strange_messages"] += 1

    def step(self) -> bool:
        """See `engine.host.Stage`."""
        self._landing.settle()
        # First those that were refused during the last step: no token of theirs may leave after that.
        self._refuse()
        self._let_out()
        self._refuse()
        self._give_pages()
        chunks = self._plan()
        if chunks:
            self._compute(chunks)
        return bool(chunks)

    def patience_ms(self) -> float:
        """See `engine.host.Stage`."""
        return self._gate.patience_ms()

    def gauges(self) -> dict[str, float]:
        """See `engine.host.Stage`."""
        states = Counter(request.state for request in self._requests.values())
        return {
            "requests_running": states[State.RUNNING] + states[State.DRAINING],
            "requests_waiting": states[State.WAITING] + states[State.RESERVED],
            "transfers": states[State.RESERVED] + states[State.STOPPING] + self._landing.unconfirmed,
            "transfers_unconfirmed": self._landing.unconfirmed,
        }

    def counters(self) -> dict[str, float]:
        """See `engine.host.Stage`."""
        return {"gate_waits": self._gate.waits, "gate_timeouts": self._gate.timeouts}

    def close(self) -> None:
        """See `engine.host.Stage`."""
        self._landing.close()
        self._gate.close()

    # Coming in

    def _admit(self, message: Generate) -> None:
        host, name = self._host, message.request
        if name in self._requests:
            host.counters["strange_messages"] += 1
            return
        sequence = host.sequence(name, message.tenant, message.prompt, message.sampling, message.traceparent)
        request = self._requests[name] = Answer(message, sequence)
        host.emit(Admit, sequence, tokens=len(message.prompt), max_tokens=message.sampling.max_tokens)
        self._waiting[name] = request
        if self._early.pop(name, None) is not None:
            self._end(request, Outcome.ABORTED)  # prefill has told the router why
        elif host.is_dead(message.prefill, message.prefill_epoch):
            self._end(request, Outcome.ABORTED)
            host.fail(name, 503, "worker_failed", f"{message.prefill} died.")
        elif len(message.prompt) >= self._limit:
            # Not `rejected`: prefill may be reading for the request until the router has told it.
            self._end(request, Outcome.ABORTED)
            reason = (
                f"The prompt has {len(message.prompt)} tokens; {host.name} holds {self._limit}, and at least "
                "one is for the output. Shorten the prompt."
            )
            host.fail(name, 400, "context_length_exceeded", reason)

    def _give_pages(self) -> None:
        """Gives pages to the requests that wait, preempted ones first, then first come first served."""
        pool = self._pool
        active = sum(request.state is not State.WAITING for request in self._requests.values())
        while self._waiting and active < 2 * self._host.own.max_batch:
            name, request = next(iter(self._waiting.items()))
            fresh = not request.sequence.output
            if not self._extend(request, pool.pages_for(request.sequence.length + fresh)):
                return
            del self._waiting[name]
            active += 1
            if fresh:
                request.state = State.RESERVED
                problem = self._landing.reserve(request)
                if problem:
                    self._end(request, Outcome.FAILED)
                    self._host.fail(name, 500, "transfer_failed", problem)
            else:
                request.state = State.RUNNING

    def _extend(self, request: Answer, count: int) -> bool:
        """Adds pages to the block table; False if there are too few."""
        sequence, pool = request.sequence, self._pool
        pages = pool.alloc(request.name, count)
        if pages is None:
            return False
        generations = [pool.generation(page) for page in pages]
        sequence.extend(pages, pool.tags_of(sequence.tenant, request.name, generations))
        if request.table is not None:
            request.table = request.table + pages  # a stale row is only ever added to
        self._host.emit(Alloc, sequence, pages)
        return True

    # Taking over

    def _take_over(self, handoff: Handoff) -> None:
        request = self._requests.get(handoff.request)
        if request is None:
            # Either the request is over here, or prefill has refused it before the router's word of it came.
            self._early[handoff.request] = handoff
            if len(self._early) > _EARLY:
                self._early.popitem(last=False)
        elif request.state is State.STOPPING:
            self._stopped(request, handoff.status, handoff.pages)
        elif request.state is State.RESERVED:
            self._land(request, handoff)
        elif request.state is State.WAITING and handoff.status is not TransferStatus.OK:
            self._end(request, Outcome.ABORTED)
        else:
            self._host.counters["strange_messages"] += 1

    def _land(self, request: Answer, handoff: Handoff) -> None:
        """The transfer is over at the sender."""
        if handoff.status is not TransferStatus.OK:
            # Prefill, or whoever stopped it, has told the router why, and recorded how it ended. This end may be on
            # record before the transfer's: as `failed` it would speak of what prefill did until then.
            clean = handoff.status is not TransferStatus.FAILED
            self._landing.ended(request, handoff.status, handoff.pages, clean=clean)
            self._end(request, Outcome.ABORTED)
            return
        landed, problem = self._landing.arrived(request, handoff)
        if problem:
            self._end(request, Outcome.FAILED)
            self._host.fail(request.name, 500, "transfer_failed", problem)
            return
        self._begin_answer(request, handoff.first_token or 0, landed)

    def _begin_answer(self, request: Answer, token: int, landed: int) -> None:
        sequence = request.sequence
        sequence.computed = len(sequence.prompt)
        request.state = State.RUNNING
        request.unsent = self._append(request, token, landed)

    def _append(self, request: Answer, token: int, bar: int) -> bool:
        """Adds an output token, and ends the answer if it was the last one.

        Returns:
            Whether the answer goes on; then the token still has to be given to the gate.
        """
        sequence = request.sequence
        request.state = State.DRAINING
        if token in self._host.model.eos_ids:
            self._gate.put(request.name, [], finish="stop", bar=bar)
            return False
        sequence.output.append(token)
        if len(sequence.output) == sequence.sampling.max_tokens or sequence.length == self._limit:
            self._gate.put(request.name, [token], finish="length", bar=bar)
            return False
        request.state = State.RUNNING
        return True

    # Computing

    def _plan(self) -> list[Chunk]:
        """The next step, with pages for all that it writes."""
        own = self._host.own
        while True:
            running = [request for request in self._requests.values() if request.state is State.RUNNING]
            chunks = plan((request.sequence for request in running), own.max_batch, own.chunk_tokens)
            short = next((c for c in chunks if self._pool.pages_for(c.stop) > len(c.sequence.pages)), None)
            if short is None:
                break
            if not self._extend(self._requests[short.sequence.request], 1):
                self._preempt(running[-1])
        for chunk in chunks:
            request = self._requests[chunk.sequence.request]
            if Fault.STALE_BLOCK_TABLE in self._faults and request.unsent and self._old_tables:
                # It takes a place in the batch, and with it the row of whoever had that place before.
                old, pages = self._old_tables.pop(0), chunk.sequence.pages
                request.table = old[: len(pages)] + pages[len(old) :]
            chunk.table = request.table
        return chunks

    def _preempt(self, request: Answer) -> None:
        """Takes the pages of the request that came last; what waits in the gate still leaves."""
        self._host.counters["preemptions"] += 1
        self._free(request)
        request.state = State.WAITING
        request.covered = 0
        request.table = None
        self._waiting[request.name] = request
        self._waiting.move_to_end(request.name, last=False)

    def _compute(self, chunks: list[Chunk]) -> None:
        # What is refused in time is announced to nobody: it is not read.
        step = self._runner.begin(chunks)
        self._mismatched(step.refused)
        bars = {chunk.sequence: self._announce(chunk) for chunk in step.chunks}
        chosen, late = step.compute()
        self._mismatched(late)
        for sequence, token in chosen.items():
            if self._append(self._requests[sequence.request], token, bars[sequence]):
                self._gate.put(sequence.request, [token], bar=bars[sequence])

    def _mismatched(self, refused: dict[Sequence, list[int]]) -> None:
        """Ends the requests whose pages the runner refused."""
        for sequence, pages in refused.items():
            self._host.refused(sequence, pages)
            self._end(self._requests[sequence.request], Outcome.FAILED)
            self._host.fail(sequence.request, 500, "kv_page_mismatch", "A KV page was not the request's.")

    def _announce(self, chunk: Chunk) -> int:
        """Records what the chunk is about to write and read.

        Returns:
            The place of its last read in the stream, which the next token waits for; -1 if it reads nothing new.
        """
        host, sequence, size = self._host, chunk.sequence, self._pool.page_tokens
        request = self._requests[sequence.request]
        pages = chunk.pages[: self._pool.pages_for(chunk.stop)]
        bar = -1
        if len(pages) > request.covered:
            if chunk.start and chunk.count > 1:
                host.emit(Read, sequence, pages[: self._pool.pages_for(chunk.start)], tokens=chunk.start)
            host.emit(Write, sequence, pages[chunk.start // size :], tokens=chunk.stop)
        if len(pages) > request.covered and chunk.last:
            bar = host.emit(Read, sequence, pages, tokens=chunk.stop)
            request.covered = len(pages)
        if request.unsent:
            request.unsent = False
            self._gate.put(request.name, sequence.output[:1], bar=bar)
        return bar

    # Answering

    def _let_out(self) -> None:
        """Sends what may leave. Called between layers too: what is refused waits for the end of the step."""
        for decision in self._gate.poll():
            if isinstance(decision, Release):
                self._release(self._requests[decision.request], decision)
            else:
                self._refusals.append(decision)

    def _release(self, request: Answer, decision: Release) -> None:
        first, final = not request.sent, decision.finish is not None
        request.sent += len(decision.tokens)
        self._host.counters["tokens"] += len(decision.tokens)
        if first or final:
            self._host.emit(Respond, request.sequence, status=200, tokens=request.sent, final=final)
        self._host.mailbox.send(ROUTER, Tokens(request=request.name, tokens=decision.tokens, finish=decision.finish))
        if final:
            self._end(request, Outcome.FINISHED)

    def _refuse(self) -> None:
        """Ends the requests that the gate gives no further token."""
        refusals, self._refusals = self._refusals, []
        for refusal in refusals:
            request = self._requests.get(refusal.request)
            if request is None:
                continue
            self._host.counters[refusal.code] += 1
            self._end(request, Outcome.ABORTED)
            killed = refusal.code == "kv_guard_killed"
            reason = "The guard killed the request." if killed else "The guard has not judged the request in time."
            self._host.fail(request.name, 503, refusal.code, reason, refusal.incident)

    # Ending

    def _abort(self, request: Answer, outcome: Outcome) -> None:
        if request.state is State.STOPPING:
            return
        answered = request.sent and request.state is not State.RESERVED
        if outcome is Outcome.FINISHED and answered:
            # The router found a stop string: that was the whole answer.
            self._host.emit(Respond, request.sequence, status=200, tokens=request.sent, final=True)
            self._end(request, Outcome.FINISHED)
        elif Fault.LEAK_ON_DISCONNECT in self._faults:
            self._host.end(request.sequence, Outcome.ABORTED)
            self._forget(request)
        elif request.state is State.RESERVED and Fault.EARLY_FREE not in self._faults:
            self._stop(request)
        else:
            self._end(request, Outcome.ABORTED)

    def _stop(self, request: Answer) -> None:
        """Ends a request whose pages may be written yet: they stay until prefill says that it is over."""
        self._host.end(request.sequence, Outcome.ABORTED)
        request.state = State.STOPPING
        self._free(request)
        self._landing.stop(request)

    def _stopped(self, request: Answer, status: TransferStatus, touched: list[int]) -> None:
        """The sender writes no more for a request that has ended; `touched` pages it may have written."""
        clean = status is not TransferStatus.FAILED
        self._landing.ended(request, TransferStatus.ABORTED, touched, clean=clean)
        self._forget(request)

    def _end(self, request: Answer, outcome: Outcome) -> None:
        """Records the end and gives the pages back; those that a transfer may yet write stay until it is over."""
        self._host.end(request.sequence, outcome)
        pages = list(request.sequence.pages)
        self._free(request)
        if Fault.DOUBLE_FREE in self._faults and outcome is Outcome.FINISHED:
            self._host.freed(request.sequence, self._pool.free(request.name, pages))
        if Fault.STALE_BLOCK_TABLE in self._faults and pages:
            self._old_tables.append(pages)
        self._forget(request)

    def _free(self, request: Answer) -> None:
        pages = self._pool.free(request.name, request.sequence.take_pages())
        quarantined = self._gate.verdict(request.name) >= Verdict.QUARANTINE
        self._host.freed(request.sequence, pages, scrub=quarantined)

    def _forget(self, request: Answer) -> None:
        self._gate.drop(request.name)
        self._waiting.pop(request.name, None)
        del self._requests[request.name]

    def _bury(self, worker: str, epoch: int) -> None:
        for request in list(self._requests.values()):
            if worker == ROUTER:
                self._abort(request, Outcome.ABORTED)
                continue
            message, state = request.message, request.state
            theirs = message.prefill == worker and message.prefill_epoch <= epoch
            if not theirs or state in (State.RUNNING, State.DRAINING) or request.sequence.output:
                continue
            # Its process is gone, and so is the writer. Whether it had begun, nobody can tell any more.
            if state is State.STOPPING:
                self._stopped(request, TransferStatus.FAILED, request.landing)
                continue
            if state is State.RESERVED:
                self._landing.ended(request, TransferStatus.ABORTED, request.landing, clean=False)
            self._end(request, Outcome.ABORTED)
            self._host.fail(request.name, 503, "worker_failed", f"{worker} died.")
        self._landing.forget(worker, epoch)
