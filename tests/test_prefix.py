from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.prefix import CachedPage, PrefixCache

SIZE = 2
TAG = (1, 2, 3)


def offered(*pages: int) -> list[tuple[int, tuple[int, int, int]]]:
    return [(page, TAG) for page in pages]


def pages(found: list[CachedPage]) -> list[int]:
    return [entry.page for entry in found]


def test_the_longest_run_of_equal_pages_is_found_and_one_token_is_left_to_compute() -> None:
    cache = PrefixCache(SIZE)
    assert cache.insert("t", "w", [1, 2, 3, 4, 5, 6], offered(7, 8, 9)) == [7, 8, 9]
    assert pages(cache.acquire("t", [1, 2, 3, 4, 9, 9, 9])) == [7, 8]
    assert pages(cache.acquire("t", [1, 2, 3, 4, 5, 6])) == [7, 8]
    assert pages(cache.acquire("t", [1, 2, 3, 4, 5, 6, 7])) == [7, 8, 9]
    assert pages(cache.acquire("t", [3, 4, 5, 6, 7])) == []
    assert pages(cache.acquire("t", [])) == pages(cache.acquire("t", [1])) == pages(cache.acquire("t", [1, 2])) == []


def test_tenants_do_not_meet_unless_the_fault_lets_them() -> None:
    prompt = [1, 2, 3]
    cache = PrefixCache(SIZE)
    cache.insert("alice", "w", prompt, offered(0))
    assert cache.acquire("bob", prompt) == []
    shared = PrefixCache(SIZE, by_tenant=False)
    shared.insert("alice", "w", prompt, offered(0))
    assert pages(shared.acquire("bob", prompt)) == [0]


def test_what_is_cached_already_is_not_taken_again() -> None:
    cache = PrefixCache(SIZE)
    cache.insert("t", "w", [1, 2, 3, 4], offered(0, 1))
    assert cache.insert("t", "x", [1, 2, 3, 4, 5, 6], offered(5, 6, 7)) == [7]
    assert pages(cache.acquire("t", [1, 2, 3, 4, 5, 6, 0])) == [0, 1, 7]


def test_pages_in_use_stay_and_of_the_others_the_last_of_the_oldest_prompt_goes_first() -> None:
    cache = PrefixCache(SIZE)
    cache.insert("t", "w", [1, 2, 3, 4], offered(0, 1))
    cache.insert("t", "x", [5, 6, 7, 8], offered(2, 3))
    used = cache.acquire("t", [1, 2, 0])
    assert cache.evictable == 3
    assert cache.evict(1) == [1]
    cache.release(used)
    assert cache.evict(9) == [3, 2, 0]
    assert len(cache) == cache.evictable == 0
    assert cache.evict(-1) == []


@given(
    first=st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=9)),
    second=st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=9)),
)
@settings(deadline=None, max_examples=300)
def test_a_hit_is_always_the_same_tenants_same_tokens(
    first: tuple[str, list[int]], second: tuple[str, list[int]]
) -> None:
    cache = PrefixCache(SIZE)
    full = len(first[1]) // SIZE
    cache.insert(first[0], "w", first[1], offered(*range(full)))
    found = len(cache.acquire(*second))
    same = 0
    while (
        first[0] == second[0]
        and same < full
        and (same + 1) * SIZE < len(second[1])
        and first[1][: (same + 1) * SIZE] == second[1][: (same + 1) * SIZE]
    ):
        same += 1
    assert found == same


class CacheMachine(RuleBasedStateMachine):
    """Requests come and go; pages are evicted between."""

    @initialize()
    def start(self) -> None:
        self.cache = PrefixCache(SIZE)
        self.holds: dict[int, tuple[str, list[CachedPage]]] = {}
        self.where: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.next = 0

    @rule(tenant=st.sampled_from("ab"), prompt=st.lists(st.integers(0, 1), max_size=8))
    def insert(self, tenant: str, prompt: list[int]) -> None:
        fresh = range(self.next, self.next + len(prompt) // SIZE)
        self.next = fresh.stop
        for page in self.cache.insert(tenant, "w", prompt, offered(*fresh)):
            self.where[page] = (tenant, tuple(prompt[: (page - fresh.start + 1) * SIZE]))

    @rule(tenant=st.sampled_from("ab"), prompt=st.lists(st.integers(0, 1), max_size=8))
    def acquire(self, tenant: str, prompt: list[int]) -> None:
        self.next += 1
        found = self.cache.acquire(tenant, prompt)
        for place, entry in enumerate(found, 1):
            assert self.where[entry.page] == (tenant, tuple(prompt[: place * SIZE]))
        self.holds[self.next] = (tenant, found)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.cache.release(self.holds.pop(data.draw(st.sampled_from(sorted(self.holds))))[1])

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        in_use = {entry.page for _, entries in self.holds.values() for entry in entries}
        for page in self.cache.evict(count):
            assert page not in in_use
            del self.where[page]

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        in_use = {entry.page for _, entries in self.holds.values() for entry in entries}
        assert len(self.cache) == len(self.where)
        assert self.cache.evictable == len(self.where) - len(in_use)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
