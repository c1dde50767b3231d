"""Window pages that no prefix has needed go before those that one has, but for a small share of the pool."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.tree.node import TreeNode
from app.caches.tree.policies.lru import LruOrder
from app.caches.tree.policies.unused_first import SHARE, UnusedFirst
from app.config.model_config import Component
from app.core.keys import DEFAULT_NAMESPACE
from tests.support.tree_model import CacheRig, key_of

PAGE = 4
WINDOW = 8


def node_of(num_pages: int) -> TreeNode:
    pages = np.zeros(num_pages, np.int32)
    edge = bytes(4 * PAGE * num_pages)
    return TreeNode(parent=None, namespace=DEFAULT_NAMESPACE, edge=edge, pages=pages, epoch=0, start=0, serial=0)


@pytest.fixture
def order() -> UnusedFirst:
    return UnusedFirst(LruOrder())


def test_unused_nodes_go_first_while_they_hold_more_than_their_share(order: UnusedFirst) -> None:
    # given as much that is used as makes one page unused less than its share
    used = [node_of(SHARE) for _ in range(2)]
    unused = [node_of(1) for _ in range(4)]
    for node in used:
        order.add(node)
    for node in unused:
        order.add_unused(node)
    assert (order.num_pages, len(order)) == (2 * SHARE + 4, 6)

    # then: of 20 pages 4 are too many, of 19 are 3, of 18 are 2 not; of 10 they are again
    assert [order.pop() for _ in range(6)] == [unused[0], unused[1], used[0], unused[2], used[1], unused[3]]
    assert (order.num_pages, len(order)) == (0, 0)
    with pytest.raises(KeyError):
        order.pop()


def test_a_use_makes_a_node_one_of_the_used_the_most_recent(order: UnusedFirst) -> None:
    first, second, third = node_of(1), node_of(1), node_of(1)
    order.add(first)
    order.add_unused(second)
    order.add_unused(third)

    order.touch(second)
    order.touch(first)

    assert list(order) == [third, second, first]
    assert list(reversed(order)) == [first, second, third]


def test_a_front_that_its_users_did_not_need_becomes_unused_and_any_other_stays_what_it_was(order: UnusedFirst) -> None:
    # given a used node and an unused one
    used, unused = node_of(4), node_of(4)
    order.add(used)
    order.add_unused(unused)

    # when two pages are cut off the front of both, and once more of the used one, as a use ended there
    for lower, split in ((used, order.split_unused), (unused, order.split_unused), (used, order.split)):
        upper = node_of(lower.pages.size // 2)
        lower.pages = lower.pages[upper.pages.size :]
        split(lower, upper)

    # then
    assert [node.pages.size for node in order] == [2, 2, 2, 1, 1]
    assert order.num_pages == 8
    for node in list(order):
        order.remove(node)
    assert (order.num_pages, len(order)) == (0, 0)


# -- what it is for ------------------------------------------------------------------------------------------------


@pytest.fixture
def rig() -> CacheRig:
    """A window pool of 64 pages; a prompt of ten pages needs two of them to be continued."""
    components = frozenset({Component.FULL, Component.SWA})
    return CacheRig("unified_radix_cache", components=components, window=WINDOW, page_size=PAGE, num_pages=64)


def publish(rig: CacheRig, tokens: object) -> None:
    key = key_of([*tokens, 999])  # one token more than whole pages: a match of the same ends where this does
    num_pages = len(key) // PAGE
    short = num_pages - rig.window_allocator.port.available()
    if short > 0:
        rig.cache.evict_window(short)
    own = rig.take(num_pages)
    rig.free_what_was_not_adopted(own, rig.publish_once(key, own))


def test_the_ends_of_many_long_prompts_stay_where_their_whole_windows_would_not(rig: CacheRig) -> None:
    # given six prompts of ten pages, and then a seventh: 70 window pages for a pool of 64
    prompts = [range(100 * number, 100 * number + 10 * PAGE) for number in range(6)]
    for prompt in prompts:
        publish(rig, prompt)
    rig.cache.evict_window(44)

    # then all of them can be continued
    assert [rig.matched([*prompt, 0]) for prompt in prompts] == [10 * PAGE] * 6
    rig.check()


def test_where_two_prompts_part_the_window_is_kept_for_a_third(rig: CacheRig) -> None:
    # given two prompts that begin alike, and an older one that nothing shares
    publish(rig, range(900, 940))
    publish(rig, [*range(24), *range(100, 116)])
    publish(rig, [*range(24), *range(200, 216)])

    # when all that no prefix needed leaves, and the end of the stranger
    rig.cache.evict_window(rig.cache.evictable_window_pages - 8)
    assert rig.matched([*range(900, 940), 0]) == 0

    # then a third finds what they share
    assert rig.matched([*range(24), 300]) == 24
    rig.check()
