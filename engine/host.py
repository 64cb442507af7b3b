"""What both kinds of worker stand on: messages, records, the pool and the model."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from engine.config import EngineConfig, PoolConfig
from engine.digest import PageDigester
from engine.fleet import ROUTER
from engine.mailbox import Mailbox
from engine.messages import AnyMessage, Failed, Sampling
from engine.model.llama import Model
from engine.pool import PagePool
from engine.sequence import Sequence
from guard.records import Free, Outcome, PageSet, Record, Refuse, RequestEnd, Role, Scrub
from hooks.emit import Emitter, context_from_traceparent

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Host:
    """One worker's means."""

    name: str
    role: Role
    epoch: int
    config: EngineConfig
    model: Model
    pool: PagePool
    digester: PageDigester
    emitter: Emitter
    mailbox: Mailbox
    tracer: Tracer | None = None
    """For spans that people look at; None: there are none."""
    counters: Counter[str] = field(default_factory=Counter)
    dead: dict[str, int] = field(default_factory=dict)
    """The last epoch of each worker that died."""

    @property
    def own(self) -> PoolConfig:
        """The configuration of this kind of worker."""
        return self.config.prefill if self.role is Role.PREFILL else self.config.decode

    def is_dead(self, worker: str, epoch: int) -> bool:
        """Whether that start of that worker has ended."""
        return self.dead.get(worker, -1) >= epoch

    def sequence(
        self, request: str, tenant: str, prompt: list[int], sampling: Sampling, traceparent: str | None
    ) -> Sequence:
        """A new request."""
        context: Context | None = None
        if self.emitter.on or self.tracer is not None:
            context = context_from_traceparent(traceparent)
        span = None
        if self.tracer is not None:
            span = self.tracer.start_span(
                self.role.value, context, attributes={"kv.stream.id": self.name, "kv.request.id": request}
            )
        return Sequence(request=request, tenant=tenant, prompt=prompt, sampling=sampling, context=context, span=span)

    def emit(self, kind: type[Record], sequence: Sequence, pages: list[int] | None = None, **fields: Any) -> int:
        """Records something about a request.

        Returns:
            The record's place in the stream; -1 when no records are made.
        """
        if not self.emitter.on:
            return -1
        if pages is not None:
            fields["pages"] = PageSet.of(pages)
        record = kind(request=sequence.request, tenant=sequence.tenant, **fields)
        return self.emitter.emit(record, sequence.context)

    def refused(self, sequence: Sequence, pages: list[int]) -> None:
        """Counts and records that the runner refused pages of a request, before it ends and gives them back."""
        self.counters["page_refusals"] += 1
        self.emit(Refuse, sequence, pages)

    def end(self, sequence: Sequence, outcome: Outcome) -> None:
        """Records that the request is over here, and ends its span."""
        self.emit(RequestEnd, sequence, outcome=outcome)
        if sequence.span is not None:
            sequence.span.set_attribute("kv.outcome", outcome.value)
            sequence.span.end()

    def fail(self, request: str, status: int, code: str, reason: str, incident: str | None = None) -> None:
        """Tells the router that the request gives no further output."""
        self.mailbox.send(ROUTER, Failed(request=request, status=status, code=code, reason=reason, incident=incident))

    def freed(self, sequence: Sequence, pages: list[int], *, scrub: bool = False) -> None:
        """Records that pages went back to the free list, zeroed where that is asked for."""
        if not pages:
            return
        if scrub or self.config.zero_on_free:
            self.pool.scrub(pages)
            self.emit(Free, sequence, pages)
            self.emit(Scrub, sequence, pages)
        else:
            self.emit(Free, sequence, pages)


class Stage(Protocol):
    """What a worker does: prefill or decode."""

    def handle(self, message: AnyMessage) -> None:
        """Takes a message that is meant for this start of this worker."""

    def step(self) -> bool:
        """Does what can be done now; False if there is nothing to do before the next message."""

    def patience_ms(self) -> float:
        """How long the next message may be waited for after a `step` that had nothing to do."""

    def gauges(self) -> dict[str, float]:
        """How things stand."""

    def counters(self) -> dict[str, float]:
        """What was counted outside `Host.counters`."""

    def close(self) -> None:
        """Lets go of everything."""
