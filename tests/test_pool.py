from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.pool import CACHED, PagePool, PoolError
from engine.segment import Segment, SegmentError, remove_stale, segment_path

PAGES = 12
SHAPE = (2, 2, 4, 1, 8)
PAGE_BYTES = 2 * 2 * 4 * 8 * 4


def memory(pages: int = PAGES) -> Segment:
    """A segment whose file is gone already."""
    path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}")
    segment = Segment.create(path, pages, PAGE_BYTES)
    segment.unlink()
    return segment


@pytest.fixture
def pool() -> PagePool:
    return PagePool(memory(), SHAPE, torch.float32, b"key")


def test_pages_given_back_last_are_handed_out_first_and_in_the_order_of_the_block_table(pool: PagePool) -> None:
    assert pool.alloc("a", 3) == [0, 1, 2]
    assert pool.alloc("b", 2) == [3, 4]
    assert pool.free("a", [2, 0, 1]) == [2, 0, 1]
    assert pool.alloc("c", 4) == [2, 0, 1, 5]


def test_all_or_nothing(pool: PagePool) -> None:
    assert pool.alloc("a", PAGES + 1) is None
    assert pool.free_pages == PAGES
    assert pool.alloc("a", 0) == []


def test_a_held_page_is_deferred_until_its_last_hold_ends(pool: PagePool) -> None:
    pages = pool.alloc("a", 3)
    assert pages == [0, 1, 2]
    pool.hold("t1", [0, 1])
    pool.hold("t2", [1])
    assert pool.free("a", pages) == [2]
    assert pool.deferred_pages == 2
    assert pool.alloc("b", 10) == [2, *range(3, 12)]
    assert pool.alloc("b", 1) is None
    assert pool.unhold("t1") == {"a": [0]}
    assert pool.unhold("t1") == {}
    assert pool.alloc("b", 1) == [0]
    assert pool.unhold("t2") == {"a": [1]}


def test_who_frees_what_is_checked(pool: PagePool) -> None:
    pool.alloc("a", 2)
    for owner, pages in (("b", [0]), ("a", [0, 0]), ("a", [5])):
        with pytest.raises(PoolError):
            pool.free(owner, pages)
    pool.hold("t", [0])
    with pytest.raises(PoolError, match="while a transfer"):
        pool.cache("a", [0])
    pool.free("a", [0])
    with pytest.raises(PoolError):
        pool.free("a", [0])  # deferred already
    with pytest.raises(PoolError, match="holds pages already"):
        pool.hold("t", [1])


def test_without_the_check_a_page_can_be_handed_out_twice() -> None:
    pool = PagePool(memory(), SHAPE, torch.float32, checked=False)
    pages = pool.alloc("a", 2)
    assert pages is not None
    pool.free("a", pages)
    pool.free("a", pages)
    assert pool.alloc("b", 2) == pool.alloc("c", 2) == pages


def test_tags_are_cleared_when_a_page_changes_hands_and_bind_tenant_request_and_generation(pool: PagePool) -> None:
    pages = pool.alloc("a", 1)
    assert pages == [0]
    tags = pool.tags_of("t", "a", [1])
    pool.segment.put(0, torch.ones(PAGE_BYTES, dtype=torch.uint8), tags[0].numpy())
    assert torch.equal(pool.tags[0], tags[0])
    pool.free("a", pages)
    assert not pool.tags[0].any()
    assert pool.segment.data[0].all(), "what the page holds stays"
    pool.alloc("b", 1)
    assert pool.generation(0) == 2
    others = [pool.tag("t", "a", 1), pool.tag("u", "a", 1), pool.tag("t", "b", 1), pool.tag("t", "a", 2)]
    assert len(set(others)) == 4
    assert pool.tag("a", "b", 1) != pool.tag("b", "a", 1)
    assert PagePool(memory(), SHAPE, torch.float32, b"other").tag("t", "a", 1) != others[0]


def test_scrub_zeroes_bytes_and_tags(pool: PagePool) -> None:
    pool.segment.data[:] = 7
    pool.tags[:] = 7
    pool.scrub([1, 3])
    assert not pool.kv[[1, 3]].any()
    assert not pool.tags[[1, 3]].any()
    assert pool.segment.data[2].all()


