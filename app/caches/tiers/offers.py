"""Prefixes that wait for the copy of what the tier below lacks of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from app.caches.base import NO_PAGES
from app.caches.tiers.span import Span
from app.caches.tree.node import TreeNode
from app.core.keys import RadixKey

MAX_OFFERS = 1024


@dataclass(slots=True)
class Offer:
    """node: of the device's tree, at whose end `key` ended when it was offered; None where that is not known.

    pages: (n,) int32, of all of `key` on the device, as long as that node is there.
    num_begun: pages of `key` that were copied for it already, or are about to be.
    """

    key: RadixKey
    node: TreeNode | None = None
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    num_begun: int = 0

    def span(self, first: int) -> Span:
        """Of `pages`, from page index `first` on."""
        return Span(first, self.pages[first:])


class Offers:
    """In order of waiting. A prefix takes the place of a shorter one of it that waits, so that both are one copy: it
    costs control nearly as much for a few pages as for many.
    """

    def __init__(self, *, covers_shorter: bool) -> None:
        """covers_shorter: where a prefix is usable, all shorter ones are; else none takes another's place."""
        self._covers_shorter = covers_shorter
        self._waiting: deque[Offer] = deque()
        self._at: dict[TreeNode, Offer] = {}  # all whose place another can take

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: RadixKey, node: TreeNode, pages: np.ndarray) -> bool:
        """-> False if there are too many. O(nodes above it)."""
        above: TreeNode | None = node if self._at else None
        while above is not None:
            shorter = self._at.pop(above, None)
            if shorter is not None:
                shorter.key, shorter.node, shorter.pages = key, node, pages
                self._at[node] = shorter
                return True
            above = above.parent
        if len(self._waiting) >= MAX_OFFERS:
            return False
        self.put_last(Offer(key, node, pages))
        return True

    def take(self) -> Offer:
        """The one that waits longest."""
        offer = self._waiting.popleft()
        if offer.node is not None:
            self._at.pop(offer.node, None)
        return offer

    def put_last(self, offer: Offer) -> None:
        """It goes on waiting."""
        self._waiting.append(offer)
        self._note(offer)

    def put_first(self, *offers: Offer) -> None:
        """They go on waiting and are taken before all others, the first of them first."""
        self._waiting.extendleft(reversed(offers))
        for offer in offers:
            self._note(offer)

    def start_anew(self) -> None:
        """Nothing was copied of any of them."""
        for offer in self._waiting:
            offer.num_begun = 0

    def forget_from(self, key: RadixKey) -> None:
        """Those that continue `key`. O(all)."""
        left = [
            each
            for each in self._waiting
            if each.key.namespace != key.namespace or not each.key.uncut.startswith(key.raw)
        ]
        self.clear()
        for offer in left:
            self.put_last(offer)

    def clear(self) -> None:
        self._waiting.clear()
        self._at.clear()

    def _note(self, offer: Offer) -> None:
        if self._covers_shorter and offer.node is not None:
            self._at[offer.node] = offer
