"""Which window pages a row still needs. Pure functions of counts, for ints and for arrays of them.

A query at position i of a sliding-window layer sees the keys at i - W + 1 .. i. So once every token before `settled` is
computed and its step was read, no later step reads keys before settled - W + 1; and what is published then, the whole
pages of the settled tokens, is of use to a later match only with its last W tokens.

    0 ------------ retired ------------ first_needed_page ---- kept ---- settled
"""

from __future__ import annotations

from typing import TypeVar

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
