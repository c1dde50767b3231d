"""Recurrent states in the unified tree: a snapshot is of exactly one token count, and only there can a match end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.caches.base import InsertResult
from app.caches.tree.components.recurrent import StateComponent
from app.caches.tree.core import TreeCore
from app.caches.unified_radix_cache import UnifiedRadixCache
from app.config.model_config import Component
from app.errors import ConfigError, ForeignPageError, IntegrityError, OwnershipError, StaleHandleError
from tests.support.tree_model import CacheRig, key_of

PAGE = 4
SETS = [
    frozenset({Component.FULL, Component.RECURRENT}),
    frozenset({Component.RECURRENT}),
    frozenset({Component.FULL, Component.SWA, Component.RECURRENT}),
]


def make_rig(components: frozenset[Component] = SETS[0], page_size: int = PAGE, num_pages: int = 64) -> CacheRig:
    return CacheRig("unified_radix_cache", components=components, page_size=page_size, num_pages=num_pages)


@pytest.fixture(params=SETS, ids=lambda held: "+".join(each.value for each in Component if each in held))
def rig(request: pytest.FixtureRequest) -> Iterator[CacheRig]:
    rig = make_rig(request.param)
    yield rig
    rig.check()


def parts_of(rig: CacheRig) -> tuple[TreeCore, StateComponent]:
    assert isinstance(rig.cache, UnifiedRadixCache)
    assert rig.cache._states is not None
    return rig.cache._live_tree, rig.cache._states


def state_sizes(rig: CacheRig) -> tuple[int, int]:
    return rig.cache.evictable_states, rig.cache.protected_states


def publish(rig: CacheRig, tokens: object, *, state: int | None = None) -> InsertResult:
    """A request that publishes with a snapshot of its end (0: without one), and ends."""
    key = key_of(tokens)
    own = rig.take(-(-len(key) // rig.page_size))
    result = rig.publish_once(key, own, state=rig.take_state() if state is None else state)
    rig.free_what_was_not_adopted(own, result)
    return result


# -- what a match may use ------------------------------------------------------------------------------------------


def test_a_match_ends_only_where_a_snapshot_was_taken(rig: CacheRig) -> None:
    # given a chain with snapshots after 8 and 20 tokens
    first = publish(rig, range(8))
    second = publish(rig, range(20))

    # then
    for length, expected in ((5, 0), (9, 8), (13, 8), (20, 8), (21, 20), (40, 20)):
        assert rig.cache.probe(key_of(range(length))) == expected
        found = rig.cache.match(key_of(range(length)))
        assert (found.num_tokens, found.state) == (expected, {0: 0, 8: first.state, 20: second.state}[expected])
    assert rig.matched([*range(12), 99, 99]) == 8


def test_a_split_leaves_the_snapshot_with_the_lower_part(rig: CacheRig) -> None:
    # given
    stored = publish(rig, range(16))

    # when another prompt branches off inside
    publish(rig, [*range(8), 50, 51, 52, 53])

    # then
    assert (rig.matched(range(9)), rig.cache.num_nodes) == (0, 3)
    assert rig.cache.match(key_of(range(17))).state == stored.state


# -- what an insert owns -------------------------------------------------------------------------------------------


def test_a_snapshot_of_a_place_that_has_one_stays_the_callers(rig: CacheRig) -> None:
    # given
    stored = publish(rig, range(16))
    own, state = rig.take(4), rig.take_state()

    # when
    window = rig.take_window(4) if rig.has_window else np.empty(0, np.int32)
    again = rig.cache.insert(key_of(range(16)), own, window, state)

    # then
    assert (stored.state_adopted, again.state_adopted, again.state) == (True, False, stored.state)
    rig.check(held_by_requests=own, held_window_pages=window, held_states=np.array([state], np.int32))
    rig.allocator.port.free(own)
    rig.window_allocator.port.free(window)
    rig.state_allocator.port.free(np.array([state], np.int32))


def test_a_place_inside_an_edge_can_get_a_snapshot_of_its_own(rig: CacheRig) -> None:
    """A turn boundary that a later request reached with a step's end."""
    publish(rig, range(16))
    result = publish(rig, range(8))
    assert (result.num_tokens, result.state_adopted, result.duplicates) == (8, True, ((0, 2),))
    assert [rig.matched(range(length)) for length in (9, 17)] == [8, 16]


