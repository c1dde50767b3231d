"""Sliding windows in the unified tree: what a match may use, what a lock holds, what evictions and inserts change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.caches.base import InsertResult
from app.caches.tree.components.swa import WindowComponent
from app.caches.tree.core import TreeCore
from app.caches.unified_radix_cache import UnifiedRadixCache
from app.config.model_config import Component
from app.errors import ConfigError, IntegrityError, OwnershipError, StaleHandleError
from tests.support.tree_model import CacheRig, key_of

PAGE = 4
WINDOW = 8
FULL_AND_SWA = frozenset({Component.FULL, Component.SWA})


def make_rig(window: int = WINDOW, page_size: int = PAGE, num_pages: int = 64) -> CacheRig:
    return CacheRig(
        "unified_radix_cache", components=FULL_AND_SWA, window=window, page_size=page_size, num_pages=num_pages
    )


@pytest.fixture
def rig() -> Iterator[CacheRig]:
    rig = make_rig()
    yield rig
    rig.check()


def parts_of(rig: CacheRig) -> tuple[TreeCore, WindowComponent]:
    assert isinstance(rig.cache, UnifiedRadixCache)
    assert rig.cache._window is not None
    return rig.cache._live_tree, rig.cache._window


def window_sizes(rig: CacheRig) -> tuple[int, int]:
    return rig.cache.evictable_window_pages, rig.cache.protected_window_pages


def publish(rig: CacheRig, tokens: object, *, first_window_page: int = 0) -> InsertResult:
    """A request that still has its window pages from that page on, published, and ended."""
    more = [999] if rig.page_size > 1 else []  # than whole pages: a match of the same tokens ends where this does
    key = key_of([*tokens, *more])
    own = rig.take(len(key) // rig.page_size)
    result = rig.publish_once(key, own, first_window_page=first_window_page)
    rig.free_what_was_not_adopted(own, result)
    return result


def chain_of_single_pages(rig: CacheRig, num_pages: int) -> np.ndarray:
    """-> the tokens."""
    tokens = np.arange(num_pages * rig.page_size, dtype=np.int32)
    for pages in range(1, num_pages + 1):
        publish(rig, tokens[: pages * rig.page_size])
    return tokens


def make_hole(rig: CacheRig, page: int) -> None:
    """The window pages of the node that holds that page index of the only path leave, as an eviction would have it."""
    tree, window = parts_of(rig)
    node = next(node for node in tree.nodes() if node.start <= page * rig.page_size < node.end)
    window.order.remove(node)
    window.hollow(node)
    rig.window_allocator.port.free(window.take_let_go())


def usable_by_brute_force(live: list[bool], window: int, page_size: int) -> int:
    """The longest prefix, in whole pages, whose last `window` tokens, or all if shorter, are live."""
    for num_pages in range(len(live), 0, -1):
        tokens = range(max(0, num_pages * page_size - window), num_pages * page_size)
        if all(live[token // page_size] for token in tokens):
            return num_pages * page_size
    return 0


# -- what a match may use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
@pytest.mark.parametrize("one_node", [False, True], ids=["a node a page", "a node a run"])
def test_a_match_needs_the_last_window_of_tokens_for_every_pattern_of_holes(window: int, *, one_node: bool) -> None:
    """H24: all 64 masks over 6 pages, against a brute-force rule."""
    for mask in range(64):
        # given six pages, live by the mask, and a seventh that is live, so that the sixth is no leaf
        live = [bool(mask >> page & 1) for page in range(6)]
        rig = make_rig(window)
        tokens = np.arange(7 * PAGE, dtype=np.int32)
        if one_node:
            publish(rig, tokens)
            for page in (page for page in range(6) if live[page - 1 if page else 0] != live[page]):
                rig.matched(tokens[: page * PAGE + 1])
            rig.matched(tokens[: 6 * PAGE + 1])
        else:
            chain_of_single_pages(rig, 7)
        pages = rig.cache.match(key_of([*tokens, 0])).pages
        for page in range(6):
            tree, parts = parts_of(rig)
            node = next(node for node in tree.nodes() if node.start <= page * PAGE < node.end)
            if not live[page] and node in parts.parts:
                make_hole(rig, page)

        # then, whatever part of it is asked for
        for num_pages in range(7):
            expected = usable_by_brute_force(live[:num_pages], window, PAGE)
            query = key_of([*tokens[: num_pages * PAGE], 99])
            assert rig.cache.probe(query) == expected, (live, num_pages)
            found = rig.cache.match(query)
            assert found.num_tokens == expected, (live, num_pages)
            assert found.pages.tolist() == pages[: expected // PAGE].tolist()
            first = max(0, expected - window) // PAGE
            assert not found.window_pages[:first].any()
            assert found.window_pages[first:].all()
        rig.check()


def test_a_match_names_only_the_window_pages_that_it_needs(rig: CacheRig) -> None:
    # given a node of six live pages
    stored = publish(rig, range(24))
    assert stored.window_pages.all()

    # then: of the last 8 tokens, wherever the match ends
    for length in (5, 9, 13, 25):
        found = rig.cache.match(key_of(range(length)))
        named = stored.window_pages[: found.pages.size].copy()
        named[: max(0, found.num_tokens - WINDOW) // PAGE] = 0
        assert found.window_pages.tolist() == named.tolist()


def test_a_cache_for_windows_needs_a_window_and_its_pool() -> None:
    with pytest.raises(ConfigError, match="window_allocator"):
        UnifiedRadixCache(replace(make_rig().deps, window_allocator=None))
    with pytest.raises(ConfigError, match="sliding_window"):
        UnifiedRadixCache(replace(make_rig().deps, sliding_window=None))


# -- what a lock holds ---------------------------------------------------------------------------------------------


def test_a_lock_holds_the_whole_path_but_only_the_window_at_its_end(rig: CacheRig) -> None:
    # given six nodes of a page
    tokens = chain_of_single_pages(rig, 6)
    found = rig.cache.match(key_of([*tokens, 0]))

    # when
    receipt = rig.cache.lock(found)

    # then everything before the window may go, and the prefix stays
    assert (rig.cache.protected_pages, window_sizes(rig)) == (6, (4, 2))
    assert rig.cache.evict_window(100) == 4
    assert rig.cache.evict(100) == 0
    again = rig.cache.match(key_of([*tokens, 0]))
    assert (again.pages.tolist(), again.window_pages.tolist()) == (found.pages.tolist(), found.window_pages.tolist())
    rig.cache.unlock(receipt)
    assert (rig.cache.protected_pages, window_sizes(rig)) == (0, (2, 0))


def test_a_window_that_is_given_up_early_can_be_evicted_and_the_rest_stays_locked(rig: CacheRig) -> None:
    # given a locked prefix with a continuation
    publish(rig, range(16))
    publish(rig, range(32))
    receipt = rig.cache.lock(rig.cache.match(key_of(range(17))))

    # when, once or twice
    rig.cache.unlock_window(receipt)
    rig.cache.unlock_window(receipt)

    # then
    assert (rig.cache.protected_pages, window_sizes(rig)) == (4, (8, 0))
    assert rig.cache.evict_window(100) == 8
    assert (rig.cache.evictable_pages, rig.cache.protected_pages) == (0, 4)
    rig.check()

    # and the prefix, which nobody could match any more, leaves with its last lock
    rig.cache.unlock(receipt)
    assert (rig.cache.evictable_pages, rig.cache.protected_pages, rig.cache.num_nodes) == (0, 0, 0)
    for give_back in (rig.cache.unlock_window, rig.cache.unlock):
        with pytest.raises(StaleHandleError):
            give_back(receipt)


def test_locked_windows_outlive_splits_and_are_released_whole(rig: CacheRig) -> None:
    """The lock holds the window's pages; where they are split later, all stay held until it is released."""
    # given a lock whose window begins inside a node
    publish(rig, range(24))
    publish(rig, range(28))
    receipts = [rig.cache.lock(rig.cache.match(key_of(range(29))))]
    assert window_sizes(rig) == (4, 3)

    # when what it holds is split, and another lock begins before it, and is split too
    rig.matched(range(21))
    receipts.append(rig.cache.lock(rig.cache.match(key_of(range(17)))))
    rig.matched(range(13))
    rig.check()
    assert window_sizes(rig) == (2, 5)

    # then
    assert rig.cache.evict_window(100) == 2
    rig.check()
    rig.cache.unlock(receipts[0])
    rig.check()
    assert window_sizes(rig) == (3, 2)
    rig.cache.unlock(receipts[1])
    assert window_sizes(rig) == (5, 0)


