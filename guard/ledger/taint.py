"""Labels: whose data some bytes come from, as far as is known now and as it becomes known.

A label can still grow after bytes were copied out of it: a transfer in flight takes on every label that its
source pages carry until the sender ends, and the records that tell so may arrive after the records of those
who read the copy. So a label is a node in a graph that follows the bytes: what is added to a node flows on to
the nodes made from it. A node that nothing can be added to any more is closed and keeps no edges, so the graph
holds only what hangs on transfers in flight.

Growth is monotone and independent of order, which is what makes verdicts independent of the order in which
the streams' records arrive.

What was copied out of a page that the guard had lost sight of is doubtful, and so is all that is made from it: the
page's label may be that of bytes which are long gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest

from guard.records import PUBLIC

Origins = dict[str, tuple[str, ...]]
"""Tenant → some requests that wrote its bytes (the `MAX_ORIGINS` smallest ids, so that a union is the same in
every order)."""

MAX_ORIGINS = 8


class Taint:
    """One label. Made open or closed; see the module's docstring."""

    __slots__ = ("_outs", "_pending", "_watchers", "origins", "sure")

    def __init__(self, origins: Origins | None = None, *, pending: int = 0) -> None:
        self.origins: Origins = origins if origins is not None else {}
        self.sure: frozenset[str] = frozenset(self.origins)
        """The tenants among them that are there beyond doubt."""
        self._pending = pending
        """How many sources may still add: inputs that are open, and one for a transfer that has not ended."""
        self._outs: list[tuple[Taint, bool]] = []
        """Those made from it, and whether what they take is doubtful."""
        self._watchers: list[Callable[[], None]] = []

    @property
    def open(self) -> bool:
        """Whether more may be added."""
        return self._pending > 0

    def foreign_to(self, tenant: str) -> set[str]:
        """The tenants in it that `tenant` must not see."""
        return {t for t in self.origins if t != tenant and t != PUBLIC}

    def surely_foreign_to(self, tenant: str) -> bool:
        """Whether one of those is in it beyond doubt."""
        return any(t != tenant and t != PUBLIC for t in self.sure)

    def doubted(self) -> Taint:
        """What a copy of the bytes has for a label when it is not certain that this is theirs."""
        copy = Taint()
        copy.absorb(self, doubtful=True)
        return copy

    def absorb(self, other: Taint, *, doubtful: bool = False) -> None:
        """Takes in all that `other` holds and will hold. Only while open, or before anything was made from it."""
        if other is self:
            return
        self._add(other.origins, frozenset() if doubtful else other.sure)
        if other.open:
            self._pending += 1
            other._outs.append((self, doubtful))

    def close_one(self) -> None:
        """One source will add no more."""
        closing = [self]
        while closing:
            node = closing.pop()
            node._pending -= 1
            if node._pending == 0:
                closing += [out for out, _ in node._outs]
                node._outs = []
                node._watchers = []

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls back after each growth, until it is closed."""
        if self.open:
            self._watchers.append(callback)

    def _add(self, origins: Origins, sure: frozenset[str]) -> None:
        grown: list[Taint] = []
        adding: list[tuple[Taint, Origins, frozenset[str]]] = [(self, origins, sure)]
        while adding:
            node, more, surely = adding.pop()
            union = merge(node.origins, more)
            if union is node.origins and surely <= node.sure:
                continue
            node.origins, node.sure = union, node.sure | surely
            grown.append(node)
            adding += [(out, union, frozenset() if doubtful else node.sure) for out, doubtful in node._outs]
        for node in grown:
            for callback in tuple(node._watchers):
                callback()


EMPTY = Taint()
"""Nobody's data: a page that was never written, or was scrubbed."""


def join(taints: Iterable[Taint]) -> Taint:
    """The label of bytes made from all of these; one of them itself when it already says it all."""
    distinct = list({id(t): t for t in taints if t.origins or t.open}.values())
    if not distinct:
        return EMPTY
    if len(distinct) == 1:
        return distinct[0]
    first = distinct[0]
    if not any(t.open for t in distinct[1:]) and all(
        merge(first.origins, t.origins) is first.origins and t.sure <= first.sure for t in distinct[1:]
    ):
        return first
    union = Taint()
    for taint in distinct:
        union.absorb(taint)
    return union


def merge(into: Origins, more: Origins) -> Origins:
    """The union; `into` itself when `more` adds nothing."""
    union: Origins | None = None
    for tenant, requests in more.items():
        known = into.get(tenant)
        if known is not None and set(requests) <= set(known):
            continue
        both = tuple(nsmallest(MAX_ORIGINS, {*(known or ()), *requests}))
        if both == known:
            continue
        if union is None:
            union = dict(into)
        union[tenant] = both
    return into if union is None else union
