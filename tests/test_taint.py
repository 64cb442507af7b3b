from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guard.ledger.taint import EMPTY, MAX_ORIGINS, Taint, join, merge
from guard.records import PUBLIC


def of(*tenants: str) -> Taint:
    return Taint({tenant: (f"{tenant}1",) for tenant in tenants})


def test_foreign_is_neither_the_tenants_own_nor_public() -> None:
    assert of("a", "b", PUBLIC).foreign_to("a") == {"b"}
    assert EMPTY.foreign_to("a") == set()


def test_join_makes_no_node_where_one_says_it_all() -> None:
    a, ab = of("a"), of("a", "b")
    assert join(()) is EMPTY
    assert join((EMPTY, a, EMPTY)) is a
    assert join((ab, a)) is ab
    assert set(join((a, of("c"))).origins) == {"a", "c"}
    assert set(a.origins) == {"a"}, "what is joined stays as it is"


def test_what_is_added_flows_on_while_open() -> None:
    flight = Taint(pending=1)
    landed = join((flight, of("a")))
    copied = join((landed, of("b")))
    assert landed.open
    assert copied.open
    flight.absorb(of("c"))
    assert set(copied.origins) == {"a", "b", "c"}
    flight.close_one()
    assert not copied.open
    flight.absorb(of("d"))
    assert "d" not in copied.origins


def test_a_node_of_two_open_ones_closes_with_the_last() -> None:
    first, second = Taint(pending=1), Taint(pending=1)
    both = join((first, second))
    first.close_one()
    assert both.open
    second.absorb(of("a"))
    assert set(both.origins) == {"a"}
    second.close_one()
    assert not both.open


def test_watchers_hear_of_growth_and_only_of_growth() -> None:
    flight = Taint(pending=1)
    landed = join((flight, of("a")))
    heard: list[set[str]] = []
    landed.watch(lambda: heard.append(set(landed.origins)))
    flight.absorb(of("b"))
    flight.absorb(of("b"))
    flight.absorb(landed)
    assert heard == [{"a", "b"}]
    flight.close_one()


def test_a_closed_node_takes_no_watcher() -> None:
    heard: list[int] = []
    closed = of("a")
    closed.watch(lambda: heard.append(1))
    assert not closed._watchers


def test_a_node_does_not_feed_itself() -> None:
    flight = Taint(pending=1)
    flight.absorb(flight)
    flight.close_one()
    assert not flight.open


def test_a_chain_of_any_length_closes_without_recursion() -> None:
    node = first = Taint(pending=1)
    for number in range(20_000):
        node = join((node, of(f"t{number % 3}")))
    first.absorb(of("x"))
    assert "x" in node.origins
    first.close_one()
    assert not node.open


def test_doubt_flows_on_with_what_is_added() -> None:
    flight = Taint(pending=1)
    copied = join((flight.doubted(), of("a")))
    flight.absorb(of("b"))
    assert copied.foreign_to("a") == {"b"}
    assert not copied.surely_foreign_to("a")
    assert flight.surely_foreign_to("a")
    flight.close_one()
    assert not copied.open


def test_what_is_sure_from_anywhere_is_sure() -> None:
    doubtful = of("b").doubted()
    assert join((doubtful, doubtful)) is doubtful
    assert join((doubtful, of("b"))).surely_foreign_to("a")
    assert not doubtful.surely_foreign_to("a")


ORIGINS = st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(0, 30).map(str)).map(sorted).map(tuple))


@given(st.lists(ORIGINS, max_size=6), st.randoms())
def test_a_union_is_the_same_in_every_order_and_bounded(parts: list[dict[str, tuple[str, ...]]], rng: object) -> None:
    def union(parts: list[dict[str, tuple[str, ...]]]) -> dict[str, set[str]]:
        out: dict[str, tuple[str, ...]] = {}
        for part in parts:
            out = merge(out, {t: r[:MAX_ORIGINS] for t, r in part.items()})
        return {tenant: set(requests) for tenant, requests in out.items()}

    shuffled = parts[:]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert union(parts) == union(shuffled)
    assert all(len(requests) <= MAX_ORIGINS for requests in union(parts).values())
    assert set(union(parts)) == {tenant for part in parts for tenant in part}


def test_merge_gives_back_what_already_says_it_all() -> None:
    into = {"a": ("1", "2")}
    assert merge(into, {"a": ("2",)}) is into
    assert merge(into, {}) is into
    assert merge(into, {"b": ("1",)}) == {"a": ("1", "2"), "b": ("1",)}
    assert into == {"a": ("1", "2")}
