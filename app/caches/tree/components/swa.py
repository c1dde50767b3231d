"""The sliding-window component: window pages of a node's tokens, page for page, or none (a tombstone).

A query of a layer with window W sees W tokens, itself among them; so a prefix of m tokens can be used if the last
min(W, m) of them have their window pages. What is before that may be gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.caches.base import InsertResult, MatchResult
from app.caches.tree.components.base import Part, Split, TreeComponent, upwards
from app.caches.tree.node import TreeNode
from app.caches.tree.policies.order import EvictionOrder
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
        super().__init__(capacity=capacity, order=order)
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
        at_end = present
        for at in upwards(node, 0):
            if at_end <= end - window:
                break
            # What ends in a hole, or less than a window behind it, cannot be matched.
            if at.start < given_from and at not in parts and end - min(given_from, at_end) < window:
                end = at.start
            at_end = at.start
        return end

    def isolate(self, node: TreeNode, split: Split) -> None:
        """Where the window begins far inside a node. Nearer to its front a split would hold back less than it costs:
        windows that begin all over a shared prefix would shatter it.
        """
        first_page = first_needed_page(node.end, self.window, self.page_size)
        num_needed = node.end // self.page_size - first_page
        for at in upwards(node, self.reach(node)):
            before = first_page - at.start // self.page_size
            if before >= num_needed:
                split(at, before)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        part = self.parts.get(lower)
        if part is None:
            return
        num_pages = upper.pages.size
        self.parts[upper] = Part(part.ids[:num_pages].copy(), part.lock_ref)
        part.ids = part.ids[num_pages:].copy()
        if not part.lock_ref:
            self.order.split(lower, upper)

    def named(self, node: TreeNode) -> dict[str, Any]:
        pages = np.zeros(node.end // self.page_size, np.int32)
        needed = self._needed(node)
        pages[pages.size - needed.size :] = needed
        return {"window_pages": pages}

    def holds(self, found: MatchResult | InsertResult) -> bool:
        if any(node not in self.parts for node in upwards(found.node, self.reach(found.node))):
            return False
        needed = self._needed(found.node)
        return found.window_pages[found.pages.size - needed.size :].tobytes() == needed.tobytes()

    def misplaced(self) -> Iterator[str]:
        for node, part in self.parts.items():
            if part.ids.size != node.pages.size:
                yield f"a node of {node.pages.size} pages has {part.ids.size} window pages"

    def offer(self, pages: np.ndarray) -> WindowOffer:
        """`pages`: (n,) int32 of the caller's window pages for a prefix; 0 for the first ones, which it has no more.

        ValueError for a gap after its first page.
        """
        first = pages.size - int(np.count_nonzero(pages))
        if first and np.count_nonzero(pages[first:]) != pages.size - first:
            given = np.flatnonzero(pages)
            gaps = pages.size - int(given[0]) - given.size
            raise ValueError(f"window_pages has {gaps} zeros after its first page")
        return WindowOffer(self, pages, first)

    def _needed(self, node: TreeNode) -> np.ndarray:
        """(n,) int32: the window pages that the prefix ending at `node` needs, which are all there."""
        runs = [self.parts[at].ids for at in upwards(node, self.reach(node))]
        runs.reverse()
        pages = joined(runs)
        end = node.end
        count = end // self.page_size - first_needed_page(end, self.window, self.page_size)
        return pages[pages.size - count :]


@dataclass(slots=True)
class WindowOffer:
    """The window pages that an insert brings, of which the tree takes those of its tombstones.

    pages: (n,) int32, by page index; there are none before `first`.
    """

    component: WindowComponent
    pages: np.ndarray
    first: int

    def longest(self, node: TreeNode, present: int, end: int) -> int:
        return self.component.longest_with(self.first * self.component.page_size, node, present, end)

    def refuse(self, node: TreeNode, present: int, count: int) -> None:
        page_size, parts = self.component.page_size, self.component.parts
        wanted = [self.pages[max(present, self.first) : count]]
        for at in upwards(node, self.first * page_size):
            if at not in parts:
                begin, end = at.start // page_size, min(at.end // page_size, present)
                wanted.append(self.pages[max(begin, self.first) : end])
        self.component.owned.refuse(joined(wanted))

    def adopt(self, node: TreeNode, split: Split) -> None:
        page_size, parts = self.component.page_size, self.component.parts
        for at in upwards(node, self.first * page_size):
            if at in parts:
                continue
            begin = at.start // page_size
            if begin < self.first:
                split(at, self.first - begin)  # `at` is the lower one
                begin = self.first
            self.component.give(at, self.pages[begin : at.end // page_size].astype(np.int32))

    def named(self, node: TreeNode) -> dict[str, Any]:
        parts, end = self.component.parts, node.end // self.component.page_size
        pages = np.zeros(end, np.int32)
        for at in upwards(node, 0):
            begin = end - at.pages.size
            if at in parts:
                pages[begin:end] = parts[at].ids
            end = begin
        return {"window_pages": pages}
