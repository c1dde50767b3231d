"""Which window pages a row still needs. Pure functions of counts, for ints and for arrays of them.

A query at position i of a sliding-window layer sees the keys at i - W + 1 .. i. So once every token before `settled` is
computed and its step was read, no later step reads keys before settled - W + 1; and what is published then, the whole
pages of the settled tokens, is of use to a later match only with its last W tokens.

    0 ------------ retired ------------ first_needed_page ---- kept ---- settled
"""

from __future__ import annotations

import copy
from typing import NamedTuple, TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)


def first_needed_page(settled: Count, window: int, page_size: int) -> Count:
    """Index of the first page that a row with `settled` tokens needs: for later steps, and for publishing these.

    Both sides of the boundary retire by this one function, the runtime its pages and control its record of them.
    """
    published = settled // page_size * page_size
    return _at_least_zero(published - window) // page_size


def first_seen_page(position: Count, window: int, page_size: int) -> Count:
    """Index of the page with the first key that a query at `position` sees."""
    return _at_least_zero(position - window + 1) // page_size


def pages_seen(num_queries: int, window: int, page_size: int) -> int:
    """The most pages with keys that so many consecutive queries of one row see, wherever in a page the first stands."""
    return -(-(num_queries + window - 2) // page_size) + 1


def _at_least_zero(count: Count) -> Count:
    return count * (count > 0)


class RetiredPages(NamedTuple):
    """Page indexes firsts[i] .. ends[i] - 1 of row rows[i] retire. (n,) ints each, no range empty."""

    rows: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray

    @property
    def num_pages(self) -> int:
        return int((self.ends - self.firsts).sum()) if self.rows.size else 0


_NOTHING = RetiredPages(*(np.empty(0, np.int32) for _ in RetiredPages._fields))


class WindowRows:
    """How far the window pages of each request row are retired. The runtime and control each keep one, and tell it the
    same things in the same order, so that they agree without a message.

    A row's own window pages are those from the greater of `num_shared` and `retired` on: the pages before num_shared
    are the cache's, which retires them by itself.
    """

    def __init__(self, num_rows: int, window: int, page_size: int) -> None:
        self._window = window
        self._page_size = page_size
        self._num_shared = np.zeros(num_rows, np.int32)
        self._retired = np.zeros(num_rows, np.int32)
        self._settled = np.zeros(num_rows, np.int32)
        self._is_somebodys = np.zeros(num_rows, np.bool_)
        self._due: RetiredPages | None = None  # None when it must be counted anew

    def begin(self, row: int, num_shared: int) -> None:
        """The row starts with so many pages of the cache."""
        self._num_shared[row] = num_shared
        self._retired[row] = 0
        self._settled[row] = num_shared * self._page_size
        self._is_somebodys[row] = True
        self._due = None

    def end(self, rows: int | np.ndarray) -> None:
        """The rows are nobody's: nothing of them retires, though a step of theirs may still be read."""
        self._is_somebodys[rows] = False
        self._num_shared[rows] = self._retired[rows] = self._settled[rows] = 0
        self._due = None

    def share(self, rows: int | np.ndarray, num_shared: int | np.ndarray) -> None:
        """The first pages of these rows are the cache's now, at least as many as before."""
        self._num_shared[rows] = num_shared
        self._due = None

    def settle(self, rows: int | np.ndarray, num_tokens: int | np.ndarray) -> None:
        """The step that computed the last of so many tokens of these rows was read."""
        self._settled[rows] = num_tokens
        self._due = None

    def due(self) -> RetiredPages:
        """What `retire` would retire now. O(rows), whatever their lengths, once for what was told."""
        if self._due is None:
            frontiers = first_needed_page(self._settled, self._window, self._page_size)
            begins = np.maximum(self._num_shared, self._retired)
            rows = np.flatnonzero(self._is_somebodys & (frontiers > begins))
            self._due = RetiredPages(rows, begins[rows], frontiers[rows])
        return self._due

    def retire(self) -> RetiredPages:
        """Every row's own pages before its frontier stop being its own."""
        due = self.due()
        self._retired[due.rows] = due.ends
        self._due = _NOTHING
        return due

    def first_own(self, row: int) -> int:
        """The index from which on the row's window pages are its own and live."""
        return max(int(self._num_shared[row]), int(self._retired[row]))

    def first_needed(self, row: int) -> int:
        """The index of the first page that the row still needs, whoever's it is."""
        return first_needed_page(int(self._settled[row]), self._window, self._page_size)

    def copy(self) -> WindowRows:
        """The same rows, to try something out. O(rows)."""
        return copy.deepcopy(self)

    def clear(self) -> None:
        """Every row is nobody's."""
        self.end(np.arange(self._settled.size))
