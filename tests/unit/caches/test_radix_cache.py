"""RadixCache and its tree: what the contract of all caches does not say, and the faults seen elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pytest_mock import MockerFixture

from app.caches.radix_cache import RadixCache
from app.caches.tree.core import TreeCore
from app.caches.tree.policies.lru import LruOrder
from app.core.keys import Namespace
from app.errors import IntegrityError, OwnershipError, StaleHandleError
from app.observability.kv_events import KvEventRecorder, KvEventReplica
from tests.support.tree_model import CacheRig, key_of

PAGE = 4


@pytest.fixture
def rig() -> Iterator[CacheRig]:
    rig = CacheRig("radix_cache", page_size=PAGE)
    yield rig
    rig.check()


def tree_of(rig: CacheRig) -> TreeCore:
    assert isinstance(rig.cache, RadixCache)
    return rig.cache._live_tree


@pytest.mark.parametrize(
    "matched", [16, 32, 8, 24], ids=["inner node", "leaf", "inside the first edge", "inside the second edge"]
)
def test_a_lock_keeps_every_matched_token_and_none_beyond(rig: CacheRig, matched: int) -> None:
    """H04."""
    # given a chain of two nodes, four pages each
    rig.store(range(16))
    rig.store(range(32))
    found = rig.cache.match(key_of(range(matched + 1)))

    # when
    receipt = rig.cache.lock(found)
    rig.cache.evict(100)

    # then
    assert rig.cache.protected_pages == matched // PAGE
    assert rig.cache.evictable_pages == 0
    assert rig.cache.match(key_of(range(33))).pages.tolist() == found.pages.tolist()
    rig.cache.unlock(receipt)
    assert rig.cache.evict(100) == matched // PAGE


def test_a_match_whose_pages_have_left_cannot_be_locked(rig: CacheRig) -> None:
    """H22: a cached length noted earlier is worth nothing after an eviction, even if the same tokens came back."""
    # given
    stored = rig.store(range(16))
    found = rig.cache.match(key_of(range(17)))

    # when
    rig.cache.evict(1)
    rig.store(range(16))

    # then
    for stale in (found, stored):
        with pytest.raises(StaleHandleError):
            rig.cache.lock(stale)
    assert rig.cache.protected_pages == 0


def test_a_match_from_before_a_reset_cannot_be_locked(rig: CacheRig) -> None:
    # given
    found = rig.cache.match(key_of(range(500, 520)))
    stored = rig.store(range(16))

    # when
    rig.lose_pool()

    # then
    with pytest.raises(StaleHandleError):
        rig.cache.lock(stored)
    rig.cache.unlock(rig.cache.lock(found))  # it matched nothing, so nothing can be stale about it


def test_a_lock_outlives_splits_of_its_node(rig: CacheRig) -> None:
    # given a locked leaf
    receipt = rig.cache.lock(rig.store(range(32)))

    # when it is split, twice
    rig.matched(range(17))
    rig.store([*range(8), 70, 71, 72, 73])

    # then all of it is still protected, and all of it is released
    assert rig.cache.protected_pages == 8
    rig.check()
    rig.cache.unlock(receipt)
    assert rig.cache.protected_pages == 0


def test_the_unmatched_rest_of_a_split_node_keeps_its_age(rig: CacheRig) -> None:
    """Hit rate depends on it: refreshing what nobody asked for keeps it in place of what was."""
    # given an old node, then a newer one
    old = rig.store(range(16)).pages.tolist()
    newer = rig.store(range(50, 58)).pages.tolist()

    # when the first half of the old one is used
    rig.matched(range(9))

    # then its other half goes first
    freed: list[int] = []
    for _ in range(3):
        rig.cache.evict(1)
        freed = rig.allocator.recorded_page_ids().tolist()
    assert freed == [*old[2:], *newer, *old[:2]]


@pytest.mark.parametrize("num_pages", [0, 1, 3, 4, 5, 11, 12, 13, 100])
@pytest.mark.parametrize("locked", [False, True], ids=["unlocked", "one locked"])
def test_evict_frees_what_was_asked_for_and_less_than_a_node_more(rig: CacheRig, num_pages: int, locked: bool) -> None:
    """H33."""
    # given three leaves of four pages
    stored = [rig.store(range(start, start + 16)) for start in (0, 100, 200)]
    receipts = [rig.cache.lock(stored[0])] if locked else []
    unlocked = rig.cache.evictable_pages
    available = rig.allocator.port.available()

    # when
    freed = rig.cache.evict(num_pages)

    # then
    assert freed == rig.allocator.port.available() - available
    assert min(num_pages, unlocked) <= freed < min(num_pages, unlocked) + 4
    for receipt in receipts:
        rig.cache.unlock(receipt)


def test_evicting_the_shortfall_takes_no_more_than_the_shortfall() -> None:
    """Peers' fault 6: ten are needed and eight are free; two leave, not ten."""
    # given a pool of 40 pages, 8 of them free, the rest leaves of one page
    rig = CacheRig("radix_cache", num_pages=40, page_size=PAGE)
    for start in range(32):
        rig.store(range(100 * start, 100 * start + 4))

    # when
    freed = rig.cache.evict(10 - rig.allocator.port.available())

    # then
    assert freed == 2
    assert rig.take(10).size == 10


