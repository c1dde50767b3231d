"""What a miss says in words, and what a cache type says that tells nothing of its own."""

from __future__ import annotations

import pytest

from app.bench.timed import TimedCache
from app.caches.inspection import Miss, TopPrefixes
from tests.support.tree_model import CacheRig, key_of


@pytest.mark.parametrize(("length", "reason"), [(3, "short"), (16, "whole"), (40, "untold")])
def test_a_type_that_tells_nothing_still_knows_what_lengths_tell(length: int, reason: str) -> None:
    # given a cache that overrides only what it must
    rig = CacheRig("radix_cache")
    rig.store(range(16))
    cache = TimedCache(rig.cache)
    key = key_of(range(length))

    # when
    miss = cache.explain_miss(key, cache.match(key).num_tokens)

    # then
    assert miss.reason == reason
    assert cache.top_prefixes(5) == TopPrefixes((), 0, 0)


def test_a_type_that_never_reuses_says_so_and_nothing_else() -> None:
    cache = TimedCache(CacheRig("chunk_cache").cache)
    assert {cache.explain_miss(key_of(range(length)), 0).reason for length in (0, 3, 40)} == {"no_reuse"}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 seconds"),
        (9.96, "10.0 seconds"),
        (10, "10 seconds"),
        (119.4, "119 seconds"),
        (120, "2 minutes"),
        (7199, "120 minutes"),
        (7200, "2 hours"),
    ],
)
def test_a_time_is_told_in_a_unit_that_can_be_read(seconds: float, words: str) -> None:
    miss = Miss(reason="evicted", prompt_tokens=40, num_matched=16, page_size=16, evicted_s_ago=seconds)
    assert miss.sentence == f"The tokens after the first 16 were cached, but were evicted {words} earlier."
