"""What the radix tree tells of its nodes: hits, the prefixes that saved most, and those that are being evicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.caches.tree.inspection import VISITED_NODES
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.errors import IntegrityError
from tests.support.tree_model import CacheRig, key_of
from tests.support.watched_cache import WatchedRig


@pytest.fixture
def rig() -> Iterator[WatchedRig]:
    rig = WatchedRig()
    yield rig
    rig.check()


def saved(rig: CacheRig) -> list[tuple[int, int, int]]:
    """(prefix tokens, node tokens, hits) of each node, best first."""
    return [(each.num_tokens, each.node_tokens, each.hits) for each in rig.cache.top_prefixes(100).prefixes]


# -- hits ----------------------------------------------------------------------------------------------------------


def test_a_hit_counts_for_every_node_of_the_matched_path_and_for_no_other(rig: WatchedRig) -> None:
    # given a node of 8 tokens with two continuations
    rig.store(range(8))
    rig.store(range(16))
    rig.store([*range(8), 50, 51, 52, 53])

    # when
    rig.matched(range(17))
    rig.matched(range(17))
    rig.matched(range(9))

    # then
    assert saved(rig) == [(8, 8, 3), (16, 8, 2), (12, 4, 0)]


def test_both_halves_of_a_split_node_keep_the_hits_of_the_whole(rig: WatchedRig) -> None:
    # given
    rig.store(range(16))
    for _ in range(3):
        rig.matched(range(17))

    # when a match ends inside it
    rig.matched(range(5))

    # then
    assert saved(rig) == [(16, 12, 3), (4, 4, 4)]


def test_publishing_probing_and_inspecting_are_no_hits(rig: WatchedRig) -> None:
    # given
    rig.store(range(8))

    # when
    rig.store(range(8))
    rig.store(range(16))
    rig.cache.probe(key_of(range(17)))
    rig.cache.explain_miss(key_of(range(17)), 16)
    rig.cache.top_prefixes(5)

    # then
    assert [hits for _, _, hits in saved(rig)] == [0, 0]


def test_a_request_that_asks_again_until_there_is_room_is_one_hit(rig: WatchedRig) -> None:
    # given
    rig.store(range(8))
    waiting = key_of(range(20))

    # when it is matched in every planning round, and then another one with the same tokens
    for _ in range(50):
        rig.cache.match(waiting)
    rig.matched(range(20))

    # then
    assert saved(rig) == [(8, 8, 2)]


# -- top prefixes --------------------------------------------------------------------------------------------------


def test_top_prefixes_come_by_tokens_saved_and_then_by_length(rig: WatchedRig) -> None:
    # given 1 hit of 16 tokens, 3 hits of 8, and two without a hit
    rig.store(range(16))
    rig.matched(range(17))
    rig.store(range(100, 108))
    for _ in range(3):
        rig.matched(range(100, 109))
    rig.store(range(200, 204))
    rig.store(range(300, 312))

    # when
    top = rig.cache.top_prefixes(3)

    # then
    assert [(each.head[0], each.saved_tokens) for each in top.prefixes] == [(100, 24), (0, 16), (300, 0)]
    assert (top.num_visited, top.num_nodes, top.complete) == (4, 4, True)


def test_a_prefix_shows_its_first_tokens_and_its_last_and_none_twice(rig: WatchedRig) -> None:
    # given prefixes of one node, of 28 tokens and of 60 tokens in three nodes
    for length in (20, 28, 60):
        rig.store(range(length))

    # when
    shown = {each.num_tokens: (each.head, each.tail) for each in rig.cache.top_prefixes(10).prefixes}

    # then
    assert shown == {
        20: (tuple(range(20)), ()),
        28: (tuple(range(24)), (24, 25, 26, 27)),
        60: (tuple(range(24)), tuple(range(52, 60))),
    }


def test_the_tail_of_a_prefix_reaches_over_small_nodes() -> None:
    # given nodes of one token each
    rig = WatchedRig(page_size=1, num_pages=100)
    for length in range(1, 40):
        rig.store(range(length))

    # when
    (longest,) = (each for each in rig.cache.top_prefixes(100).prefixes if each.num_tokens == 39)

    # then
    assert (longest.head, longest.tail) == (tuple(range(24)), tuple(range(31, 39)))


def test_a_prefix_tells_its_namespace_whether_it_is_locked_and_how_long_it_was_idle(rig: WatchedRig) -> None:
    # given
    tenant = Namespace(salt="t", dp_rank=2)
    rig.store(range(8), tenant)
    rig.watch.now += 5
    receipt = rig.cache.lock(rig.store(range(12)))
    rig.watch.now += 2

    # then
    locked, idle = rig.cache.top_prefixes(2).prefixes
    assert (locked.namespace, locked.locked, locked.idle_s) == (DEFAULT_NAMESPACE, True, 0.0)
    assert (idle.namespace, idle.locked, idle.idle_s) == (tenant, False, 7.0)

    # when it is unlocked, it counts as used until now
    rig.cache.unlock(receipt)
    rig.watch.now += 1
    assert [each.idle_s for each in rig.cache.top_prefixes(2).prefixes] == [1.0, 8.0]


def test_of_a_huge_tree_only_the_most_recently_used_nodes_are_ranked_and_it_says_so() -> None:
    # given more nodes than are looked at, the first of which is the best
    count = VISITED_NODES + 50
    rig = WatchedRig(num_pages=count)
    for start in range(count):
        rig.store(range(4 * start, 4 * start + 4))
    rig.matched(range(5))

    # when
    top = rig.cache.top_prefixes(1)

    # then
    assert (top.prefixes[0].head, top.prefixes[0].hits) == ((0, 1, 2, 3), 1)
    assert (top.num_visited, top.num_nodes, top.complete) == (VISITED_NODES, count, False)

    # and a locked one is looked at however old it is
    receipt = rig.cache.lock(rig.cache.match(key_of(range(4, 9))))
    for start in range(1000, count):
        rig.matched(range(4 * start, 4 * start + 5))
    assert any(each.locked for each in rig.cache.top_prefixes(VISITED_NODES).prefixes)
    rig.cache.unlock(receipt)


def test_inspecting_changes_neither_the_order_of_eviction_nor_the_nodes(rig: WatchedRig) -> None:
    # given
    rig.store(range(16))
    rig.store(range(100, 116))
    tree = rig.cache._live_tree
    before = [(node.pages.tolist(), node.used_at, node.hits) for node in tree.order]

    # when: within an edge, at its end, beyond it, elsewhere
    for matched, length in ((8, 13), (0, 17), (4, 40), (16, 40)):
        rig.cache.explain_miss(key_of(range(length)), matched)
    rig.cache.explain_miss(key_of(range(500, 520)), 0)
    rig.cache.top_prefixes(10)

    # then
    assert [(node.pages.tolist(), node.used_at, node.hits) for node in tree.order] == before


# -- the observer and the integrity check ------------------------------------------------------------------------------


def test_the_observer_is_told_of_each_evicted_node(rig: WatchedRig) -> None:
    # given a chain of a long node and a short one; the long one was hit twice
    rig.store(range(40))
    rig.store(range(44))
    rig.matched(range(41))
    rig.watch.now += 1
    rig.matched(range(41))
    rig.watch.now += 2

    # when
    rig.cache.flush()

    # then: tokens, tokens before, idle, hits, head
    assert rig.seen.nodes == [
        (4, 40, 3.0, 0, [40, 41, 42, 43]),
        (40, 0, 2.0, 2, list(range(24))),
    ]


def test_the_observer_hears_nothing_of_a_lost_pool(rig: WatchedRig) -> None:
    rig.store(range(40))
    rig.lose_pool()
    assert rig.cache.probe(key_of(range(41))) == 0
    assert rig.seen.nodes == []


def test_integrity_check_finds_what_is_broken_in_what_is_told() -> None:
    def chain() -> tuple[WatchedRig, list]:
        rig = WatchedRig()
        rig.store(range(8))
        rig.store(range(16))
        return rig, list(rig.cache._live_tree.nodes())

    rig, (_, lower) = chain()
    lower.start = 4
    with pytest.raises(IntegrityError, match="ends after 8 tokens starts after 4"):
        rig.cache.check_integrity()

    rig, (_, lower) = chain()
    lower.hits = 1
    with pytest.raises(IntegrityError, match="matched more often than the node"):
        rig.cache.check_integrity()

    rig, (upper, _) = chain()
    upper.used_at -= 1
    with pytest.raises(IntegrityError, match="a child was used after its parent"):
        rig.cache.check_integrity()

    rig, (upper, _) = chain()
    upper.used_at += 1
    with pytest.raises(IntegrityError, match="in the future"):
        rig.cache.check_integrity()

    rig, (upper, lower) = chain()
    lower.serial = upper.serial
    with pytest.raises(IntegrityError, match="two nodes have one serial"):
        rig.cache.check_integrity()
