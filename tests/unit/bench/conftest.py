"""What the tests of every bench share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _heap_left_alone() -> Iterator[None]:
    """Benches collect garbage before each measurement: not among all that other tests left."""
    gc.freeze()
    yield
    gc.unfreeze()