def test_evicting_does_not_walk_the_tree(rig: CacheRig, mocker: MockerFixture) -> None:
    """S1: the cost of evicting one leaf does not depend on how many there are."""
    # given
    for start in range(12):
        rig.store(range(100 * start, 100 * start + 4))
    walk = mocker.patch.object(TreeCore, "nodes", side_effect=AssertionError("walked"))
    pops = mocker.spy(LruOrder, "pop")

    # when
    rig.cache.evict(3)

    # then
    assert pops.call_count == 3
    mocker.stop(walk)


def test_an_unsettled_page_published_twice_is_refused_and_changes_nothing(rig: CacheRig) -> None:
    """H02: a request publishes its last page, rewrites that page's tokens, and publishes again with the same page."""
    # given
    own = rig.take(4)
    rig.cache.insert(key_of(range(16)), own)
    nodes = rig.cache.num_nodes

    # when, many times
    for attempt in range(5):
        rewritten = [*range(12), 90, 91, 92, 93 + attempt]
        with pytest.raises(OwnershipError) as refusal:
            rig.cache.insert(key_of(rewritten), own)

        # then it names the page that would have had two owners
        assert tuple(refusal.value.pages) == (own[3],)
        assert rig.cache.num_nodes == nodes
        rig.check()


def test_duplicates_are_told_per_node_at_the_overlap(rig: CacheRig) -> None:
    """Peers' fault 12: nothing between two overlaps is freed by mistake."""
    # given three nodes on a path, of 2, 1 and 3 pages
    for length in (8, 12, 24):
        rig.store(range(length))

    # when another request publishes a longer prefix, blindly
    own = rig.take(8)
    result = rig.cache.insert(key_of(range(32)), own)

    # then
    assert result.duplicates == ((0, 2), (2, 1), (3, 3))
    assert result.pages[6:].tolist() == own[6:].tolist()
    assert not set(result.pages[:6].tolist()) & set(own.tolist())
    rig.check(held_by_requests=own[:6])
    rig.allocator.port.free(own[:6])


def test_publishing_the_caches_own_pages_again_leaves_nothing_to_free(rig: CacheRig) -> None:
    # given
    stored = rig.store(range(16))

    # when
    again = rig.cache.insert(key_of(range(16)), stored.pages)

    # then
    assert again.pages.tolist() == stored.pages.tolist()
    assert again.duplicates == ((0, 4),)


def test_the_padding_page_and_too_few_pages_are_refused(rig: CacheRig) -> None:
    with pytest.raises(OwnershipError):
        rig.cache.insert(key_of(range(8)), np.array([0, 5], np.int32))
    with pytest.raises(ValueError, match="1 pages for a key of 2"):
        rig.cache.insert(key_of(range(8)), np.array([5], np.int32))
    assert rig.cache.num_nodes == 0


