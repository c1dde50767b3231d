"""The prefix tree of the host tier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.caches.base import CacheDeps, InsertResult, LockReceipt
from app.caches.component_cache import ComponentCache
from app.caches.tree.core import NOTHING_PUBLISHED
from app.caches.tree.eviction import drop_upwards
from app.caches.tree.node import TreeNode
from app.caches.tree.reading import end_of, last_on_path, upwards_from
from app.core.keys import Namespace, RadixKey


class HostTree(ComponentCache):
    """A tree over the host pools. What it has and the device has too, by its owner's word, is *spare*: it goes first.

    So two tiers hold together nearly what one of their summed size would.
    """

    def __init__(self, deps: CacheDeps, seed: Callable[[Namespace], bytes]) -> None:
        super().__init__(deps, seed=seed)
        self._spare: dict[TreeNode, None] = {}  # in the order in which they go; perhaps some that are gone

    def refresh(self, key: RadixKey) -> InsertResult:
        """The longest usable prefix of `key` that is here, whole, as just used and no longer spare. O(len(key))."""
        num_pages = self.num_present(key)
        if not num_pages:
            return NOTHING_PUBLISHED
        none = np.zeros(num_pages, np.int32)
        found = self.insert(key.head(num_pages * self.page_size), none, none)
        for node in upwards_from(found.node):
            self._spare.pop(node, None)
        return found

    def hold(self, key: RadixKey) -> LockReceipt:
        """Keep the full pages of `key` that are here, usable or not, as just used. Give the receipt to `unlock`."""
        found = self.refresh(key)
        tree = self._tree()
        return tree.hold(last_on_path(tree, key) if self._pools else found.node)

    def spare(self, key: RadixKey) -> None:
        """All of `key`, if it is here and ends where a node ends, is in the tier above as well. O(len(key))."""
        for node in upwards_from(end_of(self._tree(), key)):
            self._spare[node] = None

    def drop(self, key: RadixKey) -> None:
        """Let go of the unlocked end of that path, as far as no longer prefix needs it. O(len(key))."""
        self._drop(end_of(self._tree(), key), self.token_allocator.capacity)

    def evict_spare(self, num_pages: int) -> int:
        """Free at least `num_pages`, or all that is spare and unlocked, the longest spare first. -> pages freed."""
        tree = self._tree()
        freed = 0
        while freed < num_pages and self._spare:
            node = next(iter(self._spare))
            del self._spare[node]
            if node.epoch == tree.receipts.epoch:
                freed += self._drop(node, node.pages.size)
        return freed

    def reset(self) -> None:
        super().reset()
        self._spare.clear()

    def _drop(self, node: TreeNode | None, num_pages: int) -> int:
        if node is None:
            return 0
        pages = drop_upwards(self._tree(), node, num_pages)
        self._free(pages)
        return int(pages.size)
