"""The page allocator: who may take what, who may give what back, and when it can be taken again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from pytest_mock import MockerFixture

from app.core.ports import TokenAllocator
from app.errors import DoubleFreeError, ForeignPageError, IntegrityError, OutOfPagesError, StaleHandleError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from tests.support.tree_model import identity

CAPACITY = 32


@pytest.fixture
def allocator() -> Iterator[PagedTokenToKVPoolAllocator]:
    allocator = PagedTokenToKVPoolAllocator(CAPACITY, 4, identity())
    yield allocator
    allocator.check_integrity()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def state_of(allocator: PagedTokenToKVPoolAllocator) -> tuple[list[int], list[int], list[int]]:
    return (
        allocator.free_page_ids().tolist(),
        allocator.recorded_page_ids().tolist(),
        allocator.held_page_ids().tolist(),
    )


def test_ids_are_distinct_and_never_the_padding_page(allocator: PagedTokenToKVPoolAllocator) -> None:
    """Behaviour 11; peers' fault 9."""
    # when everything is taken, in pieces
    pages = np.concatenate([allocator.allocate(n) for n in (1, 5, 0, 26)])

    # then
    assert sorted(pages.tolist()) == list(range(1, CAPACITY + 1))
    assert pages.dtype == np.int32


def test_exhaustion_names_the_numbers_and_changes_nothing(allocator: PagedTokenToKVPoolAllocator) -> None:
    """Behaviour 11."""
    # given
    allocator.allocate(30)
    before = state_of(allocator)

    # when
    with pytest.raises(OutOfPagesError) as refusal:
        allocator.allocate(3)

    # then
    assert (refusal.value.need, refusal.value.free) == (3, 2)
    assert state_of(allocator) == before


def test_a_negative_number_of_pages_is_refused(allocator: PagedTokenToKVPoolAllocator) -> None:
    with pytest.raises(ValueError):
        allocator.allocate(-1)


def test_freed_pages_are_counted_as_available_but_not_handed_out_before_they_are_applied(
    allocator: PagedTokenToKVPoolAllocator,
) -> None:
    # given
    pages = allocator.allocate(CAPACITY)

    # when
    allocator.port.free(pages[:4])

    # then
    assert (allocator.port.available(), allocator.num_free) == (4, 0)
    with pytest.raises(OutOfPagesError):
        allocator.allocate(1)

    # when
    allocator.apply_frees(allocator.port.recorded_frees())

    # then
    assert sorted(allocator.allocate(4).tolist()) == sorted(pages[:4].tolist())


@pytest.mark.parametrize("give", ["port.free", "give_back", "apply_frees"])
@pytest.mark.parametrize(
    ("pages", "error"),
    [
        (ids(0), ForeignPageError),
        (ids(-1), ForeignPageError),
        (ids(CAPACITY + 1), ForeignPageError),
        (ids(3, 4, CAPACITY + 1), ForeignPageError),
        (ids(0, 1, 2), ForeignPageError),
        (ids(9, 3, 9), DoubleFreeError),
        (ids(3, 3), DoubleFreeError),
        (ids(20), DoubleFreeError),  # free
        (ids(8, 9, 10, 11), DoubleFreeError),  # the last is free
        (ids(*[5] * (CAPACITY + 1)), DoubleFreeError),
    ],
    ids=str,
)
def test_pages_that_are_not_the_callers_are_refused_without_any_change(
    allocator: PagedTokenToKVPoolAllocator, give: str, pages: np.ndarray, error: type[Exception]
) -> None:
    """Peers' fault 9: double frees, foreign ids, the padding page, and one page twice within a call."""
    # given: 1..10 are held, or recorded where recorded ones are wanted
    allocator.allocate(10)
    calls: dict[str, Callable[[np.ndarray], None]] = {
        "port.free": allocator.port.free,
        "give_back": allocator.give_back,
        "apply_frees": allocator.apply_frees,
    }
    if give == "apply_frees":
        allocator.port.free(ids(*range(1, 11)))
    before = state_of(allocator)

    # when
    with pytest.raises(error):
        calls[give](pages)

    # then
    assert state_of(allocator) == before


def test_a_negative_id_does_not_count_from_the_end(allocator: PagedTokenToKVPoolAllocator) -> None:
    allocator.allocate(CAPACITY)
    for give in (allocator.port.free, allocator.give_back):
        with pytest.raises(ForeignPageError):
            give(ids(-1, 4, -3))
    assert allocator.held_page_ids().size == CAPACITY


def test_a_second_free_is_refused_before_and_after_the_first_is_applied(allocator: PagedTokenToKVPoolAllocator) -> None:
    """H01's ledger, from the allocator's side."""
    # given
    pages = allocator.allocate(3)
    allocator.port.free(pages)

    # then
    with pytest.raises(DoubleFreeError) as refusal:
        allocator.port.free(pages[:1])
    assert tuple(refusal.value.pages) == (1,)
    allocator.apply_frees(allocator.port.recorded_frees())
    with pytest.raises(DoubleFreeError):
        allocator.port.free(pages[:1])


