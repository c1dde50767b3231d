"""The sliding-window component: window pages of a node's tokens, page for page, or none (a tombstone).

A query of a layer with window W sees W tokens, itself among them; so a prefix of m tokens can be used if the last
min(W, m) of them have their window pages. What is before that may be gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from app.caches.base import InsertResult, MatchResult
from app.caches.tree.components.base import Part, Split, TreeComponent, upwards
from app.caches.tree.node import TreeNode
from app.caches.tree.policies.order import EvictionOrder
from app.caches.tree.policies.unused_first import UnusedFirst
from app.caches.tree.runs import joined
from app.config.model_config import Component
from app.core.sliding_window import first_needed_page

_NEVER = 1 << 62  # tokens


class WindowComponent(TreeComponent):
    """Parts are window pages: as many as the node has full pages."""

    component = Component.SWA
    kind = "window page"

    def __init__(self, *, capacity: int, order: EvictionOrder, window: int, page_size: int) -> None:
        """`window`: W, in tokens."""
        self._order = UnusedFirst(order)
        super().__init__(capacity=capacity, order=self._order)
        self.window = window
        self.page_size = page_size

    def reach(self, node: TreeNode) -> int:
        return node.end - self.window

    def begin(self, node: TreeNode) -> int:
        return node.start

    def longest(self, node: TreeNode, present: int, end: int) -> int:
        return self.longest_with(_NEVER, node, present, end)

    def longest_with(self, given_from: int, node: TreeNode, present: int, end: int) -> int:
        """As `longest`, if tokens from `given_from` on had the window pages that they lack."""
        parts, window = self.parts, self.window
        if present < given_from and end - min(given_from, end) < window:
            end = present
        at, at_end = node, present
        while at_end > 0 and at_end > end - window:
            # What ends in a hole, or less than a window behind it, cannot be matched.
            if at.start < given_from and at not in parts and end - min(given_from, at_end) < window:
                end = at.start
            at_end = at.start
            assert at.parent is not None
            at = at.parent
        return end

    def isolate(self, node: TreeNode, split: Split) -> None:
        """Where the window begins far inside a node. Nearer to its front a split would hold back less than it costs:
        windows that begin all over a shared prefix would shatter it.
        """
        path = upwards(node, self.reach(node))
        if not path:
            return
        first, end = path[-1].start // self.page_size, node.end // self.page_size
        before = self.first_needed(end) - first
        if before > 0 and before >= end - first - before:
            split(path[-1], before)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        part = self.parts.get(lower)
        if part is None:
            return
        num_pages = upper.pages.size
        self.parts[upper] = Part(part.ids[:num_pages].copy(), part.lock_ref)
        part.ids = part.ids[num_pages:].copy()
        if part.lock_ref:
            return
        if upper.end <= self.reach(lower):
            self._order.split_unused(lower, upper)
        else:
            self._order.split(lower, upper)

    def pop(self) -> tuple[TreeNode, bool]:
        return self._order.pop_next()

    def enter(self, node: TreeNode) -> None:
        self._order.add_unused(node)

    def named(self, node: TreeNode) -> dict[str, Any]:
        pages = np.zeros(node.end // self.page_size, np.int32)
        needed = self._needed(node)
        pages[pages.size - needed.size :] = needed
        return {"window_pages": pages}

    def holds(self, found: MatchResult | InsertResult) -> bool:
        if any(node not in self.parts for node in upwards(found.node, self.reach(found.node))):
            return False
        needed, named = self._needed(found.node), found.window_pages
        count = min(needed.size, named.size)  # what an insert does not name, its caller has locked
        return named[named.size - count :].tobytes() == needed[needed.size - count :].tobytes()

    def misplaced(self) -> Iterator[str]:
        if self._order.num_pages != self.evictable:
            yield f"the order counts {self._order.num_pages} pages of {self.evictable} that could be evicted"
        for node, part in self.parts.items():
            if part.ids.size != node.pages.size:
                yield f"a node of {node.pages.size} pages has {part.ids.size} window pages"

    def offer(self, pages: np.ndarray, first_own: int, match_end: int) -> WindowOffer:
        """`pages`: (n,) int32 of the caller's window pages for a prefix; 0 for the first ones, which it has no more.

        first_own: those before this index are not the caller's to give. match_end: the page index at which a match of
        the same tokens would end. ValueError for a gap after its first page.
        """
        first = pages.size - int(np.count_nonzero(pages))
        if first and np.count_nonzero(pages[first:]) != pages.size - first:
            given = np.flatnonzero(pages)
            gaps = pages.size - int(given[0]) - given.size
            raise ValueError(f"window_pages has {gaps} zeros after its first page")
        return WindowOffer(self, pages, max(first, first_own), match_end)

    def first_needed(self, end: int) -> int:
        """The index of the first page that a prefix of `end` pages needs."""
        return first_needed_page(end * self.page_size, self.window, self.page_size)

    def _needed(self, node: TreeNode) -> np.ndarray:
        """(n,) int32: the window pages that the prefix ending at `node` needs, which are all there."""
        runs = [self.parts[at].ids for at in upwards(node, self.reach(node))]
        runs.reverse()
        pages = joined(runs)
        end = node.end
        count = end // self.page_size - self.first_needed(end // self.page_size)
        return pages[pages.size - count :]


class WindowOffer:
    """The window pages that an insert brings, of which the tree takes those of its tombstones."""

    __slots__ = ("_component", "_first", "_match_end", "_pages", "_wanted")

    def __init__(self, component: WindowComponent, pages: np.ndarray, first: int, match_end: int) -> None:
        """`pages`: (n,) int32, by page index; there are none before `first`."""
        self._component = component
        self._pages = pages
        self._first = first
        self._match_end = match_end
        self._wanted: np.ndarray | None = None  # what `refuse` found to be adoptable

    def longest(self, node: TreeNode, present: int, end: int) -> int:
        return self._component.longest_with(self._first * self._component.page_size, node, present, end)

    def refuse(self, node: TreeNode, present: int, count: int) -> None:
        component, pages, first = self._component, self._pages, self._first
        page_size, parts = component.page_size, component.parts
        wanted = [pages[max(present, first) : count]]
        for at in upwards(node, first * page_size):
            if at not in parts:
                begin, end = at.start // page_size, min(at.end // page_size, present)
                wanted.append(pages[max(begin, first) : end])
        self._wanted = component.owned.adoptable_once(joined(wanted))

    def front(self, first: int, end: int) -> int:
        """In front of what a match of the same tokens needs: it may end a page earlier, and need one more before."""
        return max(first, self._component.first_needed(min(end, self._match_end)))

    def adopt(self, node: TreeNode, split: Split) -> None:
        component, first = self._component, self._first
        page_size, parts = component.page_size, component.parts
        assert self._wanted is not None
        component.owned.adopt(self._wanted)
        taken = self._pages[first:].astype(np.int32)  # the caller goes on to write to its own
        for at in upwards(node, first * page_size):
            if at in parts:
                continue
            begin = at.start // page_size
            if begin < first:
                split(at, first - begin)  # `at` is the lower one
                begin = first
            component.give(at, taken[begin - first : at.end // page_size - first])

    def named(self, node: TreeNode, first: int) -> dict[str, Any]:
        parts, page_size = self._component.parts, self._component.page_size
        end = node.end // page_size - first
        pages = np.zeros(end, np.int32)
        for at in upwards(node, first * page_size):
            begin = end - at.pages.size
            if at in parts:
                pages[begin:end] = parts[at].ids
            end = begin
        return {"window_pages": pages}
