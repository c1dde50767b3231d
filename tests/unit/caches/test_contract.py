"""What every registered cache type promises, whatever it is made of. Types that reuse prefixes promise more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import NamedTuple

import numpy as np
import pytest

from app.caches.base import NOTHING_PUBLISHED, BasePrefixCache
from app.caches.builtin import load_builtin_caches
from app.caches.registry import default_registry
from app.config.model_config import Component
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.errors import LockedPageError, OwnershipError, StaleHandleError
from tests.support.tree_model import CacheRig, key_of

load_builtin_caches()


class Kind(NamedTuple):
    """A registered type, for a model with these components."""

    cache_type: str
    components: frozenset[Component]

    def rig(self, **settings: int) -> CacheRig:
        return CacheRig(self.cache_type, components=self.components, **settings)

    def __str__(self) -> str:
        return f"{self.cache_type}-{'+'.join(each.value for each in Component if each in self.components)}"


EVERY_KIND = sorted((Kind(each.name, held) for each in default_registry.seal() for held in each.components), key=str)
REUSING_KINDS = [kind for kind in EVERY_KIND if kind.rig().cache.reuses_prefixes]

every_type = pytest.mark.parametrize("kind", EVERY_KIND, ids=str)
reusing_types = pytest.mark.parametrize("kind", REUSING_KINDS, ids=str)

RigMaker = Callable[..., CacheRig]

# Near-collisions: absent and empty, one text in each field, a text cut in two ways, look-alikes, ranks and their text.
NAMESPACES = [
    DEFAULT_NAMESPACE,
    *(Namespace(**{field: text}) for field in ("adapter", "salt", "extra_key") for text in ("", "x", "0", "1", "None")),
    Namespace(adapter="x", salt="y"),
    Namespace(adapter="xy"),
    Namespace(adapter="", salt="xy"),
    Namespace(salt="x", extra_key="y"),
    Namespace(extra_key="xy"),
    Namespace(salt="а"),  # Cyrillic
    Namespace(salt="a"),
    Namespace(salt="e\u0301"),
    Namespace(salt="\u00e9"),
    Namespace(dp_rank=1),
    Namespace(extra_key="1", dp_rank=1),
]


@pytest.fixture
def new_rig() -> Iterator[RigMaker]:
    """Makes caches; after the test, all invariants of each hold and no page is owned by nobody."""
    rigs: list[CacheRig] = []

    def make(kind: Kind, **settings: int) -> CacheRig:
        rigs.append(kind.rig(**settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.check()


def sizes(cache: BasePrefixCache) -> tuple[int, int]:
    return cache.evictable_pages, cache.protected_pages


def part_sizes(cache: BasePrefixCache) -> tuple[int, int, int, int]:
    return (
        cache.evictable_window_pages,
        cache.protected_window_pages,
        cache.evictable_states,
        cache.protected_states,
    )


def eviction_order(rig: CacheRig) -> list[int]:
    """Page ids in the order in which they leave, emptying the cache."""
    while rig.cache.evict(1):
        pass
    return rig.allocator.recorded_page_ids().tolist()


@every_type
@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4], [9] * 40])
def test_unknown_keys_match_nothing(new_rig: RigMaker, kind: Kind, tokens: list[int]) -> None:
    """Behaviour 1. A key of one token is a key (peers' fault 7)."""
    # given
    rig = new_rig(kind)
    rig.store(range(100, 108))

    # when
    found = rig.cache.match(key_of(tokens))

    # then
    assert (found.num_tokens, found.pages.tolist(), rig.cache.probe(key_of(tokens))) == (0, [], 0)
    rig.cache.unlock(rig.cache.lock(found))


@every_type
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_match_leaves_a_token_to_compute(new_rig: RigMaker, kind: Kind, page_size: int, length: int) -> None:
    """Behaviours 2 and 14."""
    # given
    rig = new_rig(kind, page_size=page_size)
    rig.store(range(length))

    # when
    found = rig.cache.match(key_of(range(length)))

    # then
    longest = (length - 1) // page_size * page_size if rig.cache.reuses_prefixes else 0
    assert found.num_tokens == found.pages.size * page_size == longest


@every_type
def test_reset_forgets_everything_and_refuses_what_is_from_before(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 7."""
    # given
    rig = new_rig(kind)
    receipt = rig.cache.lock(rig.store(range(16)))

    # when
    rig.lose_pool()
    rig.cache.reset()

    # then
    assert (sizes(rig.cache), rig.matched(range(17)), rig.cache.num_nodes) == ((0, 0), 0, 0)
    assert part_sizes(rig.cache) == (0, 0, 0, 0)
    with pytest.raises(StaleHandleError):
        rig.cache.unlock(receipt)

    # and it goes on working, beside the old receipt
    rig.store(range(16))
    new = rig.cache.lock(rig.cache.match(key_of(range(17))))
    with pytest.raises(StaleHandleError):
        rig.cache.unlock(receipt)
    rig.cache.unlock(new)


@every_type
@pytest.mark.parametrize("first_call", ["match", "probe", "evict", "sizes", "flush", "page ids"])
def test_pages_of_a_pool_that_is_gone_are_never_served(new_rig: RigMaker, kind: Kind, first_call: str) -> None:
    """Nobody has to tell the cache: the identity of the pool does."""
    # given
    rig = new_rig(kind)
    receipt = rig.cache.lock(rig.store(range(16)))
    cache = rig.cache
    calls: dict[str, Callable[[], object]] = {
        "match": lambda: cache.match(key_of(range(17))).num_tokens,
        "probe": lambda: cache.probe(key_of(range(17))),
        "evict": lambda: cache.evict(4),
        "sizes": lambda: sum(sizes(cache)),
        "flush": cache.flush,
        "page ids": lambda: sum(ids.size for ids in cache.cached_page_ids()),
    }

    # when
    rig.lose_pool()

    # then
    assert calls[first_call]() == 0
    with pytest.raises(StaleHandleError):
        cache.unlock(receipt)
    assert rig.matched(range(17)) == 0


@every_type
def test_a_receipt_is_good_once(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 4, H04."""
    # given
    rig = new_rig(kind)
    kept = rig.cache.lock(rig.store(range(16)))
    receipt = rig.cache.lock(rig.cache.match(key_of(range(17))))
    rig.cache.unlock(receipt)
    before = sizes(rig.cache)

    # then
    with pytest.raises(StaleHandleError):
        rig.cache.unlock(receipt)
    assert sizes(rig.cache) == before
    rig.cache.unlock(kept)


@every_type
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_unfinished_longer_finished_leaves_the_ledger_balanced(new_rig: RigMaker, kind: Kind, page_size: int) -> None:
    """Behaviours 3 and 8: two requests publish the same prompt step by step; every duplicate is freed once."""
    # given
    rig = new_rig(kind, page_size=page_size, num_pages=1000)
    tokens = np.arange(3 * 128 + 5, dtype=np.int32)
    port = rig.allocator.port

    for _ in range(2):
        own = np.empty(0, np.int32)
        shared, receipt = 0, rig.cache.lock(rig.cache.match(key_of(tokens[:1])))
        for length in (128, 200, tokens.size):
            # when: computed so far, published, the duplicates replaced by the cache's pages
            own = np.concatenate([own, rig.take(-(-length // page_size) - own.size)])
            result = rig.publish(key_of(tokens[:length]), own)
            published = result.pages.size
            fresh, cached = own[shared:published], result.pages[shared:published]
            port.free(fresh[fresh != cached])
            own[:published] = result.pages
            shared = published
            longer = rig.cache.lock(result)
            rig.cache.unlock(receipt)
            receipt = longer

            # then
            rig.check(held_by_requests=own[shared:])

        port.free(own[shared:])
        rig.cache.unlock(receipt)
        rig.check()

    assert rig.cache.flush() == (tokens.size // page_size if rig.cache.reuses_prefixes else 0)
    assert port.available() == port.capacity


@every_type
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_publishing_goes_on_where_the_lock_ends(new_rig: RigMaker, kind: Kind, page_size: int) -> None:
    """The same two requests; each publishes from the end of what it has locked, and then moves that lock."""
    # given
    rig = new_rig(kind, page_size=page_size, num_pages=1000)
    tokens = np.arange(3 * 128 + 5, dtype=np.int32)
    port = rig.allocator.port

    for _ in range(2):
        own = np.empty(0, np.int32)
        shared, receipt = 0, rig.cache.lock(rig.cache.match(key_of(tokens[:1])))
        for length in (128, 200, tokens.size):
            # when
            own = np.concatenate([own, rig.take(-(-length // page_size) - own.size)])
            key = key_of(tokens[: length // page_size * page_size])
            state = rig.take_state() if rig.has_states else 0
            result = rig.publish_once(key, own, state=state, after=receipt)
            published = result.num_tokens // page_size
            if published > shared:
                receipt = rig.cache.relock(receipt, result)
            fresh, cached = own[shared:published], result.pages[shared - result.first :]
            port.free(fresh[fresh != cached])
            own[shared:published] = cached
            shared = published

            # then
            rig.check(held_by_requests=own[shared:])
            assert rig.cache.protected_pages == shared
            assert shared == (length // page_size if rig.cache.reuses_prefixes else 0)

        port.free(own[shared:])
        rig.cache.unlock(receipt)
        rig.check()
        assert rig.cache.protected_pages == rig.cache.protected_window_pages == rig.cache.protected_states == 0

    assert rig.cache.flush() == (tokens.size // page_size if rig.cache.reuses_prefixes else 0)
    assert port.available() == port.capacity


@reusing_types
def test_what_does_not_go_on_from_the_lock_is_refused_and_changes_nothing(new_rig: RigMaker, kind: Kind) -> None:
    # given a lock on a prefix, and another prefix
    rig = new_rig(kind)
    rig.store(range(16))
    other = rig.store(range(100, 120))
    receipt = rig.cache.lock(rig.cache.match(key_of(range(20))))
    own, before = rig.take(8), sizes(rig.cache)

    # when, then
    for key in (key_of([*range(15), 9, 9, 9, 9, 9]), key_of(range(20), Namespace(salt="a"))):
        with pytest.raises(OwnershipError, match="locked under other tokens"):
            rig.cache.insert(key, own, own, after=receipt)
    for result in (other, NOTHING_PUBLISHED):
        with pytest.raises(ValueError, match="does not continue the 16 that the receipt keeps"):
            rig.cache.relock(receipt, result)
    assert sizes(rig.cache) == before
    nothing_more = rig.cache.insert(key_of(range(16)), own, own, after=receipt)
    assert (nothing_more.num_tokens, nothing_more.first, nothing_more.pages.size) == (16, 4, 0)
    rig.check(own)

    # and a receipt that was given back is refused
    rig.cache.unlock(receipt)
    with pytest.raises(StaleHandleError):
        rig.cache.insert(key_of(range(24)), own, own, after=receipt)
    with pytest.raises(StaleHandleError):
        rig.cache.relock(receipt, other)
    rig.allocator.port.free(own)


@every_type
def test_a_retracted_request_leaves_only_the_shared_prefix(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 9: nothing published; its own pages are freed and the prefix it read is as it was."""
    # given
    rig = new_rig(kind)
    rig.store(range(16))
    before = sizes(rig.cache)
    found = rig.cache.match(key_of(range(40)))
    receipt = rig.cache.lock(found)
    own = rig.take(10 - found.pages.size)

    # when
    rig.allocator.port.free(own)
    rig.cache.unlock(receipt)

    # then
    assert sizes(rig.cache) == before
    rig.check()


@every_type
@pytest.mark.parametrize("num_pages", [0, -1, -100])
def test_evicting_nothing_changes_nothing(new_rig: RigMaker, kind: Kind, num_pages: int) -> None:
    """H33."""
    rig = new_rig(kind)
    rig.store(range(16))
    before = sizes(rig.cache)
    assert rig.cache.evict(num_pages) == 0
    assert sizes(rig.cache) == before


@every_type
def test_probing_changes_nothing_at_all(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 15, peers' fault 13: not a node, not the order in which pages will leave."""
    # given two equal caches
    rigs = [new_rig(kind), new_rig(kind)]
    for rig in rigs:
        for start in (0, 50, 100):
            rig.store(range(start, start + 16))

    # when one is probed, whole, within an edge, and past an edge
    probed, untouched = rigs
    lengths = [probed.cache.probe(key_of(range(n))) for n in (17, 9, 7, 40)]

    # then
    assert lengths == ([16, 8, 4, 16] if probed.cache.reuses_prefixes else [0, 0, 0, 0])
    assert probed.cache.num_nodes == untouched.cache.num_nodes
    assert eviction_order(probed) == eviction_order(untouched)


@every_type
@pytest.mark.parametrize("count", [0, -1, -100])
def test_evicting_no_window_pages_and_no_snapshots_changes_nothing(new_rig: RigMaker, kind: Kind, count: int) -> None:
    """H33, for the other pools."""
    rig = new_rig(kind)
    rig.store(range(16))
    before = part_sizes(rig.cache)
    assert (rig.cache.evict_window(count), rig.cache.evict_states(count)) == (0, 0)
    assert part_sizes(rig.cache) == before


@every_type
def test_evicting_the_parts_of_everything_leaves_nothing_that_no_match_could_use(new_rig: RigMaker, kind: Kind) -> None:
    """What is freed is what was counted, in each pool."""
    # given a chain and a branch
    rig = new_rig(kind)
    for tokens in (range(16), range(24), [*range(16), *range(50, 58)]):
        rig.store(tokens)
    windows, states = rig.cache.evictable_window_pages, rig.cache.evictable_states

    # when
    assert rig.cache.evict_window(1000) == windows
    assert rig.cache.evict_states(1000) == (0 if windows else states)

    # then
    assert part_sizes(rig.cache) == (0, 0, 0, 0)
    assert (rig.cache.num_nodes == 0) == (not rig.cache.reuses_prefixes or rig.has_window or rig.has_states)


@every_type
def test_a_window_can_be_given_up_before_the_rest_of_a_lock(new_rig: RigMaker, kind: Kind) -> None:
    # given
    rig = new_rig(kind)
    receipt = rig.cache.lock(rig.store(range(16)))
    protected = rig.cache.protected_pages

    # when, twice
    rig.cache.unlock_window(receipt)
    rig.cache.unlock_window(receipt)

    # then
    assert (rig.cache.evict(100), rig.cache.protected_pages) == (0, protected)
    assert rig.cache.protected_window_pages == 0
    rig.cache.unlock(receipt)
    assert sizes(rig.cache) == (protected, 0)


@every_type
def test_every_type_explains_a_miss_and_tells_its_prefixes(new_rig: RigMaker, kind: Kind) -> None:
    # given
    rig = new_rig(kind)
    rig.store(range(16))
    reuses = rig.cache.reuses_prefixes

    # when
    reasons = [rig.cache.explain_miss(key_of(range(n)), rig.matched(range(n))).reason for n in (3, 17, 40)]
    prefixes = rig.cache.top_prefixes(8).prefixes

    # then
    assert reasons == (["short", "whole", "ends"] if reuses else ["no_reuse"] * 3)
    assert max((each.num_tokens for each in prefixes), default=0) == (16 if reuses else 0)


@every_type
@pytest.mark.parametrize("length", [0, 1, 3])
def test_less_than_a_page_is_never_published(new_rig: RigMaker, kind: Kind, length: int) -> None:
    """Behaviour 2."""
    rig = new_rig(kind)
    result = rig.store(range(length))
    assert (result.num_tokens, result.pages.size, result.duplicates) == (0, 0, ())
    rig.cache.unlock(rig.cache.lock(result))


@reusing_types
def test_a_match_returns_the_stored_pages_and_no_more(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 1."""
    # given
    rig = new_rig(kind)
    stored = rig.store(range(16)).pages

    # then: a longer query, a shorter one, one that differs in its third page
    assert rig.cache.match(key_of(range(40))).pages.tolist() == stored.tolist()
    assert rig.cache.match(key_of(range(9))).pages.tolist() == stored[:2].tolist()
    assert rig.cache.match(key_of([*range(9), 99, 98, 97, 96])).pages.tolist() == stored[:2].tolist()

    # and what lies behind the cuts is still there
    assert rig.cache.match(key_of(range(17))).pages.tolist() == stored.tolist()


@reusing_types
@pytest.mark.parametrize("differs_at", range(16))
def test_a_difference_inside_a_page_cuts_at_that_page(new_rig: RigMaker, kind: Kind, differs_at: int) -> None:
    """Behaviour 2."""
    rig = new_rig(kind)
    rig.store(range(16))
    query = [*range(differs_at), 77, *range(differs_at + 1, 20)]
    assert rig.matched(query) == differs_at // 4 * 4


@reusing_types
def test_what_is_not_a_whole_page_stays_the_requests(new_rig: RigMaker, kind: Kind) -> None:
    """Peers' fault 10: six tokens at page 4 publish one page."""
    rig = new_rig(kind)
    own = rig.take(2)
    result = rig.publish(key_of(range(6)), own)
    assert (result.num_tokens, result.pages.tolist()) == (4, own[:1].tolist())
    rig.check(held_by_requests=own[1:])
    rig.allocator.port.free(own[1:])


@reusing_types
def test_evict_never_takes_a_locked_prefix(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 4, H04: a locked leaf protects its whole path, and nothing beyond it."""
    # given a chain of two, and a branch
    rig = new_rig(kind)
    first = rig.store(range(8))
    leaf = rig.store(range(16))
    rig.store([*range(8), 50, 51, 52, 53])
    receipts = [rig.cache.lock(leaf), rig.cache.lock(first)]
    assert sizes(rig.cache) == (1, 4)

    # when
    freed = rig.cache.evict(100)

    # then
    assert freed == 1
    assert rig.cache.match(key_of(range(17))).pages.tolist() == leaf.pages.tolist()

    # when one lock of two is given back, then both
    rig.cache.unlock(receipts[0])
    assert sizes(rig.cache) == (2, 2)
    rig.cache.unlock(receipts[1])
    assert sizes(rig.cache) == (4, 0)


@reusing_types
def test_sizes_move_only_with_the_first_lock_and_the_last_unlock(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 4."""
    rig = new_rig(kind)
    stored = rig.store(range(16))
    receipts = [rig.cache.lock(stored) for _ in range(3)]
    seen = [sizes(rig.cache)]
    for receipt in receipts:
        rig.cache.unlock(receipt)
        seen.append(sizes(rig.cache))
    assert seen == [(0, 4), (0, 4), (0, 4), (4, 0)]


@reusing_types
def test_the_least_recently_used_leaves_first_and_a_leaf_before_its_parent(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 5; the count returned is the count freed."""
    # given a parent with two children, the first of which is used again, and a newer stranger
    rig = new_rig(kind)
    parent = rig.store(range(4)).pages.tolist()
    used_again = rig.store([0, 1, 2, 3, 10, 11, 12, 13]).pages.tolist()[1:]
    old = rig.store([0, 1, 2, 3, 20, 21, 22, 23]).pages.tolist()[1:]
    stranger = rig.store(range(90, 94)).pages.tolist()
    rig.matched([0, 1, 2, 3, 10, 11, 12, 13, 0])

    # then
    assert eviction_order(rig) == [*old, *stranger, *used_again, *parent]


@reusing_types
def test_namespaces_share_nothing(new_rig: RigMaker, kind: Kind) -> None:
    """Behaviour 6, H12, H29, peers' fault 8: a hit needs equal fields, each in its own place."""
    # given
    rig = new_rig(kind, num_pages=4 * len(NAMESPACES))
    assert len(set(NAMESPACES)) == len(NAMESPACES)

    # when the same tokens are stored in each, nothing of the others is hit
    stored = []
    for namespace in NAMESPACES:
        assert rig.matched(range(17), namespace) == 0, namespace
        stored.append(rig.store(range(16), namespace).pages)

    # then all pages are distinct, and each finds its own
    assert np.unique(np.concatenate(stored)).size == 4 * len(NAMESPACES)
    for namespace, pages in zip(NAMESPACES, stored, strict=True):
        assert rig.cache.match(key_of(range(17), namespace)).pages.tolist() == pages.tolist()


@reusing_types
@pytest.mark.parametrize(
    ("one", "other"), [*permutations([DEFAULT_NAMESPACE, Namespace(salt=""), Namespace(dp_rank=1)], 2)]
)
def test_evicting_one_namespace_leaves_the_other(
    new_rig: RigMaker, kind: Kind, one: Namespace, other: Namespace
) -> None:
    rig = new_rig(kind)
    rig.store(range(16), one)
    rig.store(range(16), other)
    assert rig.cache.evict(4) == 4
    assert (rig.matched(range(17), one), rig.matched(range(17), other)) == (0, 16)


@reusing_types
def test_flush_empties_the_cache_or_refuses_while_a_page_is_locked(new_rig: RigMaker, kind: Kind) -> None:
    # given
    rig = new_rig(kind)
    stored = rig.store(range(16))
    receipt = rig.cache.lock(stored)

    # when locked
    with pytest.raises(LockedPageError) as refusal:
        rig.cache.flush()

    # then
    assert sorted(refusal.value.pages) == sorted(stored.pages.tolist())
    assert rig.matched(range(17)) == 16

    # when unlocked
    rig.cache.unlock(receipt)
    assert (rig.cache.flush(), sizes(rig.cache), rig.cache.num_nodes) == (4, (0, 0), 0)