@pytest.mark.parametrize(("stored", "published"), [([], 0), ([8], 8), ([8, 16], 16), ([8, 16, 32], 16)])
def test_without_a_snapshot_only_what_is_usable_already_is_published(
    rig: CacheRig, stored: list[int], published: int
) -> None:
    """Behaviour 10: the rest stays the request's; cap 0 publishes nothing."""
    # given
    for length in stored:
        publish(rig, range(length))
    nodes = rig.cache.num_nodes
    own = rig.take(7)

    # when
    result = rig.publish_once(key_of(range(26)), own)

    # then
    assert (result.num_tokens, result.state_adopted, rig.cache.num_nodes) == (published, False, nodes)
    assert not set(result.pages.tolist()) & set(own.tolist())
    rig.cache.unlock(rig.cache.lock(result))
    rig.check(held_by_requests=own)
    rig.allocator.port.free(own)


def test_a_snapshot_in_two_places_is_refused_before_any_change(rig: CacheRig) -> None:
    # given
    stored = publish(rig, range(16))
    num_nodes = rig.cache.num_nodes

    # when
    own = rig.take(4)
    window = rig.take_window(4) if rig.has_window else np.empty(0, np.int32)
    for tokens in (range(90, 106), range(8)):
        with pytest.raises(OwnershipError) as refusal:
            rig.cache.insert(key_of(tokens), own, window, stored.state)
        assert tuple(refusal.value.pages) == (stored.state,)
        assert rig.cache.num_nodes == num_nodes
    with pytest.raises(ForeignPageError, match=r"1\.\.64"):
        rig.cache.insert(key_of(range(90, 106)), own, window, 65)
    with pytest.raises(ValueError, match="snapshot 9 of 15 tokens"):
        rig.cache.insert(key_of(range(15)), own, window, 9)

    # then
    rig.check(held_by_requests=own, held_window_pages=window)
    rig.allocator.port.free(own)
    rig.window_allocator.port.free(window)


# -- what a lock holds, what eviction takes ------------------------------------------------------------------------


def test_a_lock_holds_the_path_and_the_one_snapshot_at_its_end(rig: CacheRig) -> None:
    # given snapshots after 8, 16 and 24 tokens
    for length in (8, 16, 24):
        publish(rig, range(length))
    found = rig.cache.match(key_of(range(17)))

    # when
    receipt = rig.cache.lock(found)

    # then
    assert (rig.cache.protected_pages, state_sizes(rig)) == (4, (2, 1))
    assert rig.cache.evict_states(100) == 2
    assert (rig.cache.evict(100), rig.cache.protected_pages) == (0, 4)
    assert rig.cache.match(key_of(range(25))).state == found.state
    rig.cache.unlock(receipt)
    assert (rig.cache.evictable_pages, state_sizes(rig)) == (4, (1, 0))


def test_a_lock_outlives_splits_of_its_node_and_snapshots_within_it(rig: CacheRig) -> None:
    # given
    receipt = rig.cache.lock(publish(rig, range(16)))

    # when the upper half gets a snapshot of its own
    publish(rig, range(8))

    # then that one is not locked
    assert (rig.cache.protected_pages, state_sizes(rig)) == (4, (1, 1))
    rig.check()
    rig.cache.unlock(receipt)
    assert state_sizes(rig) == (2, 0)


@pytest.mark.parametrize("came_back", [False, True], ids=["gone", "another in its place"])
def test_a_match_whose_snapshot_has_left_cannot_be_locked(rig: CacheRig, *, came_back: bool) -> None:
    """H22. Its node is still there, with the same pages."""
    # given
    publish(rig, range(8))
    found = rig.cache.match(key_of(range(9)))
    publish(rig, range(16))

    # when
    assert rig.cache.evict_states(1) == 1
    if came_back:
        taken = rig.take_state()  # so that the new one is another
        assert publish(rig, range(8)).state != found.state
        rig.state_allocator.port.free(np.array([taken], np.int32))

    # then
    with pytest.raises(StaleHandleError):
        rig.cache.lock(found)
    assert (rig.cache.protected_pages, state_sizes(rig)[1]) == (0, 0)