@pytest.mark.parametrize("came_back", [False, True], ids=["gone", "other pages in its place"])
def test_a_match_whose_window_has_left_cannot_be_locked(rig: CacheRig, *, came_back: bool) -> None:
    """H22. Its node is still there, with the same full pages."""
    # given
    publish(rig, range(16))
    publish(rig, range(32))
    found = rig.cache.match(key_of(range(17)))

    # when its window pages leave, and perhaps others are published there
    make_hole(rig, 3)
    if came_back:
        rig.take_window(1)  # so that the new pages are not the old ones
        publish(rig, range(16))
        assert rig.matched(range(17)) == 16

    # then
    with pytest.raises(StaleHandleError):
        rig.cache.lock(found)
    assert (rig.cache.protected_pages, window_sizes(rig)[1]) == (0, 0)
    if came_back:
        rig.window_allocator.port.free(np.array(sorted(_held_by_nobody(rig)), np.int32))


# -- what eviction takes -------------------------------------------------------------------------------------------


def test_evicting_windows_leaves_holes_in_prefixes_and_takes_useless_leaves_whole(rig: CacheRig) -> None:
    # given an old prefix and a new one that goes on from its middle
    publish(rig, range(16))
    old_leaf = publish(rig, range(24))
    publish(rig, [*range(16), *range(60, 76)])
    before = rig.allocator.port.available()

    # when what no end has needed leaves: the first half of both prompts, of which only the windows go
    assert [rig.cache.evict_window(1) for _ in range(2)] == [2, 2]
    assert rig.allocator.port.available() == before

    # when the oldest end does: a leaf, with the two full pages that only it led to
    assert rig.cache.evict_window(1) == 2
    assert rig.allocator.port.available() - before == 2
    assert set(old_leaf.pages[4:].tolist()) <= set(rig.allocator.recorded_page_ids().tolist())

    # when the shared end does, which the longer one does not need
    assert rig.cache.evict_window(1) == 2

    # then the long prefix is usable to its end, and the short one is not
    assert rig.matched([*range(16), *range(60, 77)]) == 32
    assert rig.matched(range(17)) == 0


