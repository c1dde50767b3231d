"""What one tier holds of some consecutive pages of a prefix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from app.caches.base import NO_PAGES
from app.core.transfers import PageIds


class Span(NamedTuple):
    """Page indexes first .. first + num_pages - 1 of a prefix, (num_pages,) int32 each.

    window_pages: 0 where there is none. states: the snapshot after that page, 0 where there is none. Both are empty for
    a model without such layers.
    """

    first: int
    pages: np.ndarray
    window_pages: np.ndarray = NO_PAGES
    states: np.ndarray = NO_PAGES

    @property
    def num_pages(self) -> int:
        return self.pages.size

    @property
    def end(self) -> int:
        """The page index after its last."""
        return self.first + self.pages.size

    def ids(self) -> PageIds:
        """What is there, in order."""
        return PageIds(self.pages, self.window_pages[self.window_pages != 0], self.states[self.states != 0])

    def filled(self, ids: PageIds) -> Span:
        """The same pages in another tier, where they have `ids`: as many of each pool."""
        return Span(
            self.first, ids.pages, _filled(self.window_pages, ids.window_pages), _filled(self.states, ids.states)
        )

    def head(self, num_pages: int) -> Span:
        """Its first pages."""
        return Span(self.first, *(array[:num_pages] for array in self[1:]))


def _filled(places: np.ndarray, ids: np.ndarray) -> np.ndarray:
    filled = np.zeros_like(places)
    filled[places != 0] = ids
    return filled
