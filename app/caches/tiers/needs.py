"""Which pages of each pool a prefix needs to be usable, by counting. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.caches.tiers.span import Span
from app.core.sliding_window import first_needed_page
from app.core.transfers import PageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the components of a model ask of a prefix of so many pages, as the components of the tree do.

    window: W in tokens, None without sliding windows. has_states: whether there are recurrent layers.
    """

    page_size: int
    window: int | None = None
    has_states: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether full pages are all: then a prefix may end after any page."""
        return self.window is None and not self.has_states

    def first_window_page(self, num_pages: int) -> int:
        """Window pages from this index on; none without sliding windows."""
        if self.window is None:
            return num_pages
        return first_needed_page(num_pages * self.page_size, self.window, self.page_size)

    def usable_ends(self, span: Span, above: int) -> np.ndarray:
        """(n,) ascending: counts of pages, above `above`, of the prefixes that `span` could serve.

        It reaches back to the window pages of a prefix of above + 1 pages. O(pages of the span).
        """
        ends = np.arange(max(above, span.first) + 1, span.end + 1)
        usable = np.ones(ends.size, np.bool_)
        at = ends - 1 - span.first
        if self.window is not None:
            places = np.arange(span.first, span.end)
            last_hole = np.maximum.accumulate(np.where(span.window_pages == 0, places, span.first - 1))
            usable &= first_needed_page(ends * self.page_size, self.window, self.page_size) > last_hole[at]
        if self.has_states:
            usable &= span.states[at] != 0
        return ends[usable]

    def counts(self, end: int, first: int) -> PageCounts:
        """What a prefix of `end` pages takes where the one of its first `first` pages is there, usable."""
        window_pages = end - max(self.first_window_page(end), first)
        return PageCounts(end - first, window_pages, int(self.has_states))

    def part(self, span: Span, end: int, first: int) -> Span:
        """That, of `span`: page indexes first .. end - 1."""
        part = span.tail(first).head(end - max(span.first, first))
        return self.pruned(part, end)

    def pruned(self, part: Span, end: int) -> Span:
        """Without window pages and snapshots that a prefix of `end` pages, its own end, does not need."""
        windows, states = part.window_pages, part.states
        if self.window is not None:
            windows = windows.copy()
            windows[: max(self.first_window_page(end) - part.first, 0)] = 0
        if self.has_states:
            states = states.copy()
            states[:-1] = 0
        return Span(part.first, part.pages, windows, states)


class Lack(NamedTuple):
    """What one tier has of a prefix and the next one has not, nor gets yet.

    here: from the first page index that may be needed. present: full pages that are there.
    windows_there, states_there: as `here`, (n,) bool; whether the other has them.
    """

    here: Span
    present: int
    windows_there: np.ndarray
    states_there: np.ndarray

    def ends(self, needs: Needs, num_pages: int) -> np.ndarray:
        """(n,) ascending: the counts of pages, `num_pages` at most, of prefixes that could be made usable there."""
        ends = needs.usable_ends(self.here, min(self.present, num_pages - 1))
        return ends[ends <= num_pages]

    def part(self, needs: Needs, end: int) -> Span:
        """What is to go there so that the prefix of `end` pages is usable there, from the first thing that is."""
        if needs.is_plain:
            return self.here.head(end - self.here.first).tail(self.present)
        part = needs.pruned(self.here.head(end - self.here.first), end)
        pages = part.pages.copy()
        pages[: max(self.present - part.first, 0)] = 0
        windows, states = (
            np.where(there[: held.size], 0, held)
            for held, there in (
                (part.window_pages, self.windows_there),
                (part.states, self.states_there),
            )
        )
        return Span(part.first, pages, windows, states).trimmed()