def test_pages_are_handed_out_read_only_and_taken_over_by_copy(rig: CacheRig) -> None:
    # given
    own = rig.take(4)
    result = rig.cache.insert(key_of(range(16)), own)

    # when
    own[:] = 0

    # then
    found = rig.cache.match(key_of(range(17)))
    assert found.pages.tolist() == result.pages.tolist() == [1, 2, 3, 4]
    for pages in (found.pages, result.pages):
        with pytest.raises(ValueError):
            pages[0] = 7


def test_namespaces_that_are_empty_leave_no_trace(rig: CacheRig) -> None:
    """S1: memory is flat, whatever salts clients choose."""
    for salt in range(200):
        namespace = Namespace(salt=str(salt))
        rig.matched(range(9), namespace)
        rig.store(range(8), namespace)
        rig.cache.evict(2)
        rig.matched(range(9), namespace)
    assert len(tree_of(rig).roots) == 0


def test_a_chain_of_20000_nodes_reaches_no_recursion_limit() -> None:
    """H18: every public call, on a path of 20,000 nodes."""
    # given one node, cut into pages from its end
    depth = 20_000
    recorder = KvEventRecorder(page_size=1)
    rig = CacheRig("radix_cache", num_pages=depth + 2, page_size=1, events=recorder)
    tokens = np.arange(depth, dtype=np.int32)
    rig.store(tokens)
    for length in range(depth - 1, 0, -1):
        rig.matched(tokens[: length + 1])
    assert rig.cache.num_nodes == depth

    # when, then
    whole = key_of([*tokens, 0])
    assert rig.cache.probe(whole) == rig.cache.match(whole).num_tokens == depth
    receipt = rig.cache.lock(rig.cache.match(whole))
    assert rig.cache.protected_pages == depth
    rig.check()
    rig.cache.unlock(receipt)
    assert rig.store([0, 77]).num_tokens == 2  # a branch at the top
    assert rig.cache.insert(key_of(tokens), rig.cache.match(whole).pages).num_tokens == depth
    rig.check()
    assert rig.cache.evict(10) == 10
    assert rig.cache.flush() == depth + 1 - 10
    replica = KvEventReplica()
    replica.apply(recorder.drain())
    assert replica.page_hashes == set()

    # and once more, to lose it whole
    rig.store(tokens)
    for length in range(depth - 1, 0, -1):
        rig.matched(tokens[: length + 1])
    rig.lose_pool()
    assert rig.matched(tokens) == 0
    rig.check()


def test_a_split_at_the_top_of_a_path_leaves_the_rest_reachable(rig: CacheRig) -> None:
    rig.store(range(64))
    assert [rig.matched(range(length)) for length in (5, 65, 9, 65, 64)] == [4, 64, 8, 64, 60]


def test_integrity_check_finds_what_is_broken() -> None:
    def broken_rig() -> tuple[CacheRig, TreeCore]:
        rig = CacheRig("radix_cache", page_size=PAGE)
        rig.store(range(8))
        rig.store(range(16))
        return rig, tree_of(rig)

    # given, each time, a sound tree with one thing wrong
    rig, tree = broken_rig()
    next(tree.nodes()).lock_ref = 1
    with pytest.raises(IntegrityError, match="0 holders has lock_ref 1"):
        rig.cache.check_integrity()

    rig, tree = broken_rig()
    tree.order.touch(next(iter(tree.order)))
    with pytest.raises(IntegrityError, match="a parent would be evicted before its child"):
        rig.cache.check_integrity()

    rig, tree = broken_rig()
    tree.evictable_pages += 1
    with pytest.raises(IntegrityError, match="counted"):
        rig.cache.check_integrity()

    rig, tree = broken_rig()
    upper, lower = tree.nodes()
    lower.pages = upper.pages
    with pytest.raises(IntegrityError, match="double owned"):
        rig.cache.check_integrity()

    rig, tree = broken_rig()
    _, lower = tree.nodes()
    lower.edge = lower.edge[:-4]
    with pytest.raises(IntegrityError, match="2 pages has 28 bytes"):
        rig.cache.check_integrity()
