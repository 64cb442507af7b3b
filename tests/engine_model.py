"""A model of a correct PD engine that yields records: what the ledger must never find anything in.

Every worker's side of a request is a generator; the model advances one of them at a time, as its choices say, so
that a run is any interleaving a real engine could have. `Model.log` holds the records in the order of time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import msgspec

from guard.records import (
    Admit,
    Alloc,
    Cache,
    Free,
    Outcome,
    PageSet,
    Pool,
    Read,
    Record,
    RequestEnd,
    Respond,
    Role,
    Scrub,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)

PAGE_TOKENS = 4
TENANTS = ("tenant-a", "tenant-b", "tenant-c")


@dataclass
class Worker:
    """One worker: its stream and its pool."""

    name: str
    role: Role
    pages: int
    context: int
    epoch: int = 1
    seq: int = 0
    free: list[int] = field(default_factory=list)
    cached: dict[tuple[str, int], int] = field(default_factory=dict)
    """(tenant, position) → page: this model's prompts of one tenant all begin alike."""
    users: dict[int, int] = field(default_factory=dict)
    """Cached page → how many read it or send from it."""
    lives: list[tuple[Req, Generator[None]]] = field(default_factory=list)


@dataclass(eq=False)
class Req:
    """One request: what its two sides know of each other."""

    id: str
    tenant: str
    tokens: int
    prefill: Worker
    decode: Worker
    output: int
    cancelled: bool = False
    rejected: bool = False
    prefill_dead: bool = False
    decode_dead: bool = False
    reserved: list[int] | None = None
    reservation: int = 0
    begun: str | None = None
    """The transfer in flight or last in flight."""
    sent: TransferStatus | None = None
    pieces: bool = False
    used: int = 0
    """The reservation that a transfer was begun for."""

    @property
    def over(self) -> bool:
        return self.cancelled or self.rejected or self.prefill_dead or self.decode_dead


