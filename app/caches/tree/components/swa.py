"""The sliding-window component: window pages of a node's tokens, page for page, or none (a tombstone).

A query of a layer with window W sees W tokens, itself among them; so a prefix of m tokens can be used if the last
min(W, m) of them have their window pages. What is before that may be gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from app.caches.base import InsertResult, MatchResult
from app.caches.tree.components.base import Part, Split, TreeComponent, upwards
from app.caches.tree.node import TreeNode
from app.caches.tree.policies.order import EvictionOrder
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
        return max(0, node.end - self.window)

    def begin(self, node: TreeNode) -> int:
        return node.start

    def usable(self, path: Sequence[TreeNode], ends: Sequence[int]) -> list[bool]:
        return self.usable_with(_NEVER, path, ends)

    def usable_with(self, given_from: int, path: Sequence[TreeNode], ends: Sequence[int]) -> list[bool]:
        """As `usable`, if tokens from `given_from` on had the window pages that they lack."""
        parts, window = self.parts, self.window
        verdicts = []
        start = run = 0  # where the last run of tokens with window pages began: every hole begins a new one after it
        for node, end in zip_longest(path, ends):
            if node not in parts and given_from > start:
                run = min(given_from, end)
            verdicts.append(run == 0 or end - run >= window)
            start = end
        return verdicts

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

    def still_holds(self, found: MatchResult | InsertResult) -> bool:
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
        given = np.flatnonzero(pages)
        first = int(given[0]) if given.size else pages.size
        if given.size != pages.size - first:
            raise ValueError(f"window_pages has {pages.size - first - given.size} zeros after its first page")
        return WindowOffer(self, pages, first)

    def _needed(self, node: TreeNode) -> np.ndarray:
        """(n,) int32: the window pages that the prefix ending at `node` needs, which are all there."""
        runs = [self.parts[at].ids for at in upwards(node, self.reach(node))]
        runs.reverse()
        pages = runs[0] if len(runs) == 1 else np.concatenate(runs)
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

    def usable(self, path: Sequence[TreeNode], ends: Sequence[int]) -> list[bool]:
        return self.component.usable_with(self.first * self.component.page_size, path, ends)

    def refuse(self, node: TreeNode, present: int, count: int) -> None:
        page_size, parts = self.component.page_size, self.component.parts
        wanted = [self.pages[max(present, self.first) : count]]
        for at in upwards(node, self.first * page_size):
            if at not in parts:
                begin, end = at.start // page_size, min(at.end // page_size, present)
                wanted.append(self.pages[max(begin, self.first) : end])
        self.component.owned.refuse(np.concatenate(wanted))

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
        end = node.end // self.component.page_size
        pages = np.zeros(end, np.int32)
        for at in upwards(node, 0):
            part = self.component.parts.get(at)
            begin = end - at.pages.size
            if part is not None:
                pages[begin:end] = part.ids
            end = begin
        return {"window_pages": pages}