def test_evicting_snapshots_leaves_inner_nodes_and_takes_useless_leaves_whole(rig: CacheRig) -> None:
    # given a prefix with two continuations, of which the first ends with no snapshot on the way
    publish(rig, range(8))
    publish(rig, range(24))
    publish(rig, [*range(8), *range(50, 58)])
    publish(rig, [*range(16), *range(70, 74)])  # splits the first continuation
    assert rig.cache.num_nodes == 5

    # when the oldest goes: the first continuation's, a leaf
    assert rig.cache.evict_states(1) == 1
    assert (rig.cache.num_nodes, rig.cache.probe(key_of(range(9)))) == (4, 8)

    # when the next one goes: the inner node's, which was of use to two continuations
    assert rig.cache.evict_states(1) == 1
    assert (rig.cache.num_nodes, rig.matched(range(9))) == (4, 0)

    # when the last ones go: leaves, and with them what led to them only
    assert rig.cache.evict_states(2) == 2
    assert (rig.cache.num_nodes, rig.cache.evictable_pages) == (0, 0)
    assert rig.allocator.port.available() == rig.allocator.port.capacity


@pytest.mark.parametrize("num_states", [-1, 0, 1, 2, 3])
def test_evict_states_frees_what_was_asked_for_or_all_that_is_unlocked(rig: CacheRig, num_states: int) -> None:
    """H33."""
    stored = [publish(rig, range(start, start + 8)) for start in (0, 100, 200)]
    receipt = rig.cache.lock(stored[0])
    available = rig.state_allocator.port.available()
    freed = rig.cache.evict_states(num_states)
    assert freed == rig.state_allocator.port.available() - available == max(0, min(num_states, 2))
    rig.cache.unlock(receipt)


def test_evicting_pages_takes_snapshots_along_and_what_they_alone_made_usable(rig: CacheRig) -> None:
    # given a node without a snapshot above two leaves
    publish(rig, range(16))
    publish(rig, [*range(8), 50, 51, 52, 53])

    # when
    assert rig.cache.evict(1) == 2
    assert rig.cache.evict(1) == 3

    # then
    assert rig.cache.num_nodes == 0
    assert rig.state_allocator.port.available() == rig.state_allocator.port.capacity


def test_a_snapshot_that_was_used_stays_longer(rig: CacheRig) -> None:
    for start in (0, 100):
        publish(rig, range(start, start + 8))
    rig.matched(range(9))
    rig.cache.evict_states(1)
    assert (rig.matched(range(9)), rig.matched(range(100, 109))) == (8, 0)


def test_a_prefix_without_a_snapshot_at_its_end_is_explained(rig: CacheRig) -> None:
    # given
    publish(rig, range(8))
    publish(rig, range(24))
    key = key_of(range(20))

    # when
    miss = rig.cache.explain_miss(key, rig.cache.match(key).num_tokens)

    # then
    assert (miss.reason, miss.num_matched, miss.lacking) == ("incomplete", 8, (Component.RECURRENT,))
    assert "without the recurrent state" in miss.sentence


def test_integrity_check_finds_a_snapshot_that_nobody_holds(rig: CacheRig) -> None:
    publish(rig, range(8))
    _, states = parts_of(rig)
    node = next(iter(states.parts))
    node.lock_ref = 1
    with pytest.raises(IntegrityError):
        rig.cache.check_integrity()
    node.lock_ref = 0
    part = states.parts.pop(node)
    with pytest.raises(IntegrityError, match="a leaf has no snapshot"):
        rig.cache.check_integrity()
    states.parts[node] = part


def test_a_cache_for_recurrent_models_needs_their_pool() -> None:
    with pytest.raises(ConfigError, match="state_allocator"):
        UnifiedRadixCache(replace(make_rig().deps, state_allocator=None))


@pytest.mark.parametrize("components", [SETS[0], SETS[2]], ids=["full+recurrent", "full+swa+recurrent"])
def test_a_chain_of_20000_nodes_reaches_no_recursion_limit(components: frozenset[Component]) -> None:
    """H18."""
    # given one prefix, cut into pages; only its end has a snapshot
    depth = 20_000
    rig = make_rig(components, page_size=1, num_pages=depth + 2)
    tokens = np.arange(depth, dtype=np.int32)
    publish(rig, tokens)
    tree, _ = parts_of(rig)
    for node in list(tree.nodes()):
        for _ in range(node.pages.size - 1):
            tree.split(node, 1)

    # when, then
    whole = key_of([*tokens, 0])
    assert rig.cache.probe(whole) == rig.cache.match(whole).num_tokens == depth
    receipt = rig.cache.lock(rig.cache.match(whole))
    assert (rig.cache.protected_pages, state_sizes(rig)) == (depth, (0, 1))
    rig.check()
    rig.cache.unlock(receipt)
    rig.cache.evict_states(1)
    assert (rig.cache.num_nodes, rig.cache.evictable_pages) == (0, 0)
