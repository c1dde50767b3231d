"""ChunkCache: behaviour 3, what only a cache that keeps nothing does."""

from __future__ import annotations

import numpy as np

from tests.support.tree_model import CacheRig, key_of


def test_it_says_that_it_never_reuses() -> None:
    assert not CacheRig("chunk_cache").cache.reuses_prefixes


def test_insert_adopts_nothing_and_a_match_stays_empty() -> None:
    # given
    rig = CacheRig("chunk_cache")
    own = rig.take(4)

    # when
    result = rig.cache.insert(key_of(range(16)), own)

    # then
    assert (result.num_tokens, result.pages.size, result.duplicates) == (0, 0, ())
    assert rig.matched(range(17)) == 0
    rig.check(held_by_requests=own)


def test_a_finished_request_frees_exactly_its_pages() -> None:
    # given two requests with equal tokens
    rig = CacheRig("chunk_cache")
    finished, running = rig.take(4), rig.take(4)
    result = rig.cache.insert(key_of(range(16)), finished)

    # when
    rig.free_what_was_not_adopted(finished, result)

    # then
    assert np.array_equal(rig.allocator.port.recorded_frees(), finished)
    rig.check(held_by_requests=running)


def test_there_is_nothing_to_evict_or_flush() -> None:
    rig = CacheRig("chunk_cache")
    rig.store(range(16))
    rig.cache.lock(rig.cache.match(key_of(range(17))))
    assert (rig.cache.evict(10), rig.cache.flush(), rig.cache.num_nodes) == (0, 0, 0)
