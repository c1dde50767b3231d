"""Which window pages a row needs, against the definition of a window, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.sliding_window import WindowRows, first_needed_page, first_seen_page, pages_seen


def seen_by(position: int, window: int) -> range:
    """The positions of the keys that a query sees."""
    return range(max(0, position - window + 1), position + 1)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16, 17, 64])
def test_no_later_query_sees_a_retired_page_and_a_publication_keeps_its_last_window(
    window: int, page_size: int
) -> None:
    for settled in range(100):
        first = first_needed_page(settled, window, page_size)
        assert first * page_size <= seen_by(settled, window)[0]
        published = settled // page_size * page_size
        needed = [position for position in range(published) if position >= published - window]
        assert all(position >= first * page_size for position in needed)
        # No page more is kept than these two ask for.
        if first * page_size + page_size <= min([*needed, seen_by(settled, window)[0]]):
            pytest.fail(f"page {first} is needed by nobody after {settled} tokens")


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("num_queries", [1, 2, 7, 16, 33])
def test_the_pages_that_queries_see_are_counted_for_the_worst_place_in_a_page(
    num_queries: int, window: int, page_size: int
) -> None:
    counts = []
    for start in range(3 * window + 2 * page_size, 3 * window + 4 * page_size):
        first = first_seen_page(start, window, page_size)
        assert first == seen_by(start, window)[0] // page_size
        counts.append(-(-(start + num_queries) // page_size) - first)
    assert max(counts) == pages_seen(num_queries, window, page_size)


def test_arrays_and_ints_give_the_same() -> None:
    settled = np.arange(200, dtype=np.int32)
    vectorised = first_needed_page(settled, 9, 4)
    assert vectorised.tolist() == [first_needed_page(int(each), 9, 4) for each in settled]


@given(
    window=st.integers(1, 12),
    page_size=st.sampled_from([1, 2, 4]),
    acts=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["grow", "share", "retire", "end"])), max_size=60),
)
def test_rows_retire_each_own_page_once_and_none_of_the_caches(window, page_size, acts) -> None:
    rows = WindowRows(3, window, page_size)
    lengths, shared, retired = [0, 0, 0], [0, 0, 0], [set() for _ in range(3)]
    for row in range(3):
        rows.begin(row, 0)
    for row, act in acts:
        if act == "grow":
            lengths[row] += 3
            rows.settle(row, lengths[row])
        elif act == "share":
            shared[row] = max(shared[row], lengths[row] // page_size)
            rows.share(row, shared[row])
        elif act == "end":
            rows.end(row)
            lengths[row], shared[row], retired[row] = 0, 0, set()
            rows.begin(row, 0)
        else:
            expected = rows.due().num_pages
            gone = rows.retire()
            assert gone.num_pages == expected
            for one, first, end in zip(*gone, strict=True):
                pages = set(range(first, end))
                assert not pages & retired[one]
                assert min(pages) >= shared[one]
                retired[one] |= pages
            for one in range(3):
                frontier = first_needed_page(lengths[one], window, page_size)
                assert rows.first_own(one) == max(shared[one], frontier if retired[one] else rows.first_own(one))
                assert rows.first_own(one) >= min(frontier, max(frontier, shared[one]))
            assert rows.due().num_pages == 0


def test_copying_rows_leaves_the_original_alone() -> None:
    rows = WindowRows(1, 2, 1)
    rows.begin(0, 0)
    rows.settle(0, 10)
    tried = rows.copy()
    assert tried.retire().num_pages == 8
    assert rows.due().num_pages == 8


def test_a_step_that_is_read_after_its_row_ended_retires_nothing() -> None:
    rows = WindowRows(2, 2, 1)
    rows.begin(0, 0)
    rows.begin(1, 0)
    rows.end(0)

    rows.settle(np.array([0, 1]), np.array([8, 8]))

    assert rows.due().rows.tolist() == [1]
    rows.clear()
    rows.settle(1, 9)
    assert rows.retire().rows.size == 0
