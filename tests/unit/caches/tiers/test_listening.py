"""What a tier can read from the result of an insert."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.base import InsertResult
from app.caches.tiers.listening import num_duplicates


@pytest.mark.parametrize(
    ("first", "runs", "expected"),
    [(0, (), 0), (0, ((0, 2), (2, 3)), 5), (4, ((4, 2),), 6), (4, (), 4)],
)
def test_pages_that_were_there_include_those_in_front_of_the_callers_lock(first, runs, expected) -> None:
    assert num_duplicates(InsertResult(80, np.zeros(10 - first, np.int32), None, runs, first)) == expected