@pytest.mark.parametrize("num_pages", [-1, 0, 1, 3, 4, 5, 11, 12, 13, 100])
def test_evict_window_frees_what_was_asked_for_and_less_than_a_node_more(rig: CacheRig, num_pages: int) -> None:
    """H33."""
    # given three leaves of four pages, one of them locked
    stored = [publish(rig, range(start, start + 16)) for start in (0, 100, 200)]
    receipt = rig.cache.lock(stored[0])
    available = rig.window_allocator.port.available()

    # when
    freed = rig.cache.evict_window(num_pages)

    # then
    assert freed == rig.window_allocator.port.available() - available
    wanted = max(0, min(num_pages, 8))
    assert wanted <= freed < wanted + 4
    rig.cache.unlock(receipt)


def test_what_only_a_leaf_made_usable_leaves_with_it(rig: CacheRig) -> None:
    # given a prefix whose first part is a tombstone, and a leaf
    publish(rig, range(24), first_window_page=4)
    assert rig.cache.num_nodes == 2

    # when one page is evicted
    assert rig.cache.evict(1) == 6

    # then nothing is left that could not be matched
    assert (rig.cache.num_nodes, rig.cache.evictable_pages, window_sizes(rig)) == (0, 0, (0, 0))


def test_evicting_full_pages_takes_their_window_pages_along(rig: CacheRig) -> None:
    publish(rig, range(8))
    assert rig.cache.evict(1) == 2
    assert rig.window_allocator.port.available() == rig.window_allocator.port.capacity


# -- what an insert owns -------------------------------------------------------------------------------------------


