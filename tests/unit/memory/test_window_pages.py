"""The pool of window pages: reserved with full pages, retired by the window, refused before anything changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from app.core.batch import Admission, BatchPlan, PageRewrite
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.sampling import SamplingParams
from app.errors import DoubleFreeError, OutOfPagesError, OwnershipError, StaleHandleError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import TableDelta
from app.memory.window_pages import WindowPagePool, window_rows
from app.tpu.mesh import make_mesh

PAGE_SIZE, WINDOW, CAPACITY = 4, 6, 12
IDENTITY = CacheIdentity(RuntimeId("test"), Generation(1))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Rig:
    """A pool of window pages and the rows that it serves."""

    def __init__(self) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(CAPACITY, PAGE_SIZE, IDENTITY)
        self.pool = WindowPagePool(
            allocator=self.allocator, window=WINDOW, num_rows=2, max_pages=10, mesh=make_mesh(1, "cpu")
        )
        self.pool.open()
        self.counts = np.zeros(2, np.int32)

    def admit(self, row: int, prefix: np.ndarray) -> None:
        self.pool.admit(row, prefix, self._delta(row, prefix.size))

    def grow(self, row: int, num_pages: int) -> np.ndarray:
        return self.pool.append(self._delta(row, num_pages)).window_pages

    def _delta(self, row: int, num_pages: int) -> TableDelta:
        columns = np.arange(self.counts[row], self.counts[row] + num_pages, dtype=np.int32)
        self.counts[row] += num_pages
        return TableDelta(np.full(num_pages, row, np.int32), columns, columns)

    def check(self) -> None:
        self.pool.check_integrity(self.counts)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.check()


def admission(prefix: np.ndarray, window_prefix: np.ndarray) -> Admission:
    return Admission(
        prefix_pages=prefix,
        prompt_length=1,
        token_ids=ints(0),
        sampling=SamplingParams(seed=0),
        prefix_window_pages=window_prefix,
    )


def test_a_row_gives_back_what_its_window_has_passed_and_keeps_the_rest(rig: Rig) -> None:
    rig.admit(0, ints())
    pages = rig.grow(0, 5)
    rig.pool.settle(ints(0), ints(20))

    rig.pool.begin(BatchPlan(identity=IDENTITY))

    # 20 settled tokens: the last 6 before 20 begin in page 3.
    assert sorted(rig.allocator.held_page_ids().tolist()) == sorted(pages[3:].tolist())


def test_pages_of_the_cache_are_never_given_back_by_the_row(rig: Rig) -> None:
    cached = rig.allocator.allocate(3)
    rig.admit(0, cached)
    rig.grow(0, 2)
    rig.pool.settle(ints(0), ints(20))
    rig.pool.begin(BatchPlan(identity=IDENTITY))
    assert np.isin(cached, rig.allocator.held_page_ids()).all()


def test_what_a_plan_says_is_published_is_not_retired_any_more(rig: Rig) -> None:
    rig.admit(0, ints())
    pages = rig.grow(0, 5)
    rig.pool.settle(ints(0), ints(20))
    plan = BatchPlan(
        identity=IDENTITY, published_slots=ints(0), published_generations=ints(1), published_counts=ints(5)
    )
    rig.pool.begin(plan)
    assert np.isin(pages, rig.allocator.held_page_ids()).all()


def test_capacity_counts_what_the_same_plan_retires(rig: Rig) -> None:
    rig.admit(0, ints())
    rig.grow(0, 10)
    plan = BatchPlan(identity=IDENTITY)
    with pytest.raises(OutOfPagesError) as refused:
        rig.pool.check_capacity(plan, 3)
    assert (refused.value.need, refused.value.free) == (3, 2)

    rig.pool.settle(ints(0), ints(40))
    rig.pool.check_capacity(plan, 3)

    assert rig.pool.num_free == 2, "asking changes nothing"


def test_a_plan_that_names_foreign_or_loose_pages_is_refused(rig: Rig) -> None:
    cached = rig.allocator.allocate(2)
    loose = ints(CAPACITY)
    for plan, error in (
        (BatchPlan(identity=IDENTITY, free_window_pages=cached), DoubleFreeError),
        (BatchPlan(identity=IDENTITY, admissions=(admission(ints(1, 2), loose),)), OwnershipError),
        (BatchPlan(identity=IDENTITY, admissions=(admission(ints(1), loose),)), StaleHandleError),
        (
            BatchPlan(
                identity=IDENTITY,
                rewrites=(PageRewrite(slot=0, generation=1, first_page_index=0, pages=ints(1), window_pages=ints()),),
            ),
            OwnershipError,
        ),
    ):
        with pytest.raises(error):
            rig.pool.check_plan(plan)
    rig.pool.check_plan(BatchPlan(identity=IDENTITY, admissions=(admission(ints(7, 8), ints(0, int(cached[1]))),)))


def test_a_discarded_batch_gives_its_pages_back(rig: Rig) -> None:
    rig.admit(0, ints())
    pages = rig.grow(0, 4)
    rig.pool.undo(pages, ints(0))
    rig.counts[:] = 0
    assert rig.pool.num_free == CAPACITY


def test_the_device_reads_a_rows_pages_from_where_its_window_begins(rig: Rig) -> None:
    rig.admit(1, ints())
    delta = rig.pool.append(rig._delta(1, 5))
    rig.pool.apply([delta])
    read = np.asarray(window_rows(rig.pool.device_table(), ints(1, 2), ints(2, 0), 3))
    assert read[0].tolist() == delta.window_pages[2:5].tolist()
    assert read[1].tolist() == [0, 0, 0], "a row that is none reads row 0, which is empty"


def test_a_reset_empties_every_row_and_frees_every_page(rig: Rig) -> None:
    rig.admit(0, ints())
    rig.grow(0, 5)
    rig.pool.reset(CacheIdentity(RuntimeId("test"), Generation(2)))
    rig.counts[:] = 0
    assert rig.pool.num_free == CAPACITY
    assert not np.asarray(rig.pool.device_table()).any()