class Model:
    """The engine; `choices` decides everything (see `pick`)."""

    def __init__(self, choices: Iterator[int], *, prefills: int = 2, decodes: int = 1, pages: int = 16) -> None:
        self.choices = choices
        self.log: list[Record] = []
        self.time_ms = 0
        self.requests: list[Req] = []
        self.workers = [Worker(f"prefill-{i}", Role.PREFILL, pages, pages * PAGE_TOKENS) for i in range(prefills)] + [
            Worker(f"decode-{i}", Role.DECODE, pages, pages * PAGE_TOKENS) for i in range(decodes)
        ]
        for worker in self.workers:
            self.start(worker)

    # What the model is made of

    def pick(self, n: int) -> int:
        """A choice from 0 to n - 1; 0 when there are no more choices."""
        return next(self.choices, 0) % n

    def emit(self, worker: Worker, record: Record) -> Record:
        self.time_ms += 1
        record = msgspec.structs.replace(
            record, stream=worker.name, epoch=worker.epoch, seq=worker.seq, time_ns=self.time_ms * 1_000_000
        )
        worker.seq += 1
        self.log.append(record)
        return record

    def start(self, worker: Worker) -> None:
        worker.seq = 0
        worker.free = list(range(worker.pages))
        worker.cached, worker.users, worker.lives = {}, {}, []
        self.emit(
            worker,
            Pool(
                pages=worker.pages,
                page_tokens=PAGE_TOKENS,
                page_bytes=1024,
                role=worker.role,
                context_limit=worker.context,
            ),
        )

    def of(self, role: Role) -> list[Worker]:
        return [w for w in self.workers if w.role is role]

    def take(self, worker: Worker, r: Req, count: int) -> list[int] | None:
        """Pages for the request, cached ones evicted when there are not enough."""
        while len(worker.free) < count:
            idle = [k for k, page in worker.cached.items() if not worker.users.get(page)]
            if not idle:
                return None
            page = worker.cached.pop(idle[0])
            self.emit(worker, Free(request=r.id, tenant=r.tenant, pages=PageSet.of([page])))
            worker.free.append(page)
        pages = [worker.free.pop() for _ in range(count)]
        self.emit(worker, Alloc(request=r.id, tenant=r.tenant, pages=PageSet.of(pages)))
        return pages

    def give(self, worker: Worker, r: Req, pages: list[int]) -> None:
        if pages:
            self.emit(worker, Free(request=r.id, tenant=r.tenant, pages=PageSet.of(pages)))
            if self.pick(4) == 0:
                self.emit(worker, Scrub(pages=PageSet.of(pages)))
            worker.free.extend(reversed(pages))

    def end(self, worker: Worker, r: Req, outcome: Outcome) -> None:
        self.emit(worker, RequestEnd(request=r.id, tenant=r.tenant, outcome=outcome))

    # Steps

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        lives = [(w, life) for w in self.workers for life in w.lives]
        choice = self.pick(24)
        if choice < 3 or not lives:
            self.arrive()
        elif choice == 3 and self.requests:
            self.requests[self.pick(len(self.requests))].cancelled = True
        elif choice == 4 and self.pick(6) == 0:
            self.restart(self.workers[self.pick(len(self.workers))])
        else:
            worker, life = lives[self.pick(len(lives))]
            if next(life[1], life) is life:
                worker.lives.remove(life)

    def arrive(self, tenant: str | None = None, tokens: int | None = None) -> Req:
        prefills, decodes = self.of(Role.PREFILL), self.of(Role.DECODE)
        r = Req(
            id=f"r{len(self.requests)}",
            tenant=tenant or TENANTS[self.pick(len(TENANTS))],
            tokens=tokens or 1 + self.pick(30),
            prefill=prefills[self.pick(len(prefills))],
            decode=decodes[self.pick(len(decodes))],
            output=1 + self.pick(9),
        )
        self.requests.append(r)
        r.prefill.lives.append((r, self.prefill_life(r)))
        r.decode.lives.append((r, self.decode_life(r)))
        return r

    def restart(self, worker: Worker) -> None:
        """The worker's process dies and comes back: the other sides hear of it."""
        for r, _ in worker.lives:
            if r.prefill is worker:
                r.prefill_dead = True
            if r.decode is worker:
                r.decode_dead = True
        worker.epoch += 1
        self.start(worker)

    def finish(self, r: Req, worker: Worker) -> None:
        """Runs one side of a request to its end."""
        for life in [life for life in worker.lives if life[0] is r]:
            for _ in range(200):
                if next(life[1], life) is life:
                    worker.lives.remove(life)
                    break

    def serve(self, r: Req) -> None:
        """Runs a request from where it is to its end, both sides in turn."""
        for _ in range(400):
            live = [(w, life) for w in (r.decode, r.prefill) for life in w.lives if life[0] is r]
            if not live:
                return
            for worker, life in live:
                if next(life[1], life) is life:
                    worker.lives.remove(life)

    # The two sides of a request

    def prefill_life(self, r: Req) -> Generator[None]:
        w = r.prefill
        self.emit(w, Admit(request=r.id, tenant=r.tenant, tokens=r.tokens))
        yield
        need = -(-r.tokens // PAGE_TOKENS)
        if need > w.pages:
            r.rejected = True
            self.end(w, r, Outcome.REJECTED)
            return
        shared: list[int] = []
        pages: list[int] | None = []
        if self.pick(2):
            # A prefix hit leaves at least the last token to be computed.
            for position in range((r.tokens - 1) // PAGE_TOKENS):
                page = w.cached.get((r.tenant, position))
                if page is None:
                    break
                shared.append(page)
        if shared:
            for page in shared:
                w.users[page] = w.users.get(page, 0) + 1
            self.emit(w, Share(request=r.id, tenant=r.tenant, pages=PageSet.of(shared)))
        while (pages := self.take(w, r, need - len(shared))) is None:
            yield
            if r.over:
                self.end(w, r, Outcome.ABORTED)
                self.leave(w, shared)
                return
        done = len(shared) * PAGE_TOKENS
        while done < r.tokens:
            yield
            if r.over:
                yield from self.prefill_stop(r, pages, shared)
                return
            start = done
            done = min(r.tokens, done + PAGE_TOKENS * (1 + self.pick(3)))
            if start:
                seen = (shared + pages)[: -(-start // PAGE_TOKENS)]
                self.emit(w, Read(request=r.id, tenant=r.tenant, pages=PageSet.of(seen), tokens=start))
            chunk = (shared + pages)[start // PAGE_TOKENS : -(-done // PAGE_TOKENS)]
            self.emit(w, Write(request=r.id, tenant=r.tenant, pages=PageSet.of(chunk), tokens=done))
        while True:
            while r.reserved is None or r.reservation == r.used:
                yield
                if r.over:
                    yield from self.prefill_stop(r, pages, shared)
                    return
            r.used = r.reservation
            yield from self.send(r, shared + pages)
            if r.sent is TransferStatus.OK:
                break
            if r.over:
                yield from self.prefill_stop(r, pages, shared)
                return
        late_end = self.pick(2)
        if not late_end:
            self.end(w, r, Outcome.FINISHED)
        yield
        self.cache(r, w, pages, shared)
        if late_end:
            self.end(w, r, Outcome.FINISHED)

    def prefill_stop(self, r: Req, pages: list[int], shared: list[int]) -> Generator[None]:
        self.end(r.prefill, r, Outcome.ABORTED)
        yield
        self.give(r.prefill, r, pages)
        self.leave(r.prefill, shared)

    def leave(self, w: Worker, shared: list[int]) -> None:
        for page in shared:
            w.users[page] -= 1

    def cache(self, r: Req, w: Worker, pages: list[int], shared: list[int]) -> None:
        keep, rest = [], []
        for position, page in enumerate(shared + pages):
            if page in shared:
                continue
            full = (position + 1) * PAGE_TOKENS <= r.tokens
            if full and (r.tenant, position) not in w.cached and self.pick(4):
                keep.append(page)
                w.cached[r.tenant, position] = page
            else:
                rest.append(page)
        if keep:
            self.emit(w, Cache(request=r.id, tenant=r.tenant, pages=PageSet.of(keep)))
        self.give(w, r, rest)
        self.leave(w, shared)

    def send(self, r: Req, source: list[int]) -> Generator[None]:
        """One attempt at the transfer, in one piece or several."""
        assert r.reserved is not None
        w, dest = r.prefill, list(r.reserved)[: len(source)]
        base = f"x-{r.id}-{r.used}"
        cut = 1 + self.pick(len(source)) if self.pick(3) == 0 else len(source)
        pieces = [(source[:cut], dest[:cut])] + ([(source[cut:], dest[cut:])] if cut < len(source) else [])
        r.pieces = len(pieces) > 1
        status = TransferStatus.OK
        sent_tokens = 0
        for number, (src, dst) in enumerate(pieces):
            last = number == len(pieces) - 1
            tokens = r.tokens - sent_tokens if last else len(src) * PAGE_TOKENS
            name = f"{base}/{number}" if r.pieces else base
            digests = tuple(f"{r.id.encode().hex()}{page:04x}" for page in src) if self.pick(2) else None
            self.emit(
                w,
                TransferBegin(
                    request=r.id,
                    tenant=r.tenant,
                    transfer=name,
                    pages=PageSet.of(src),
                    peer_pool=r.decode.name,
                    peer_pages=PageSet.of(dst),
                    tokens=tokens,
                    digests=digests,
                ),
            )
            r.begun, r.sent = base, None
            yield
            if r.decode_dead or self.pick(8) == 0:
                status = TransferStatus.FAILED
            elif r.cancelled and self.pick(2):
                status = TransferStatus.ABORTED
            self.emit(
                w,
                TransferEnd(
                    request=r.id,
                    tenant=r.tenant,
                    transfer=name,
                    side=Side.SEND,
                    pages=PageSet.of(src),
                    tokens=tokens,
                    status=status,
                ),
            )
            sent_tokens += tokens
            if status is not TransferStatus.OK:
                break
        r.sent = status

    def decode_life(self, r: Req) -> Generator[None]:
        w = r.decode
        self.emit(w, Admit(request=r.id, tenant=r.tenant, tokens=r.tokens))
        yield
        need = r.tokens // PAGE_TOKENS + 1
        pages: list[int] | None = None
        while pages is None:
            if r.over or need > w.pages:
                self.end(w, r, Outcome.ABORTED)
                r.cancelled = True
                return
            pages = self.take(w, r, need)
            yield
        r.reserved, r.reservation = pages, r.reservation + 1
        while True:
            while r.sent is None or r.used != r.reservation:
                yield
                if r.over:
                    yield from self.decode_stop(r, pages)
                    return
            if r.cancelled:
                yield from self.decode_stop(r, pages)
                return
            self.receive(r, pages, r.sent)
            if r.sent is TransferStatus.OK:
                break
            # The transfer failed: try again, into the same pages or into others.
            if self.pick(2):
                self.give(w, r, pages)
                pages = None
                while pages is None:
                    if r.over:
                        self.end(w, r, Outcome.ABORTED)
                        return
                    pages = self.take(w, r, need)
                    yield
            if r.over:
                self.end(w, r, Outcome.ABORTED)
                self.give(w, r, pages)
                return
            r.sent = None
            r.reserved, r.reservation = pages, r.reservation + 1
        yield from self.generate(r, pages)

    def receive(self, r: Req, pages: list[int], status: TransferStatus) -> None:
        count = -(-r.tokens // PAGE_TOKENS)
        self.emit(
            r.decode,
            TransferEnd(
                request=r.id,
                tenant=r.tenant,
                transfer=str(r.begun),
                side=Side.RECV,
                pages=PageSet.of(pages[:count]),
                tokens=r.tokens,
                status=status,
            ),
        )

    def decode_stop(self, r: Req, pages: list[int]) -> Generator[None]:
        """The request is over before it ran: pages stay until its writer has said that it is done."""
        w = r.decode
        self.end(w, r, Outcome.ABORTED)
        r.cancelled = True
        in_flight = r.used == r.reservation and r.begun == f"x-{r.id}-{r.used}"
        while not r.prefill_dead and r.used == r.reservation and r.sent is None:
            yield
            in_flight = r.begun == f"x-{r.id}-{r.used}"
        if in_flight:
            self.receive(r, pages, TransferStatus.ABORTED)
        yield
        self.give(w, r, pages)

    def generate(self, r: Req, pages: list[int]) -> Generator[None]:
        w = r.decode
        length = r.tokens

        def step() -> None:
            where = [pages[length // PAGE_TOKENS]]
            self.emit(w, Write(request=r.id, tenant=r.tenant, pages=PageSet.of(where), tokens=length + 1))
            self.emit(w, Read(request=r.id, tenant=r.tenant, pages=PageSet.of(pages), tokens=length + 1))

        step()
        length += 1
        yield
        if self.pick(12) == 0:
            # The worker refuses to go on; what prefill read before the hand-off was read in good faith.
            self.end(w, r, Outcome.FAILED)
            self.give(w, r, pages)
            return
        if r.cancelled:
            self.end(w, r, Outcome.ABORTED)
            self.give(w, r, pages)
            return
        self.emit(w, Respond(request=r.id, tenant=r.tenant, status=200, tokens=1))
        for _ in range(r.output):
            yield
            if r.cancelled:
                break
            if self.pick(10) == 0:
                # Preempted: pages go back, later everything is computed again here.
                self.give(w, r, pages)
                again = None
                while again is None:
                    yield
                    if r.cancelled:
                        self.end(w, r, Outcome.ABORTED)
                        return
                    again = self.take(w, r, length // PAGE_TOKENS + 1)
                pages = again
                held = pages[: -(-length // PAGE_TOKENS)]
                self.emit(w, Write(request=r.id, tenant=r.tenant, pages=PageSet.of(held), tokens=length))
                self.emit(w, Read(request=r.id, tenant=r.tenant, pages=PageSet.of(held), tokens=length))
            if length % PAGE_TOKENS == 0:
                if len(pages) * PAGE_TOKENS == length:
                    grown = self.take(w, r, 1)
                    if grown is None:
                        break
                    pages = pages + grown
                step()
            length += 1
        if not r.cancelled:
            self.emit(w, Respond(request=r.id, tenant=r.tenant, status=200, tokens=length - r.tokens, final=True))
        self.end(w, r, Outcome.ABORTED if r.cancelled else Outcome.FINISHED)
        self.give(w, r, pages)
