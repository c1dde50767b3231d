"""Which window pages a request holds, as control records it."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.base import NO_PAGES
from app.caches.window_leases import WindowLeases
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from tests.support.tree_model import identity

PAGE, WINDOW = 4, 8


@pytest.fixture
def allocator() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(32, PAGE, identity())


@pytest.fixture
def leases(allocator: PagedTokenToKVPoolAllocator) -> WindowLeases:
    """Of request "a", which holds six pages of its own in row 1."""
    leases = WindowLeases(allocator=allocator.port, window=WINDOW, num_rows=2)
    leases.begin("a", NO_PAGES)
    leases.seat("a", 1)
    leases.extend("a", allocator.allocate(6))
    return leases


def test_of_what_is_published_a_request_reads_no_more_than_its_lock_keeps(leases: WindowLeases) -> None:
    own = leases.held_pages("a").copy()

    assert not leases.publish("a", own[:3])
    assert leases.held_pages("a").tolist() == [0, *own[1:]]
    assert not leases.publish("a", own[3:6])

    assert leases.held_pages("a").tolist() == [0, 0, 0, 0, *own[4:]]
    assert leases.own_page_ids().size == leases.num_own("a") == 0
    leases.check_integrity()


def test_a_page_that_the_cache_had_already_replaces_the_requests(
    leases: WindowLeases, allocator: PagedTokenToKVPoolAllocator
) -> None:
    # given
    own = leases.held_pages("a").copy()
    cached = np.array([0, 0, 0, own[3], *allocator.allocate(2)], np.int32)
    free = allocator.port.available()

    # when
    assert leases.publish("a", cached)

    # then
    assert leases.held_pages("a").tolist() == [0, 0, 0, 0, *cached[4:]]
    assert allocator.port.available() == free + 5, "all that the cache did not take"


def test_a_request_that_ends_frees_what_is_its_own(
    leases: WindowLeases, allocator: PagedTokenToKVPoolAllocator
) -> None:
    free = allocator.port.available()
    leases.publish("a", leases.held_pages("a")[:3].copy())

    leases.release("a")

    assert allocator.port.available() == free + 3
    assert leases.own_page_ids().size == 0
