"""Host pages: who holds them, what is in them, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.transfers import NO_IDS, OfEachPool, PageCounts, PageIds
from app.errors import DoubleFreeError, ForeignPageError, IntegrityError, OutOfPagesError, OwnershipError
from app.memory.host_kv_pool import HostKVPool
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.tpu.mesh import make_mesh
from app.tpu.page_carrier import PoolContents
from app.tpu.pool_layout import ArrayPerLayer
from tests.support.page_cases import PagedPool, flat_pool, hybrid_pool, some_ids
from tests.support.page_round_trip import backed_up

CAPACITY = PageCounts(6, 5, 4)
COUNTS = PageCounts(3, 2, 1)
FIRST, SECOND = (CacheIdentity(RuntimeId("test"), Generation(number)) for number in (1, 2))


@pytest.fixture(scope="module")
def paged() -> PagedPool:
    """A device pool with all three kinds of pages."""
    paged = hybrid_pool("everything", make_mesh(1, "cpu"), page_size=2, dtype="float32")
    paged.fill(seed=1)
    return paged


@pytest.fixture(scope="module")
def contents(paged) -> PoolContents:
    """Six different pages of each kind, on the host."""
    return backed_up(paged, some_ids(paged.carriers, 1, 6))


@pytest.fixture
def host(paged):
    allocators = OfEachPool(*(PagedTokenToKVPoolAllocator(capacity, 2, FIRST) for capacity in CAPACITY))
    host = HostKVPool(allocators=allocators, carriers=paged.carriers)
    yield host
    host.check_integrity()


def first(contents: PoolContents, counts: PageCounts = COUNTS) -> PoolContents:
    return OfEachPool(*(pages[:count] for pages, count in zip(contents, counts, strict=True)))


def same(one: PoolContents, other: PoolContents) -> bool:
    """The very same arrays."""
    return [id(array) for array in jax.tree.leaves(one)] == [id(array) for array in jax.tree.leaves(other)]


def free(host: HostKVPool, ids: PageIds) -> None:
    """As control does it, and the next plan."""
    for allocator, pages in zip(host.allocators, ids, strict=True):
        allocator.port.free(pages)
    host.check_recorded(ids)
    host.apply_frees(ids)


def test_what_was_put_is_got_by_any_order_of_ids(host, contents) -> None:
    ids = host.allocate(COUNTS)
    host.put(ids, first(contents))

    backwards = PageIds(*(pages[::-1] for pages in ids))

    assert same(host.get(ids), first(contents))
    assert same(host.get(backwards), OfEachPool(*(pages[::-1] for pages in first(contents))))


def test_it_says_what_it_holds_and_how_much(host, contents, paged) -> None:
    ids = host.allocate(COUNTS)
    assert host.num_free() == PageCounts(3, 3, 3)
    assert (host.num_bytes, host.filled().counts()) == (0, PageCounts())

    host.put(ids, first(contents))

    assert host.num_bytes == sum(
        count * carrier.page_bytes for count, carrier in zip(COUNTS, paged.carriers, strict=True)
    )
    for found, expected in zip(host.filled(), ids, strict=True):
        np.testing.assert_array_equal(found, np.sort(expected))


def test_a_page_that_nothing_arrived_in_cannot_be_read(host, contents) -> None:
    ids = host.allocate(COUNTS)
    with pytest.raises(OwnershipError, match="not filled"):
        host.get(ids)

    host.put(ids, first(contents))
    host.drop(PageIds(states=ids.states))

    with pytest.raises(OwnershipError, match="not filled"):
        host.get(ids)
    assert same(host.get(PageIds(ids.pages, ids.window_pages)), OfEachPool(*first(contents)[:2], []))
    with pytest.raises(OwnershipError, match="not filled"):
        host.drop(ids)  # one of them is not there
    assert host.filled().counts() == PageCounts(3, 2, 0)  # and so none was dropped


def test_what_a_reader_got_stays_when_the_page_is_somebody_elses(host, contents, paged) -> None:
    ids = host.allocate(PageCounts(pages=1))
    host.put(ids, first(contents, PageCounts(1)))
    read = host.get(ids)
    before = paged.carriers.pages.to_bytes(read.pages[0]).copy()

    free(host, ids)
    everything = host.allocate(CAPACITY)
    others = OfEachPool(contents.pages, contents.window_pages[:5], contents.states[:4])
    host.put(everything, others)

    np.testing.assert_array_equal(paged.carriers.pages.to_bytes(read.pages[0]), before)


def test_freed_pages_have_no_content(host, contents) -> None:
    ids = host.allocate(COUNTS)
    host.put(ids, first(contents))

    free(host, PageIds(ids.pages[:2]))
    host.give_back(PageIds(states=ids.states))

    assert host.filled().counts() == PageCounts(1, 2, 0)
    assert host.num_free() == PageCounts(5, 3, 4)
    assert same(host.get(PageIds(ids.pages[2:])), OfEachPool(contents.pages[2:3], [], []))


def test_control_may_still_be_reading_what_it_freed_and_no_plan_has_applied(host, contents) -> None:
    ids = host.allocate(PageCounts(pages=2))
    host.put(ids, first(contents, PageCounts(2)))
    host.allocators.pages.port.free(ids.pages)

    host.check_integrity()

    assert same(host.get(ids), first(contents, PageCounts(2)))


def test_nothing_is_allocated_when_one_kind_is_short(host) -> None:
    with pytest.raises(OutOfPagesError) as raised:
        host.allocate(PageCounts(1, 1, 5))
    assert (raised.value.need, raised.value.free) == (5, 4)
    assert host.num_free() == CAPACITY


def test_only_held_and_empty_pages_are_filled_and_all_or_none(host, contents) -> None:
    ids = host.allocate(COUNTS)
    loose = PageIds(ids.pages, ids.window_pages, np.array([4], np.int32))
    with pytest.raises(OwnershipError, match="is stale"):
        host.put(loose, first(contents))
    with pytest.raises(OwnershipError, match="2 contents for 3 pages"):
        host.put(ids, first(contents, PageCounts(2, 2, 1)))
    twice = PageIds(np.repeat(ids.pages[:1], 2))
    with pytest.raises(OwnershipError, match="2 contents for 1 pages"):
        host.put(twice, first(contents, PageCounts(2)))
    assert host.filled().counts() == PageCounts()

    host.put(ids, first(contents))
    with pytest.raises(OwnershipError, match="filled already"):
        host.put(ids, first(contents))


def test_giving_back_what_is_not_held_changes_nothing(host, contents) -> None:
    ids = host.allocate(COUNTS)
    host.put(ids, first(contents))

    with pytest.raises(OwnershipError):
        host.give_back(ids._replace(states=np.array([4], np.int32)))

    assert same(host.get(ids), first(contents))


def test_frees_that_nobody_recorded_are_refused(host) -> None:
    ids = host.allocate(COUNTS)
    with pytest.raises(DoubleFreeError):
        host.check_recorded(ids)
    with pytest.raises(DoubleFreeError):
        host.apply_frees(ids)


def test_ids_of_a_kind_that_the_model_lacks_are_foreign() -> None:
    plain = flat_pool_host()
    with pytest.raises(ForeignPageError):
        plain.get(PageIds(states=np.array([1], np.int32)))
    assert plain.num_free() == PageCounts(6)
    assert plain.get(NO_IDS) == OfEachPool([], [], [])


def test_reset_frees_everything_under_a_new_identity(host, contents) -> None:
    ids = host.allocate(COUNTS)
    host.put(ids, first(contents))

    host.reset(SECOND)

    assert host.num_free() == CAPACITY
    assert host.num_bytes == 0
    assert {allocator.port.identity for allocator in host.allocators} == {SECOND}


def test_close_lets_go_of_all_content_twice_over(host, contents) -> None:
    ids = host.allocate(COUNTS)
    host.put(ids, first(contents))

    host.close()
    host.close()

    assert host.num_bytes == 0
    assert host.filled().counts() == PageCounts()


def test_the_check_sees_content_in_free_pages(host, contents) -> None:
    ids = host.allocate(COUNTS)
    host.put(ids, first(contents))
    host.allocators.pages.give_back(ids.pages)  # behind its back

    with pytest.raises(IntegrityError, match="free pages"):
        host.check_integrity()
    host.reset(SECOND)


@pytest.mark.parametrize("wrong", ["on the device", "of another shape", "one array too few"])
def test_the_check_sees_what_is_no_page(host, contents, paged, wrong) -> None:
    ids = host.allocate(PageCounts(states=1))
    page = contents.states[0]
    bad = {
        "on the device": paged.carriers.states.to_device([page])[0],
        "of another shape": contents.pages[0],
        "one array too few": page[:-1],
    }[wrong]
    host.put(ids, OfEachPool([], [], [bad]))

    with pytest.raises(IntegrityError, match="no page"):
        host.check_integrity()
    host.drop(ids)


def flat_pool_host() -> HostKVPool:
    paged = flat_pool(ArrayPerLayer(), make_mesh(1, "cpu"), page_size=2, dtype="float32")
    return HostKVPool(
        allocators=OfEachPool(PagedTokenToKVPoolAllocator(6, 2, FIRST), None, None), carriers=paged.carriers
    )
