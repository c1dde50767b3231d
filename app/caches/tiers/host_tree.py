"""The prefix tree of the host tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from app.caches.base import NOTHING_PUBLISHED, CacheDeps, InsertResult, LockReceipt
from app.caches.component_cache import ComponentCache
from app.caches.tree.eviction import drop_upwards
from app.caches.tree.node import TreeNode, make_as_urgent
from app.caches.tree.place import descend
from app.caches.tree.reading import end_of, upwards_from
from app.core.keys import Namespace, RadixKey

_LOOKED_AT = 32  # spare nodes, when room is made
_BELOW = 64  # nodes that may go with a spare one


class HostPlace(NamedTuple):
    """Where what is there of a key ends: after `num_pages` pages, at the end of `node` or within it. None: at a root.

    Good until anything is evicted.
    """

    node: TreeNode | None
    num_pages: int


_AT_A_ROOT = HostPlace(None, 0)


class HostTree(ComponentCache):
    """A tree over the host pools. What it has and the device has too, by its owner's word, is *spare*: it goes first.

    So two tiers hold together nearly what one of their summed size would.
    """

    def __init__(self, deps: CacheDeps, seed: Callable[[Namespace], bytes]) -> None:
        super().__init__(deps, seed=seed)
        self._spare: OrderedDict[TreeNode, None] = OrderedDict()  # the next to go first; perhaps some that are gone

    def place(self, key: RadixKey) -> HostPlace:
        """Where what is here of `key` ends. Changes nothing. O(len(key))."""
        tree = self._tree()
        root = tree.roots.get(key.namespace)
        if root is None:
            return _AT_A_ROOT
        limit = key.num_tokens // tree.page_size * tree.page_bytes
        node, end, partial, shared = descend(root, key.uncut, limit, tree.page_bytes)
        if partial is not None:
            return HostPlace(partial, end // tree.page_bytes + shared)
        return _AT_A_ROOT if end == 0 else HostPlace(node, end // tree.page_bytes)

    def is_there(self, place: HostPlace) -> bool:
        """Whether it is a place of this tree yet."""
        return place.node is not None and place.node.epoch == self._tree().receipts.epoch

    def refresh(self, key: RadixKey) -> InsertResult:
        """The longest usable prefix of `key` that is here, whole, as just used. O(len(key))."""
        num_pages = self.num_present(key)
        if not num_pages:
            return NOTHING_PUBLISHED
        none = np.zeros(num_pages, np.int32)
        return self.insert(key.head(num_pages * self.page_size), none, none)

    def touch(self, place: HostPlace, priority: int) -> bool:
        """All up to there as just used, in a tree of full pages. -> False, and no change, within a node. O(nodes).

        It is locked and unlocked, which counts as a use.
        """
        node = place.node
        if node is None or node.end != place.num_pages * self.page_size:
            return False
        tree = self._tree()
        make_as_urgent(node, priority)
        tree.unlock(tree.hold(node))
        return True

    def hold(self, place: HostPlace) -> LockReceipt:
        """Keep the full pages up to there, usable or not. Give the receipt to `unlock`. O(nodes not locked yet)."""
        return self._tree().hold(place.node)

    def spare(self, place: HostPlace, num_pages: int) -> None:
        """Nodes up to there that end within the first `num_pages` pages are spare now, the rest is not. O(nodes)."""
        spare, num_tokens = self._spare, num_pages * self.page_size
        node = place.node
        while node is not None and node.parent is not None:
            if node.end <= num_tokens:
                spare.setdefault(node, None)
            else:
                spare.pop(node, None)
            node = node.parent

    def nothing_spare(self) -> None:
        """The tier above has lost everything."""
        self._spare.clear()

    def drop(self, key: RadixKey) -> None:
        """Let go of the unlocked end of that path, as far as no longer prefix needs it. O(len(key))."""
        self._drop(end_of(self._tree(), key), self.token_allocator.capacity)

    def evict(self, num_pages: int) -> int:
        """And with a leaf the spare nodes above it that have nothing else below."""
        bared: list[TreeNode] = []

        def note_parent(leaf: TreeNode) -> None:
            self._spare.pop(leaf, None)
            parent = leaf.parent
            if parent is not None and parent in self._spare:
                bared.append(parent)

        freed = self._evict_pages(num_pages, note_parent)
        return freed + sum(self._drop_spare(node) for node in bared)

    def evict_spare(self, num_pages: int) -> int:
        """Free at least `num_pages`, or what is found quickly, the longest spare first. -> pages freed.

        A spare node keeps what is below it here alone. If that is fewer pages than are spare, all of it goes.
        """
        tree = self._tree()
        freed = 0
        for _ in range(min(len(self._spare), _LOOKED_AT)):
            if freed >= num_pages or not self._spare:
                break
            node = next(iter(self._spare))
            if node.epoch != tree.receipts.epoch:
                del self._spare[node]
                continue
            self._spare.move_to_end(node)
            for each in self._worth_less(node):
                freed += self._drop(each, each.pages.size)
            freed += self._drop_spare(node)
        return freed

    def reset(self) -> None:
        super().reset()
        self._spare.clear()

    def _worth_less(self, node: TreeNode) -> list[TreeNode]:
        """What is below a spare node, children first, if it can go and is less than what goes with it."""
        below: list[TreeNode] = []
        pending = list(node.children.values())
        while pending:
            each = pending.pop()
            if each.lock_ref or len(below) == _BELOW:
                return []
            below.append(each)
            pending.extend(each.children.values())
        lost = sum(each.pages.size for each in below if each not in self._spare)
        spare = sum(each.pages.size for each in self._kept_by(node)) + sum(each.pages.size for each in below) - lost
        return below[::-1] if lost < spare else []

    def _kept_by(self, node: TreeNode) -> Iterator[TreeNode]:
        """The spare nodes from `node` upwards that could go if nothing were below it."""
        for each in upwards_from(node):
            if each not in self._spare or each.lock_ref or (each is not node and len(each.children) > 1):
                return
            yield each

    def _drop_spare(self, node: TreeNode) -> int:
        """Drop it, if it is spare and a leaf, and then what is so above it. -> pages freed."""
        freed = 0
        if not node.children:
            for each in list(self._kept_by(node)):
                freed += self._drop(each, each.pages.size)
        return freed

    def _drop(self, node: TreeNode | None, num_pages: int) -> int:
        if node is None or node.epoch != self._tree().receipts.epoch:
            return 0  # with the last one below it, a component may have let go of it already
        self._spare.pop(node, None)
        pages = drop_upwards(self._tree(), node, num_pages)
        self._free(pages)
        return int(pages.size)
