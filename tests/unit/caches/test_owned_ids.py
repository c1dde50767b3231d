"""The guard against an id in two places of a tree, against a set of ints."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.caches.tree.owned import OwnedIds
from app.errors import ForeignPageError, OwnershipError

CAPACITY = 12
calls = st.lists(st.lists(st.integers(1, CAPACITY), max_size=6), max_size=12)


@given(calls)
def test_ids_are_refused_that_are_held_or_named_twice_and_no_others(offered: list[list[int]]) -> None:
    owned, held = OwnedIds(CAPACITY, "page"), set[int]()
    for ids in offered:
        given_ids = np.array(ids, np.int32)
        here, twice = held.intersection(ids), {each for each, times in Counter(ids).items() if times > 1}

        if here or twice:
            with pytest.raises(OwnershipError) as refusal:
                owned.adoptable_once(given_ids)
            assert set(refusal.value.pages) == (here or twice)
        else:
            owned.adopt(owned.adoptable_once(given_ids))
            held.update(ids)

        assert set(owned.ids().tolist()) == held


@pytest.mark.parametrize("ids", [[CAPACITY + 1], [1, CAPACITY + 1]])
def test_an_id_of_another_pool_is_refused(ids: list[int]) -> None:
    with pytest.raises(ForeignPageError):
        OwnedIds(CAPACITY, "page").adoptable(np.array(ids, np.int32))


def test_padding_is_never_adopted() -> None:
    with pytest.raises(OwnershipError):
        OwnedIds(CAPACITY, "page").adoptable(np.array([0], np.int32))