class PoolMachine(RuleBasedStateMachine):
    """Requests and the cache take and give pages in any order, transfers hold them."""

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(memory(), SHAPE, torch.float32)
        self.owned: dict[str, list[int]] = {}
        self.cached: list[int] = []
        self.holds: dict[str, list[int]] = {}
        self.deferred: set[int] = set()
        self.generations = [0] * PAGES
        self.count = 0

    @property
    def held(self) -> set[int]:
        return {page for pages in self.holds.values() for page in pages}

    @rule(count=st.integers(1, 5))
    def alloc(self, count: int) -> None:
        self.count += 1
        request = f"r{self.count}"
        room = self.pool.free_pages
        pages = self.pool.alloc(request, count)
        if pages is None:
            assert room < count
            return
        assert len(pages) == count
        taken = {page for pages in self.owned.values() for page in pages} | set(self.cached)
        assert not set(pages) & (taken | self.deferred | self.held), "handed out while in use"
        for page in pages:
            assert self.pool.generation(page) > self.generations[page]
            self.generations[page] = self.pool.generation(page)
        self.owned[request] = pages

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.owned)))
        pages = self.owned.pop(request)
        now = self.pool.free(request, pages)
        assert now == [page for page in pages if page not in self.held]
        self.deferred |= set(pages) - set(now)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.owned)))
        pages = self.owned[request]
        if set(pages) & self.held:
            return
        self.pool.cache(request, pages)
        self.cached += self.owned.pop(request)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.cached))
        if page in self.held:
            with pytest.raises(PoolError):
                self.pool.evict([page])
        else:
            self.pool.evict([page])
            self.cached.remove(page)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.owned)))
        self.count += 1
        holder = f"t{self.count}"
        pages = data.draw(st.lists(st.sampled_from(self.owned[request] + self.cached), unique=True))
        self.pool.hold(holder, pages)
        self.holds[holder] = pages

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.holds)))
        pages = self.holds.pop(holder)
        freed = {page for freed in self.pool.unhold(holder).values() for page in freed}
        assert freed == (set(pages) & self.deferred) - self.held
        self.deferred -= freed

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if not hasattr(self, "pool"):
            return
        owned = [page for pages in self.owned.values() for page in pages]
        assert self.pool.free_pages + len(owned) + len(self.cached) + len(self.deferred) == PAGES
        assert len({*owned, *self.cached, *self.deferred}) == len(owned) + len(self.cached) + len(self.deferred)
        assert self.pool.deferred_pages == len(self.deferred)
        assert self.pool.cached_pages == len(self.cached)
        assert self.pool.owned_pages == len(owned) + len(self.deferred)
        assert all(self.pool.owner(page) == CACHED for page in self.cached)
        assert all(self.pool.owner(page) == request for request, pages in self.owned.items() for page in pages)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# Segments


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvguard-test-{torch.randint(1 << 62, (1,)).item()}")
    yield path
    path.unlink(missing_ok=True)


def test_two_mappings_show_the_same_bytes(path: Path) -> None:
    ours = Segment.create(path, 4, 64)
    theirs = Segment.open(path, 64)
    assert theirs.pages == 4
    theirs.put(2, torch.full((64,), 9, dtype=torch.uint8), np.array([1, -2, 3]))
    assert ours.data[2].tolist() == [9] * 64
    assert ours.tags[2].tolist() == [1, -2, 3]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("pages", "page_bytes"), [(0, 64), (4, 0), (4, 12)])
def test_sizes_that_make_no_pool(path: Path, pages: int, page_bytes: int) -> None:
    with pytest.raises(SegmentError, match=str(path)):
        Segment.create(path, pages, page_bytes)
    assert not path.exists()


def test_more_memory_than_there_is_says_so(path: Path) -> None:
    with pytest.raises(SegmentError, match="set fewer pages"):
        Segment.create(path, 1 << 30, 1 << 20)
    assert not path.exists()


def test_a_pool_of_another_page_size_or_another_kind_of_file_is_refused(path: Path, tmp_path: Path) -> None:
    Segment.create(path, 4, 64)
    with pytest.raises(SegmentError, match="must agree on model"):
        Segment.open(path, 72)
    path.chmod(0o644)
    with pytest.raises(SegmentError, match="only this user"):
        Segment.open(path, 64)
    with pytest.raises(SegmentError, match="has its worker ended"):
        Segment.open(tmp_path / "none", 64)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(SegmentError):
        Segment.open(tmp_path / "link", 64)
    (tmp_path / "empty").touch(mode=0o600)
    with pytest.raises(SegmentError):
        Segment.open(tmp_path / "empty", 64)


def test_what_a_killed_worker_left_is_removed_by_its_next_start_and_nothing_else(tmp_path: Path) -> None:
    ours = [segment_path(tmp_path, "decode-0", epoch) for epoch in (1, 2)]
    others = [segment_path(tmp_path, "decode-00", 1), segment_path(tmp_path / "x", "decode-0", 1)]
    try:
        for file in (*ours, *others):
            Segment.create(file, 1, 8)
        remove_stale(tmp_path, "decode-0")
        assert not any(file.exists() for file in ours)
        assert all(file.exists() for file in others)
    finally:
        for file in (*ours, *others):
            file.unlink(missing_ok=True)
