"""Request rows: handles with generations, and a page table whose device copy follows the host's."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.batch import PageRewrite
from app.errors import IntegrityError, OutOfRequestSlotsError, StaleHandleError
from app.memory import req_to_token_pool
from app.memory.req_to_token_pool import ReqToTokenPool, TableDelta
from app.tpu.mesh import make_mesh

ROWS, WIDTH = 4, 8


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def rows() -> ReqToTokenPool:
    pool = ReqToTokenPool(num_rows=ROWS, max_pages=WIDTH, mesh=make_mesh(1, "cpu"))
    pool.open()
    return pool


def device_row(rows: ReqToTokenPool, slot: int) -> list[int]:
    return np.asarray(rows.device_table())[slot].tolist()


def test_rows_are_given_out_once_and_come_back(rows: ReqToTokenPool) -> None:
    first = rows.allocate(3)
    second = rows.allocate(1)

    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3]
    assert rows.num_free == 0

    rows.release(first)

    assert rows.num_free == 3
    rows.check_integrity()


def test_a_refused_allocation_changes_nothing(rows: ReqToTokenPool) -> None:
    """H07: an allocation is all or nothing."""
    rows.allocate(3)
    generations = rows.generations.copy()

    with pytest.raises(OutOfRequestSlotsError) as refusal:
        rows.allocate(2)

    assert (refusal.value.need, refusal.value.free) == (2, 1)
    assert rows.num_free == 1
    assert np.array_equal(rows.generations, generations)


def test_a_row_given_to_another_request_refuses_the_old_handle(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(1)
    old = rows.generations[slots]
    rows.release(slots)

    with pytest.raises(StaleHandleError):
        rows.check_handles(slots, old)

    again = rows.allocate(1)

    assert again == slots
    with pytest.raises(StaleHandleError):
        rows.check_handles(slots, old)
    rows.check_handles(again, rows.generations[again])


@pytest.mark.parametrize("slot", [-1, ROWS])
def test_a_row_that_does_not_exist_is_refused(rows: ReqToTokenPool, slot: int) -> None:
    with pytest.raises(StaleHandleError):
        rows.check_handles(ints(slot), ints(1))


def test_appended_pages_reach_mirror_and_device_in_token_order(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(2)

    first = rows.append(slots, ints(2, 1), ints(5, 6, 7))
    second = rows.append(slots[:1], ints(1), ints(9))
    rows.apply([first, second])

    assert rows.row_pages(int(slots[0])).tolist() == [5, 6, 9]
    assert rows.row_pages(int(slots[1])).tolist() == [7]
    assert device_row(rows, int(slots[0]))[:3] == [5, 6, 9]
    assert device_row(rows, int(slots[1]))[:1] == [7]


def test_the_device_table_changes_only_when_a_step_applies_it(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(1)

    delta = rows.append(slots, ints(1), ints(5))

    assert device_row(rows, int(slots[0]))[0] == 0

    rows.apply([delta])

    assert device_row(rows, int(slots[0]))[0] == 5


def test_the_last_write_to_a_cell_wins(rows: ReqToTokenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter with two writes to one cell has no defined winner, so only one of them may travel."""
    travelled = []
    scatter = req_to_token_pool.scatter_cells
    monkeypatch.setattr(
        req_to_token_pool, "scatter_cells", lambda table, cells: travelled.append(cells) or scatter(table, cells)
    )
    slots = rows.allocate(1)
    slot = int(slots[0])
    written = rows.append(slots, ints(3), ints(1, 2, 3))
    rewritten = rows.rewrite(PageRewrite(slot=slot, generation=1, first_page_index=1, pages=ints(8, 9)))
    again = rows.rewrite(PageRewrite(slot=slot, generation=1, first_page_index=2, pages=ints(4)))

    rows.apply([written, rewritten, again])

    assert device_row(rows, slot)[:3] == rows.row_pages(slot).tolist() == [1, 8, 4]
    (cells,) = travelled
    assert sorted(cells[1, cells[0] == slot].tolist()) == [0, 1, 2]


def test_many_cells_travel_whole(rows: ReqToTokenPool) -> None:
    """H08: more cells than the smallest bucket, and later edits of the mirror do not reach a delta that was applied."""
    slots = rows.allocate(ROWS)
    pages = np.arange(1, ROWS * WIDTH + 1, dtype=np.int32)

    delta = rows.append(slots, np.full(ROWS, WIDTH, np.int32), pages)
    rows.apply([delta])
    for slot in slots.tolist():
        rows.rewrite(PageRewrite(slot=slot, generation=1, first_page_index=0, pages=np.zeros(WIDTH, np.int32)))
    pages[:] = 0

    table = np.asarray(rows.device_table())[slots]
    assert table.ravel().tolist() == list(range(1, ROWS * WIDTH + 1))


def test_a_delta_without_cells_costs_nothing(rows: ReqToTokenPool) -> None:
    before = rows.device_table()

    rows.apply([])
    rows.apply([TableDelta(ints(), ints(), ints())])

    assert rows.device_table() is before


def test_taking_back_an_append_leaves_the_row_as_it_was(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(2)
    rows.append(slots, ints(1, 2), ints(1, 2, 3))

    rows.append(slots, ints(2, 1), ints(4, 5, 6))
    rows.undo_append(slots, ints(2, 1))

    assert rows.row_pages(int(slots[0])).tolist() == [1]
    assert rows.row_pages(int(slots[1])).tolist() == [2, 3]


def test_reset_frees_every_row_and_voids_every_handle(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(2)
    generations = rows.generations[slots]
    rows.apply([rows.append(slots, ints(1, 1), ints(1, 2))])

    rows.reset()

    assert rows.num_free == ROWS
    assert not np.asarray(rows.device_table()).any()
    with pytest.raises(StaleHandleError):
        rows.check_handles(slots, generations)
    rows.check_integrity()


def test_integrity_names_a_row_that_reads_a_page_twice(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(1)
    rows.append(slots, ints(2), ints(3, 3))

    with pytest.raises(IntegrityError, match="twice"):
        rows.check_integrity()


def test_integrity_names_a_row_that_was_released_twice(rows: ReqToTokenPool) -> None:
    slots = rows.allocate(1)
    rows.release(slots)
    rows.release(slots)

    with pytest.raises(IntegrityError, match="free list"):
        rows.check_integrity()
