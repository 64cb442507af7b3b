"""A ledger and the streams that feed it, in few words: ``rig.alloc("d", "a1", "0-1")``.

The first letter of a request is its tenant: ``a1`` belongs to ``tenant-a``. Streams are named by what they are: ``p``
(and ``p2``) prefill, ``d`` decode, ``r`` router; each has a pool of its own name, of 16 pages of 4 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from guard.findings import Finding, Kind
from guard.ledger import Ledger, LedgerSettings
from guard.native.ledger import Ledger as NativeLedger
from guard.policy import Policy
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
    Refuse,
    RequestEnd,
    Respond,
    Role,
    Scope,
    Scrub,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)

TOKENS = 4
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "r": Role.ROUTER, "u": Role.UNIFIED}
MS = 1_000_000


LEDGERS: dict[str, Callable[..., Any]] = {"python": Ledger, "native": NativeLedger}
_which = ["python"]

both_ledgers = pytest.mark.usefixtures("each_ledger")
"""The test is run with either ledger: `make_ledger` makes that one."""

python_only = pytest.mark.parametrize("each_ledger", ["python"], indirect=True)
"""For a test that looks into the Python ledger."""


@contextmanager
def ledgers_are(name: str) -> Iterator[None]:
    """Meanwhile `make_ledger` makes that one."""
    _which.append(name)
    yield
    _which.pop()


def make_ledger(*arguments: Any) -> Any:
    """A ledger, of the sort that the test is about: the Python one, unless it is about both."""
    return LEDGERS[_which[-1]](*arguments)


def pages(text: str) -> PageSet:
    return PageSet.parse(text)


def who(request: str) -> dict[str, str]:
    return {"request": request, "tenant": f"tenant-{request[0]}"}


class Rig:
    """Emits records stream by stream and feeds them as they come, unless told to keep them back.

    Args:
        window_ms: The reorder window; None waits for `end`, as replay does.
        pools: Streams that announce a pool at once.
    """

    def __init__(
        self, policy: Policy | None = None, *, window_ms: float | None = None, pools: str = "p d", **settings: float
    ) -> None:
        self.found: list[Finding] = []
        self.retired: list[Any] = []
        self.told = 0
        """Calls of `on_finding`."""
        self.ledger = make_ledger(
            policy,
            LedgerSettings.model_validate({"reorder_window_ms": window_ms, **settings}),
            self._on_finding,
            self.retired.append,
        )
        self.places: dict[str, tuple[int, int]] = {}
        self.now_ms = 0
        self.log: list[Record] = []
        for stream in pools.split():
            self.pool(stream)

    def _on_finding(self, finding: Finding, new: bool) -> None:
        self.told += 1
        if new:
            self.found.append(finding)

    # Records

    def emit(self, stream: str, record: Record, *, feed: bool = True) -> Record:
        """The next record of the stream, a millisecond after the last; `feed` False keeps it back."""
        self.now_ms += 1
        epoch, seq = self.places.get(stream, (1, 0))
        self.places[stream] = epoch, seq + 1
        record = msgspec.structs.replace(record, stream=stream, epoch=epoch, seq=seq, time_ns=self.now_ms * MS)
        self.log.append(record)
        if feed:
            self.feed(record)
        return record

    def feed(self, *records: Record) -> None:
        for record in records:
            self.ledger.feed(record, self.now_ms * MS)

    def lose(self, stream: str, count: int = 1) -> None:
        """So many records of the stream never arrive."""
        epoch, seq = self.places.get(stream, (1, 0))
        self.places[stream] = epoch, seq + count

    def restart(self, stream: str, epoch: int | None = None) -> None:
        """The emitter restarts: a new epoch, and its pool announced again."""
        self.places[stream] = self.places[stream][0] + 1 if epoch is None else epoch, 0
        self.pool(stream)

    def pool(self, stream: str, size: int = 16, context: int = 64, *, feed: bool = True) -> Record:
        record = Pool(pages=size, page_tokens=TOKENS, page_bytes=1, role=ROLES[stream[0]], context_limit=context)
        return self.emit(stream, record, feed=feed)

    def admit(self, stream: str, request: str, tokens: int = 8) -> Record:
        return self.emit(stream, Admit(**who(request), tokens=tokens))

    def alloc(self, stream: str, request: str, at: str, *, feed: bool = True) -> Record:
        return self.emit(stream, Alloc(**who(request), pages=pages(at)), feed=feed)

    def share(self, stream: str, request: str, at: str, tokens: int | None = None) -> Record:
        return self.emit(stream, Share(**who(request), pages=pages(at), tokens=tokens))

    def write(
        self, stream: str, request: str, at: str, tokens: int | None = None, scope: Scope = Scope.TENANT,
        *, feed: bool = True,
    ) -> Record:  # fmt: skip
        tokens = len(pages(at)) * TOKENS if tokens is None else tokens
        return self.emit(stream, Write(**who(request), pages=pages(at), tokens=tokens, scope=scope), feed=feed)

    def read(self, stream: str, request: str, at: str, tokens: int | None = None, *, feed: bool = True) -> Record:
        tokens = len(pages(at)) * TOKENS if tokens is None else tokens
        return self.emit(stream, Read(**who(request), pages=pages(at), tokens=tokens), feed=feed)

    def refuse(self, stream: str, request: str, at: str, *, feed: bool = True) -> Record:
        return self.emit(stream, Refuse(**who(request), pages=pages(at)), feed=feed)

    def free(self, stream: str, request: str, at: str, *, feed: bool = True) -> Record:
        return self.emit(stream, Free(**who(request), pages=pages(at)), feed=feed)

    def cache(self, stream: str, request: str, at: str) -> Record:
        return self.emit(stream, Cache(**who(request), pages=pages(at)))

    def scrub(self, stream: str, at: str) -> Record:
        return self.emit(stream, Scrub(pages=pages(at)))

    def over(self, stream: str, request: str, outcome: str = "finished", *, feed: bool = True) -> Record:
        return self.emit(stream, RequestEnd(**who(request), outcome=Outcome(outcome)), feed=feed)

    def respond(self, stream: str, request: str, status: int = 200) -> Record:
        return self.emit(stream, Respond(**who(request), status=status, tokens=1))

    def begin(
        self, request: str, src: str, dst: str, transfer: str = "x1", *, sender: str = "p", receiver: str = "d",
        tokens: int | None = None, digests: str | None = None, feed: bool = True,
    ) -> Record:  # fmt: skip
        record = TransferBegin(
            **who(request), transfer=transfer, pages=pages(src), peer_pool=receiver, peer_pages=pages(dst),
            tokens=len(pages(src)) * TOKENS if tokens is None else tokens,
            digests=None if digests is None else tuple(digests.split(",")),
        )  # fmt: skip
        return self.emit(sender, record, feed=feed)

    def ended(
        self, stream: str, side: str, request: str, at: str, transfer: str = "x1", status: str = "ok", *,
        tokens: int | None = None, digests: str | None = None, feed: bool = True,
    ) -> Record:  # fmt: skip
        record = TransferEnd(
            **who(request), transfer=transfer, side=Side(side), pages=pages(at), status=TransferStatus(status),
            tokens=len(pages(at)) * TOKENS if tokens is None else tokens,
            digests=None if digests is None else tuple(digests.split(",")),
        )  # fmt: skip
        return self.emit(stream, record, feed=feed)

    # What engines do

    def left_behind(self, stream: str, request: str, at: str) -> None:
        """A request writes into the pages and gives them back: its bytes stay in them."""
        self.alloc(stream, request, at)
        self.write(stream, request, at)
        self.over(stream, request)
        self.free(stream, request, at)

    def prefilled(self, request: str, src: str = "0-1", sender: str = "p") -> None:
        """Prefill has computed the prompt."""
        self.alloc(sender, request, src)
        self.write(sender, request, src)

    def sent(self, request: str, src: str, dst: str, transfer: str = "x1", *, sender: str = "p") -> None:
        """Both sides of a transfer that goes well, into pages that decode has allocated."""
        self.begin(request, src, dst, transfer, sender=sender)
        self.ended(sender, "send", request, src, transfer)
        self.ended("d", "recv", request, dst, transfer)

    def handed_over(self, request: str, src: str = "0-1", dst: str = "0-1", transfer: str = "x1") -> None:
        """A prompt goes through prefill and has arrived at decode."""
        self.prefilled(request, src)
        self.alloc("d", request, dst)
        self.sent(request, src, dst, transfer)

    # What it comes to

    def advance(self, ms: int) -> None:
        """So many milliseconds pass."""
        self.now_ms += ms
        self.ledger.advance(self.now_ms * MS)

    def end(self) -> list[Finding]:
        """The input is over; all findings."""
        self.ledger.finish()
        return self.found

    def kinds(self) -> set[str]:
        return {finding.kind.value for finding in self.found}

    def one(self, kind: Kind, request: str | None = None) -> Finding:
        """The only finding of that kind (and request)."""
        of_kind = [f for f in self.found if f.kind is kind and (request is None or f.request == request)]
        assert len(of_kind) == 1, [f.as_json() for f in self.found]
        return of_kind[0]