def test_ids_of_another_width_are_refused(allocator: PagedTokenToKVPoolAllocator) -> None:
    """As int32, 2**32 + 1 would be page 1."""
    allocator.allocate(1)
    for give in (allocator.port.free, allocator.give_back, allocator.apply_frees):
        with pytest.raises(TypeError, match="int64"):
            give(np.array([2**32 + 1]))


def test_frees_recorded_after_a_snapshot_stay_recorded_when_it_is_applied(
    allocator: PagedTokenToKVPoolAllocator,
) -> None:
    # given
    pages = allocator.allocate(6)
    allocator.port.free(pages[:2])
    allocator.port.free(pages[3:4])
    snapshot = allocator.port.recorded_frees()

    # when: a later free, and somebody looks again before the plan arrives
    allocator.port.free(pages[4:])
    allocator.port.recorded_frees()
    allocator.apply_frees(snapshot.copy())

    # then
    assert allocator.port.recorded_frees().tolist() == pages[4:].tolist()
    with pytest.raises(DoubleFreeError):
        allocator.apply_frees(snapshot)


def test_recorded_frees_are_nobody_elses_array(allocator: PagedTokenToKVPoolAllocator) -> None:
    # given
    pages = allocator.allocate(2)
    allocator.port.free(pages)

    # when: the caller goes on using its own
    pages[:] = 0

    # then
    assert allocator.port.recorded_frees().tolist() == [1, 2]
    with pytest.raises(ValueError):
        allocator.port.recorded_frees()[0] = 7


def test_grouped_free_equals_single_frees() -> None:
    """Behaviour 11."""
    # given two equal allocators
    one, other = (PagedTokenToKVPoolAllocator(CAPACITY, 4, identity()) for _ in range(2))
    pages = one.allocate(8)
    other.allocate(8)

    # when
    one.port.free(pages)
    for page in pages:
        other.port.free(ids(page))
    for each in (one, other):
        each.apply_frees(each.port.recorded_frees())
        each.check_integrity()

    # then
    assert state_of(one) == state_of(other)


def test_a_discarded_reservation_is_free_at_once(allocator: PagedTokenToKVPoolAllocator) -> None:
    # given
    pages = allocator.allocate(CAPACITY)

    # when
    allocator.give_back(pages[5:9])

    # then
    assert allocator.num_free == 4
    assert allocator.port.recorded_frees().size == 0


def test_reset_frees_everything_under_a_new_identity(allocator: PagedTokenToKVPoolAllocator) -> None:
    # given
    pages = allocator.allocate(9)
    allocator.port.free(pages[:3])

    # when
    allocator.reset(identity(1))

    # then
    assert allocator.port.identity == allocator.identity == identity(1)
    assert allocator.num_free == allocator.port.available() == CAPACITY
    assert allocator.port.recorded_frees().size == 0
    with pytest.raises(DoubleFreeError):
        allocator.port.free(pages[3:])


def test_check_held_refuses_pages_that_nobody_holds(allocator: PagedTokenToKVPoolAllocator) -> None:
    allocator.allocate(4)
    allocator.check_held(ids(1, 4))
    with pytest.raises(StaleHandleError):
        allocator.check_held(ids(4, 5))
    with pytest.raises(ForeignPageError):
        allocator.check_held(ids(0))


def test_nothing_that_control_may_call_reaches_the_runtimes_face(
    allocator: PagedTokenToKVPoolAllocator, mocker: MockerFixture
) -> None:
    # given
    pages = allocator.allocate(4)
    port: TokenAllocator = allocator.port
    runtime_calls = ["allocate", "apply_frees", "give_back", "reset", "free_page_ids", "recorded_page_ids"]
    spies = [mocker.spy(allocator, name) for name in runtime_calls]

    # when
    port.free(pages)
    assert (port.available(), port.capacity, port.page_size, port.identity) == (CAPACITY, CAPACITY, 4, identity())
    assert port.recorded_frees().tolist() == [1, 2, 3, 4]
    assert port.free_page_ids().tolist() == list(range(5, CAPACITY + 1))

    # then
    assert sum(spy.call_count for spy in spies) == 0


def test_integrity_check_finds_a_page_with_two_owners_and_a_lost_one() -> None:
    # given
    broken = PagedTokenToKVPoolAllocator(CAPACITY, 4, identity())
    broken.allocate(2)
    broken._book.stack[5] = 1

    # then
    with pytest.raises(IntegrityError, match="once each"):
        broken.check_integrity()


@pytest.mark.parametrize("module", ["app.memory.paged_allocator", "app.caches.builtin", "app.bench.tree"])
def test_trees_and_allocator_work_without_jax(module: str) -> None:
    code = f"import {module}, app.caches.builtin as b, sys; b.load_builtin_caches(); print('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
