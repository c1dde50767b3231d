"""What control remembers of storage's keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.caches.tiers.chain_hashes import ChainHashes
from app.caches.tiers.recent_keys import RecentKeys
from app.core.keys import RadixKey, page_hashes

PAGE_SIZE = 4

texts = st.lists(st.integers(0, 1), max_size=30).map(lambda ids: RadixKey.of(np.array(ids, np.int32)))


@given(
    asked=st.lists(st.tuples(st.sampled_from([b"a", b"b"]), texts, st.integers(0, 7), st.integers(0, 7)), max_size=12)
)
def test_remembered_chains_change_no_hash(asked: list[tuple[bytes, RadixKey, int, int]]) -> None:
    chains = ChainHashes(PAGE_SIZE)
    for name, key, one, other in asked:
        end = min(max(one, other), key.num_tokens // PAGE_SIZE)
        first = min(one, other, end)
        seed = name * 32

        assert chains.of(seed, key, first, end) == page_hashes(seed, key.raw, PAGE_SIZE)[first:end]


def test_a_growing_prefix_is_not_hashed_again_page_by_page() -> None:
    """Seen by giving the remembered chain another end: what follows is hashed from there."""
    chains = ChainHashes(PAGE_SIZE)
    key = RadixKey.of(np.arange(40, dtype=np.int32))
    chains.of(b"s" * 32, key, 0, 5)
    for place in chains._ends:
        chains._ends[place] = b"x" * 32

    assert chains.of(b"s" * 32, key, 5, 6) == page_hashes(b"x" * 32, key.raw[5 * 16 : 6 * 16], PAGE_SIZE)


def test_the_keys_used_last_are_remembered() -> None:
    keys = RecentKeys(3)
    keys.add([b"1", b"2", b"3"])
    assert b"1" in keys

    keys.add([b"4"])
    keys.discard([b"3", b"never there"])

    assert [each in keys for each in (b"1", b"2", b"3", b"4")] == [True, False, False, True]
    assert len(keys) == 2
    keys.clear()
    assert len(keys) == 0
