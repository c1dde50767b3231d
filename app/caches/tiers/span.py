"""What one tier holds of some consecutive pages of a prefix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from app.caches.base import NO_PAGES
from app.core.transfers import PageCounts, PageIds


class Span(NamedTuple):
    """Page indexes first .. first + num_pages - 1 of a prefix, (num_pages,) int32 each.

    pages: 0 where the page itself is not meant, because it is where it should be already.
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
        if not (self.window_pages.size or self.states.size):
            return PageIds(_nonzero(self.pages))
        return PageIds(_nonzero(self.pages), _nonzero(self.window_pages), _nonzero(self.states))

    def counts(self) -> PageCounts:
        """How many ids that is."""
        return PageCounts(*(int(np.count_nonzero(array)) for array in self[1:]))

    def filled(self, ids: PageIds) -> Span:
        """The same pages in another tier, where they have `ids`: as many of each pool."""
        return Span(
            self.first,
            _filled(self.pages, ids.pages),
            _filled(self.window_pages, ids.window_pages),
            _filled(self.states, ids.states),
        )

    def head(self, num_pages: int) -> Span:
        """Its first pages."""
        if num_pages >= self.pages.size:
            return self
        return Span(self.first, *(array[:num_pages] for array in self[1:]))

    def tail(self, first: int) -> Span:
        """What of it is at page index `first` and after."""
        skipped = first - self.first
        if skipped <= 0:
            return self
        return Span(self.first + skipped, *(array[skipped:] for array in self[1:]))

    def trimmed(self) -> Span:
        """From the first page index on that has anything."""
        if self.pages.size and self.pages[0]:
            return self
        anything = np.flatnonzero(np.any([array != 0 for array in self[1:] if array.size], axis=0))
        return self.tail(self.first + int(anything[0]) if anything.size else self.end)

    def without(self, other: Span) -> PageIds:
        """Its ids that `other`, of the same tier and of any page indexes, does not have."""
        return PageIds(
            *(
                mine[~np.isin(mine, theirs, assume_unique=True)]
                for mine, theirs in zip(self.ids(), other.ids(), strict=True)
            )
        )


def _nonzero(places: np.ndarray) -> np.ndarray:
    return places if np.count_nonzero(places) == places.size else places[places != 0]


def _filled(places: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if ids.size == places.size:
        return ids
    filled = np.zeros_like(places)
    filled[places != 0] = ids
    return filled
