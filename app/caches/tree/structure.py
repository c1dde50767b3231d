"""What a tree is made of: how nodes come, divide, are locked and go, and the counts that follow them.

    roots[namespace] -- edge: 3 pages --+-- edge: 2 pages --- ...
                                        `-- edge: 1 page

One order over all unlocked nodes makes eviction a pop; locking stops at the first ancestor that is locked already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from app.caches.base import NO_PAGES, EventSink, EvictionObserver
from app.caches.receipts import ReceiptBook
from app.caches.tree.components.base import TreeComponent
from app.caches.tree.evicted import EvictionMemory
from app.caches.tree.node import EVICTED, TreeNode
from app.caches.tree.owned import OwnedIds
from app.caches.tree.policies.order import EvictionOrder
from app.caches.tree.runs import joined, sealed
from app.caches.tree.telling import announce, tell_eviction
from app.core.keys import TOKEN_BYTES, Namespace


class TreeStructure:
    """Nodes by namespace, for one pool. Single-threaded.

    evictable_pages, protected_pages: pages of unlocked and of locked nodes.
    num_nodes: without the roots.
    evicted: which pages left, and when.
    """

    def __init__(
        self,
        *,
        capacity: int,
        page_size: int,
        order: EvictionOrder,
        clock: Callable[[], float],
        components: Sequence[TreeComponent] = (),
        events: EventSink | None = None,
        seed: Callable[[Namespace], bytes] = Namespace.seed,
        observer: EvictionObserver | None = None,
    ) -> None:
        """`capacity`: the pool's page ids are 1..capacity. `clock`: seconds that never go back.

        seed: of a namespace, what starts the chain of page hashes that events name.
        """
        self.evictable_pages = 0
        self.protected_pages = 0
        self.num_nodes = 0
        self.roots: dict[Namespace, TreeNode] = {}
        self.order = order
        self.receipts: ReceiptBook[TreeNode | None] = ReceiptBook()
        self.owned = OwnedIds(capacity, "page")
        self.components = components
        self.evicted = EvictionMemory()
        self.page_size = page_size
        self.clock = clock
        self.page_bytes = page_size * TOKEN_BYTES
        self._events = events
        self._seed = seed
        self._observer = observer
        self._serials = itertools.count()

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, a parent before its children. O(nodes)."""
        pending = list(self.roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    def split(self, lower: TreeNode, num_pages: int) -> TreeNode:
        """Put the first pages of a node into a new node above it. The lower one stays the object that it was."""
        cut = num_pages * self.page_bytes
        first_page = lower.edge[: self.page_bytes]
        parent = lower.parent
        assert parent is not None
        upper = TreeNode(
            parent=parent,
            namespace=lower.namespace,
            edge=lower.edge[:cut],
            pages=sealed(lower.pages[:num_pages].copy()),
            epoch=lower.epoch,
            start=lower.start,
            serial=next(self._serials),  # the lower one still ends where it ended
            hits=lower.hits,
            used_at=lower.used_at,
            past_uses=lower.past_uses,
            priority=lower.priority,
        )
        lower.start += num_pages * self.page_size
        upper.hashes, lower.hashes = lower.hashes[:num_pages], lower.hashes[num_pages:]
        lower.edge, lower.pages, lower.parent = lower.edge[cut:], sealed(lower.pages[num_pages:].copy()), upper
        upper.children[lower.edge[: self.page_bytes]] = lower
        parent.children[first_page] = upper
        self.num_nodes += 1
        if lower.lock_ref:
            upper.lock_ref = 1
        else:
            self.order.split(lower, upper)
        for component in self.components:
            component.split(upper, lower)
        return upper

    def attach(self, parent: TreeNode, edge: bytes, pages: np.ndarray, priority: int) -> TreeNode:
        """A new leaf. Its ancestors are refreshed after it, by the caller."""
        first_page = edge[: self.page_bytes]
        uses = self.evicted.uses(parent.serial, first_page)
        leaf = TreeNode(
            parent=parent,
            namespace=parent.namespace,
            edge=edge,
            pages=sealed(pages),
            epoch=self.receipts.epoch,
            start=parent.end,
            serial=next(self._serials),
            past_uses=uses if parent.parent is None else min(uses, parent.uses),
            priority=priority,
        )
        if parent.parent is None:
            self.roots[parent.namespace] = parent
        parent.children[first_page] = leaf
        self.num_nodes += 1
        self.evictable_pages += pages.size
        self.order.add(leaf)
        if self._events is not None:
            announce(self._events, parent, leaf, self._seed, self.page_size)
        return leaf

    def pin(self, node: TreeNode) -> None:
        """One more receipt on a node. Stops at the first ancestor that is locked already."""
        while node.parent is not None:
            node.lock_ref += 1
            if node.lock_ref > 1:
                return
            self.order.remove(node)
            self.evictable_pages -= node.pages.size
            self.protected_pages += node.pages.size
            node = node.parent

    def unpin(self, node: TreeNode) -> None:
        """One less; what becomes unlocked was just used."""
        now = self.clock()
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref:
                return
            node.used_at = now
            self.order.add(node)
            self.evictable_pages += node.pages.size
            self.protected_pages -= node.pages.size
            node = node.parent

    def cut_off(self, leaf: TreeNode, now: float) -> None:
        """Cut off a leaf that is out of the order already, and its root if that was the last one. `left` follows."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        if self._observer is not None:
            tell_eviction(self._observer, leaf, now)
        first_page = leaf.edge[: self.page_bytes]
        del parent.children[first_page]
        self.evicted.remember(parent.serial, first_page, now, leaf.uses)
        leaf.epoch = EVICTED
        self.num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]
        for component in self.components:
            component.drop(leaf)

    def drop_useless(self, node: TreeNode | None, now: float) -> list[TreeNode]:
        """Drop `node`, and then those above it, while it is an unlocked leaf that lacks a part: none could match it."""
        dropped = []
        while node is not None and not node.children and not node.lock_ref and self._lacks_a_part(node):
            self.order.remove(node)
            self.cut_off(node, now)
            dropped.append(node)
            node = node.parent
        return dropped

    def left(self, dropped: list[TreeNode]) -> np.ndarray:
        """(n,) int32: the pages of nodes that were cut off, which are the tree's no more."""
        if not dropped:
            return NO_PAGES
        pages = joined([node.pages for node in dropped])
        self.evictable_pages -= pages.size
        self.owned.release(pages)
        if self._events is not None:
            self._events.removed(page_hashes=[each for node in dropped for each in node.hashes])
        return pages

    def _lacks_a_part(self, node: TreeNode) -> bool:
        """A root has no parts and lacks none."""
        for component in self.components:
            if node not in component.parts:
                return node.parent is not None
        return False