def test_new_tokens_are_live_from_where_the_caller_still_has_its_window(rig: CacheRig) -> None:
    # when
    result = publish(rig, range(24), first_window_page=3)

    # then: a tombstone of three pages, a page that the end does not need, and the two that it needs
    assert result.num_tokens == 24
    assert (result.window_pages[:3].tolist(), result.window_pages[3:].all()) == ([0, 0, 0], True)
    assert (rig.cache.num_nodes, rig.cache.evictable_window_pages) == (3, 3)
    assert [rig.matched(range(length)) for length in (25, 21, 17, 13)] == [24, 20, 0, 0]


def test_window_pages_in_front_of_the_callers_lock_are_not_taken(rig: CacheRig) -> None:
    """What comes back names nothing in front of the lock, so the caller would not know that they are its no more."""
    # given a lock on a prefix whose first three pages are a tombstone
    publish(rig, range(24), first_window_page=3)
    receipt = rig.cache.lock(rig.cache.match(key_of(range(25))))

    # when
    own = rig.take(8)
    result = rig.publish_once(key_of(range(32)), own, after=receipt)

    # then
    assert (result.first, result.pages.tolist(), result.window_pages.size) == (6, own[6:].tolist(), 2)
    assert window_sizes(rig) == (3, 2)
    rig.check(held_by_requests=own[:6])
    rig.cache.unlock(rig.cache.relock(receipt, result))
    rig.allocator.port.free(own[:6])


@pytest.mark.parametrize("num_pages", range(1, 9))
def test_a_lock_of_what_was_published_keeps_its_window_and_no_more(rig: CacheRig, num_pages: int) -> None:
    result = publish(rig, range(num_pages * PAGE))
    receipt = rig.cache.lock(result)
    assert rig.cache.protected_window_pages == min(num_pages, 2)
    rig.cache.unlock(receipt)


def test_a_prompt_of_whole_pages_keeps_what_the_same_prompt_will_match(rig: CacheRig) -> None:
    """A match leaves a token to compute, so here it ends a page before the prompt does, and needs one more in front."""
    # given, of six pages, a match that will need the fourth and fifth
    own = rig.take(6)
    rig.free_what_was_not_adopted(own, rig.publish_once(key_of(range(24)), own))

    # when all that no prefix needed leaves
    rig.cache.evict_window(1)

    # then
    assert window_sizes(rig) == (3, 0)
    assert (rig.matched(range(24)), rig.matched(range(25))) == (20, 24)


