"""Prefixes that wait for the copy of what the tier below lacks of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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
    due: while it is young, the plan at which it is ready; else 0.
    """

    key: RadixKey
    node: TreeNode | None = None
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    num_begun: int = 0
    due: int = 0

    def span(self, first: int) -> Span:
        """Of `pages`, from page index `first` on."""
        return Span(first, self.pages[first:])


class Offers:
    """In order of waiting. A prefix takes the place of a shorter one of it that waits, so that both are one copy.

        added --> young -- continued, or after `patience` plans --> ready --> taken

    Young ones wait for what continues them, as an answer does its prompt: a copy costs control nearly as much for a few
    pages as for many. If they are evicted meanwhile, they are copied for that.
    """

    def __init__(self, *, patience: int | None) -> None:
        """patience: in plans.

        None: nothing takes another's place, for where a longer prefix is usable the shorter one need not be.
        """
        self._patience = patience
        self._ready: deque[Offer] = deque()
        self._young: deque[Offer] = deque()  # the next that is due first; perhaps some that are ready
        self._num_young = 0
        self._plan = 1
        self._at: dict[TreeNode, Offer] = {}  # all whose place another can take

    def __len__(self) -> int:
        return len(self._ready) + self._num_young

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def add(self, key: RadixKey, node: TreeNode, pages: np.ndarray) -> bool:
        """-> False if there are too many. O(nodes above it)."""
        above: TreeNode | None = node if self._at else None
        while above is not None:
            shorter = self._at.pop(above, None)
            if shorter is not None:
                shorter.key, shorter.node, shorter.pages = key, node, pages
                self._at[node] = shorter
                self._ripen(shorter)
                return True
            above = above.parent
        if len(self) >= MAX_OFFERS:
            return False
        offer = Offer(key, node, pages)
        if self._patience:
            offer.due = self._plan + self._patience
            self._young.append(offer)
            self._num_young += 1
        else:
            self._ready.append(offer)
        self._note(offer)
        return True

    def next_plan(self) -> None:
        """O(those that have waited long enough)."""
        self._plan += 1
        while self._young and self._young[0].due <= self._plan:
            self._ripen(self._young.popleft())

    def ripen(self) -> None:
        """Nothing is to be waited for."""
        while self._young:
            self._ripen(self._young.popleft())

    def take(self) -> Offer:
        """The one that is ready and waits longest."""
        offer = self._ready.popleft()
        if offer.node is not None:
            self._at.pop(offer.node, None)
        return offer

    def put_last(self, offer: Offer) -> None:
        """It goes on waiting, and is ready."""
        self._ready.append(offer)
        self._note(offer)

    def put_first(self, *offers: Offer) -> None:
        """They go on waiting, are ready, and are taken before all others, the first of them first."""
        self._ready.extendleft(reversed(offers))
        for offer in offers:
            self._note(offer)

    def start_anew(self) -> None:
        """Nothing was copied of any of them."""
        for offer in self:
            offer.num_begun = 0

    def forget_from(self, key: RadixKey) -> None:
        """Those that continue `key`. O(all)."""
        left = [each for each in self if each.key.namespace != key.namespace or not each.key.uncut.startswith(key.raw)]
        self.clear()
        for offer in left:
            offer.due = 0
            self.put_last(offer)

    def clear(self) -> None:
        self._ready.clear()
        self._young.clear()
        self._num_young = 0
        self._at.clear()

    def __iter__(self) -> Iterator[Offer]:
        """The ready ones first."""
        yield from self._ready
        yield from (each for each in self._young if each.due)

    def _ripen(self, offer: Offer) -> None:
        if offer.due:
            offer.due = 0
            self._num_young -= 1
            self._ready.append(offer)

    def _note(self, offer: Offer) -> None:
        if self._patience is not None and offer.node is not None:
            self._at[offer.node] = offer