@pytest.mark.parametrize(("first_window_page", "published"), [(4, 24), (5, 0), (6, 0)])
def test_what_nobody_could_match_is_not_published(rig: CacheRig, first_window_page: int, published: int) -> None:
    """Behaviour 10: cap 0 publishes nothing."""
    own = rig.take(6)
    result = rig.publish_once(key_of(range(24)), own, first_window_page=first_window_page)
    assert (result.num_tokens, result.pages.tolist()) == (published, own[: published // PAGE].tolist())
    rig.cache.unlock(rig.cache.lock(result))
    rig.check(held_by_requests=own[result.pages.size :])
    rig.allocator.port.free(own[result.pages.size :])


def test_a_prefix_is_published_as_far_as_it_is_usable_already(rig: CacheRig) -> None:
    """Behaviour 10: what is there is there; the rest stays the caller's."""
    # given
    stored = publish(rig, range(16))
    own = rig.take(8)

    # when a longer one comes, without enough of its window
    result = rig.publish_once(key_of(range(32)), own, first_window_page=7)

    # then
    assert (result.num_tokens, result.pages.tolist(), result.duplicates) == (
        16,
        stored.pages.tolist(),
        ((0, 2), (2, 2)),
    )
    rig.check(held_by_requests=own)
    rig.allocator.port.free(own)


def test_a_tombstone_takes_the_callers_window_pages_and_keeps_its_own_full_pages(rig: CacheRig) -> None:
    """Peers' fault 12: the caller's full pages are duplicates, node by node, and its window pages are not."""
    # given three nodes of two pages, the middle one a tombstone
    for length in (8, 16, 24):
        stored = publish(rig, range(length))
    make_hole(rig, 2)
    assert rig.matched(range(17)) == 8
    live = stored.window_pages

    # when
    own, window = rig.take(6), rig.take_window(6)
    result = rig.cache.insert(key_of(range(24)), own, window)

    # then
    assert result.pages.tolist() == stored.pages.tolist()
    assert result.duplicates == ((0, 2), (2, 2), (4, 2))
    assert result.window_pages.tolist() == [*live[:2], *window[2:4], *live[4:]]
    assert rig.matched(range(17)) == 16
    rig.check(held_by_requests=own, held_window_pages=np.concatenate([window[:2], window[4:]]))
    rig.allocator.port.free(own)
    rig.window_allocator.port.free(np.concatenate([window[:2], window[4:]]))


def test_the_tail_of_a_tombstone_is_revived_where_the_callers_window_begins(rig: CacheRig) -> None:
    # given a tombstone of four pages before a live node
    publish(rig, range(24), first_window_page=4)
    assert rig.matched(range(17)) == 0

    # when a request with the last two of them publishes it
    result = publish(rig, range(16), first_window_page=2)

    # then
    assert (result.num_tokens, rig.cache.num_nodes) == (16, 3)
    assert (result.window_pages != 0).tolist() == [False, False, True, True]
    assert [rig.matched(range(length)) for length in (9, 13, 17, 25)] == [0, 0, 16, 24]


def test_an_end_inside_a_tombstone_is_revived_as_far_as_the_key_goes(rig: CacheRig) -> None:
    publish(rig, range(32), first_window_page=6)
    result = publish(rig, range(16), first_window_page=2)
    assert (result.num_tokens, rig.matched(range(17)), rig.matched(range(33))) == (16, 16, 32)


@pytest.mark.parametrize("twice", ["window page", "full page", "within one insert"])
def test_a_page_of_either_pool_in_two_places_is_refused_before_any_change(rig: CacheRig, twice: str) -> None:
    """H02, for both pools."""
    # given
    stored = publish(rig, range(16))
    num_nodes = rig.cache.num_nodes
    own, window = rig.take(4), rig.take_window(4)
    held = own.copy(), window.copy()
    if twice == "window page":
        window[3] = stored.window_pages[0]
    elif twice == "full page":
        own[3] = stored.pages[0]
    else:
        window[3] = window[2]

    # when it would extend a tombstone's neighbour, be new, or both
    for tokens in (range(90, 106), [*range(8), *range(70, 78)]):
        with pytest.raises(OwnershipError) as refusal:
            rig.cache.insert(key_of(tokens), own, window)

        # then
        assert set(refusal.value.pages) <= {*own.tolist(), *window.tolist()}
        assert rig.cache.num_nodes == num_nodes
        rig.check(held_by_requests=held[0], held_window_pages=held[1])
    rig.allocator.port.free(held[0])
    rig.window_allocator.port.free(held[1])


def test_too_few_window_pages_and_gaps_in_them_are_refused(rig: CacheRig) -> None:
    own = rig.take(4)
    with pytest.raises(ValueError, match="3 window pages for a key of 4 whole pages"):
        rig.cache.insert(key_of(range(16)), own, np.array([1, 2, 3], np.int32))
    with pytest.raises(ValueError, match="1 zeros after its first page"):
        rig.cache.insert(key_of(range(16)), own, np.array([0, 2, 0, 3], np.int32))
    rig.check(held_by_requests=own)
    rig.allocator.port.free(own)


# -- recency -------------------------------------------------------------------------------------------------------


def test_windows_that_no_match_needs_grow_old_though_their_prefix_is_used(rig: CacheRig) -> None:
    """Else the window pool would be full of pages that nobody can ever need."""
    # given a long prefix in nodes of two pages, and then a stranger
    for length in (8, 16, 24):
        publish(rig, range(length))
    publish(rig, range(90, 98))

    # when the whole prefix is matched again
    rig.matched(range(25))

    # then its first nodes' windows go before the stranger's, and its last node's go last
    assert rig.cache.evict_window(4) == 4
    assert (rig.matched(range(25)), rig.matched(range(90, 99))) == (24, 8)
    assert rig.cache.evict_window(1) == 2
    assert (rig.cache.probe(key_of(range(25))), rig.cache.probe(key_of(range(90, 99)))) == (0, 8)


# -- what it tells ------------------------------------------------------------------------------------------------


def test_a_prefix_that_lacks_its_window_is_explained(rig: CacheRig) -> None:
    # given a cached prefix with a hole at its end
    for length in (8, 16, 24):
        publish(rig, range(length))
    make_hole(rig, 2)
    key = key_of(range(17))
    assert rig.cache.match(key).num_tokens == 8

    # when
    miss = rig.cache.explain_miss(key, 8)

    # then
    assert (miss.reason, miss.num_matched, miss.lacking) == ("incomplete", 8, (Component.SWA,))
    assert miss.sentence == (
        "The tokens after the first 8 are cached, but without the sliding-window pages that the model needs to go on "
        "after them: evicted, or not kept there."
    )

    # and when the window comes back, or what was matched went too
    publish(rig, range(16))
    assert rig.cache.explain_miss(key, 8).reason == "late"
    for page in (0, 2):
        make_hole(rig, page)
    assert rig.cache.explain_miss(key, 8).num_matched == 0
    assert rig.cache.explain_miss(key, 8).sentence.startswith("The first tokens are cached, but without")


# -- integrity -----------------------------------------------------------------------------------------------------


def test_integrity_check_finds_what_is_broken() -> None:
    def broken_rig() -> tuple[CacheRig, WindowComponent]:
        rig = make_rig()
        publish(rig, range(8))
        publish(rig, range(16))
        return rig, parts_of(rig)[1]

    # given, each time, a sound tree with one thing wrong
    rig, window = broken_rig()
    next(iter(window.parts.values())).lock_ref = 1
    with pytest.raises(IntegrityError, match="window page has lock_ref 1"):
        rig.cache.check_integrity()

    rig, window = broken_rig()
    window.order.pop()
    with pytest.raises(IntegrityError, match="does not hold exactly the unlocked window pages"):
        rig.cache.check_integrity()

    rig, window = broken_rig()
    upper, lower = window.parts.values()
    lower.ids = upper.ids
    with pytest.raises(IntegrityError, match="a window page is in two places"):
        rig.cache.check_integrity()

    rig, window = broken_rig()
    _, lower = window.parts.values()
    lower.ids = lower.ids[:1]
    with pytest.raises(IntegrityError, match="a node of 2 pages has 1 window pages"):
        rig.cache.check_integrity()

    rig, window = broken_rig()
    leaf = next(node for node in window.parts if not node.children)
    window.order.remove(leaf)
    window.hollow(leaf)
    with pytest.raises(IntegrityError, match=r"a leaf has no window page and nobody locks it.*freed by nobody"):
        rig.cache.check_integrity()

    rig, window = broken_rig()
    window.protected += 1
    with pytest.raises(IntegrityError, match="4 evictable and 0 protected window pages are counted as 4 and 1"):
        rig.cache.check_integrity()


# -- scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 500])
def test_a_chain_of_20000_nodes_reaches_no_recursion_limit(window: int) -> None:
    """H18."""
    # given one prefix, cut into pages
    depth = 20_000
    rig = make_rig(window, page_size=1, num_pages=depth + 2)
    tokens = np.arange(depth, dtype=np.int32)
    publish(rig, tokens)
    tree, _ = parts_of(rig)
    for node in list(tree.nodes()):
        for _ in range(node.pages.size - 1):
            tree.split(node, 1)
    assert rig.cache.num_nodes == depth

    # when, then
    whole = key_of([*tokens, 0])
    assert rig.cache.probe(whole) == rig.cache.match(whole).num_tokens == depth
    receipt = rig.cache.lock(rig.cache.match(whole))
    assert (rig.cache.protected_pages, rig.cache.protected_window_pages) == (depth, window)
    rig.check()
    assert rig.cache.evict_window(depth // 2) == depth // 2
    rig.cache.unlock_window(receipt)
    rig.cache.unlock(receipt)
    rig.check()
    assert rig.cache.evict_window(depth) == depth - depth // 2
    assert (rig.cache.num_nodes, rig.cache.evictable_pages) == (0, 0)


def _held_by_nobody(rig: CacheRig) -> set[int]:
    cached = np.concatenate(rig.cache.cached_window_page_ids())
    return set(rig.window_allocator.held_page_ids().tolist()) - set(cached.tolist())
