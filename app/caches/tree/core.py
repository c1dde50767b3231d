"""The prefix tree: which token prefixes are cached in which pages. RadixAttention, arXiv:2312.07104.

Ints and bytes only. It neither frees nor copies pages: it returns them, and its owner acts. Nothing here recurses.
What evicts from it is in eviction.py.
Every node has full pages; for what else a model needs, each component gives parts to some of the nodes (components/).

    roots[namespace] -- edge: 3 pages --+-- edge: 2 pages --- ...
                                        `-- edge: 1 page

What makes it quick: an edge is compared in place by one memcmp; a child is found by the bytes of its first page; one
order over all unlocked nodes makes eviction a pop; locking stops at the first ancestor that is locked already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from app.caches.base import NO_PAGES, EventSink, EvictionObserver, InsertResult, LockReceipt, MatchResult
from app.caches.receipts import ReceiptBook
from app.caches.tree.components.base import Offer, TreeComponent
from app.caches.tree.evicted import EvictionMemory
from app.caches.tree.node import EVICTED, TreeNode, make_as_urgent
from app.caches.tree.owned import OwnedIds
from app.caches.tree.place import Place, cut_to_usable, descend
from app.caches.tree.policies.order import EvictionOrder
from app.caches.tree.runs import joined, sealed, spans
from app.caches.tree.telling import announce, tell_eviction
from app.core.keys import TOKEN_BYTES, Namespace, RadixKey
from app.errors import StaleHandleError

_NOTHING = MatchResult(NO_PAGES, 0, None)
NOTHING_PUBLISHED = InsertResult(0, NO_PAGES, None, ())


class TreeCore:
    """Pages found by key, for one pool. Single-threaded.

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
        self._last_matched: RadixKey | None = None

    def match(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix, whole pages, at least one token short of the key. O(tokens + nodes on the path).

        May split the node in which it ends, and makes the path the most recently used; an unmatched rest of a split
        node keeps its age. Each node of the path counts a hit, but not again for the key object that was matched last:
        that is a request that still waits for room.
        """
        limit = self._limit(key.num_tokens - 1)
        root = self.roots.get(key.namespace)
        if root is None or limit <= 0:
            return _NOTHING
        place = descend(root, key.uncut, limit, self.page_bytes)
        node, end, partial, shared = self._usable(place) if self.components else place
        if partial is not None:
            node = self._split(partial, shared)
            end += shared * self.page_bytes
        if end == 0:
            return _NOTHING
        make_as_urgent(node, key.priority)
        hits = int(key is not self._last_matched)
        self._last_matched = key
        pages = joined(self._refresh(node, hits))
        named: dict[str, Any] = {}
        for component in self.components:
            named |= component.named(node)
        found = MatchResult(pages, end // TOKEN_BYTES, node, **named)
        self._note_given(found)
        return found

    def probe(self, key: RadixKey) -> int:
        """The number of tokens that `match` would return. Changes nothing."""
        limit = self._limit(key.num_tokens - 1)
        root = self.roots.get(key.namespace)
        if root is None or limit <= 0:
            return 0
        place = descend(root, key.uncut, limit, self.page_bytes)
        _, end, _, shared = self._usable(place) if self.components else place
        return end // TOKEN_BYTES + shared * self.page_size

    def lock(self, found: MatchResult | InsertResult) -> LockReceipt:
        """Keep its node, all above it, and of each component what the prefix needs; an empty match keeps nothing.

        May split one node for each component. O(nodes not locked yet, and nodes that hold what is needed).
        StaleHandleError if any of it was evicted, or is from before a reset.
        """
        node = found.node
        if node is None:
            return self.receipts.issue(None)
        if node.epoch != self.receipts.epoch:
            held = "evicted" if node.epoch == EVICTED else f"epoch {node.epoch}"
            raise StaleHandleError(what="match of", held=held, current=f"epoch {self.receipts.epoch}")
        for component in self.components:
            if found is not component.latest and not component.holds(found):  # what was given out last is there
                raise StaleHandleError(
                    what="match of", held=f"evicted {component.kind}", current=f"epoch {self.receipts.epoch}"
                )
        for component in self.components:
            component.isolate(node, self._split)
        self._pin(node)
        receipt = self.receipts.issue(node)
        for component in self.components:
            component.lock(receipt.number, node)
        return receipt

    def hold(self, node: TreeNode | None) -> LockReceipt:
        """Keep a node of this tree and all above it, full pages alone: for what is to come below.

        Give the receipt to `unlock`. O(nodes not locked yet).
        """
        if node is not None:
            self._pin(node)
        return self.receipts.issue(node)

    def unlock(self, receipt: LockReceipt) -> np.ndarray:
        """Undo one lock; what becomes unlocked counts as just used. StaleHandleError and no change for a stale one.

        -> (n,) int32, pages no longer the tree's: of nodes that only the lock kept. None without components.
        """
        node = self.receipts.redeem(receipt)
        if node is None:
            return NO_PAGES
        for component in self.components:
            component.unlock(receipt.number)
        self._unpin(node)
        return self.left(self.drop_useless(node, self.clock())) if self.components else NO_PAGES

    def insert(self, key: RadixKey, pages: np.ndarray, offers: Sequence[Offer] = ()) -> InsertResult:
        """Adopt the whole pages that are not there yet. O(tokens + nodes on the path).

        offers: one for each component, in the same order. Without what a component needs at the end of the key, the
        prefix is cut to the longest that every component could serve.
        OwnershipError and no change if something to adopt is in the tree already, under other tokens, or is page 0.
        """
        count = key.num_tokens // self.page_size
        if count == 0:
            return NOTHING_PUBLISHED
        if pages.size < count:
            raise ValueError(f"{pages.size} pages for a key of {count} whole pages")
        raw, namespace = key.uncut, key.namespace
        root = self.roots.get(namespace) or TreeNode.root(namespace, self.receipts.epoch)
        place = descend(root, raw, count * self.page_bytes, self.page_bytes)
        if offers:
            place, count = cut_to_usable(place, offers, count, self.page_size)
            if count == 0:
                return NOTHING_PUBLISHED
        node, end, partial, shared = place
        present = end // self.page_bytes + shared
        adopted = np.array(pages[present:count], np.int32)
        for offer in offers:
            offer.refuse(partial or node, present, count)
        if adopted.size:
            self.owned.adopt(self.owned.adoptable(adopted))
        if partial is not None:
            node = self._split(partial, shared)
        make_as_urgent(node, key.priority)
        before = node
        if adopted.size:
            begin = present
            for component in self.components:
                cut = component.front(begin, count)
                if cut > begin:
                    edge = raw[begin * self.page_bytes : cut * self.page_bytes]
                    node = self._attach(node, edge, adopted[: cut - begin], key.priority)
                    begin, adopted = cut, adopted[cut - begin :]
            node = self._attach(node, raw[begin * self.page_bytes : count * self.page_bytes], adopted, key.priority)
        for offer in offers:
            offer.adopt(node, self._split)
        if before is not node:
            for component in self.components:
                component.touch(before)  # where two prefixes part a third may part too
        runs = self._refresh(node, 0)
        named: dict[str, Any] = {}
        for offer in offers:
            named |= offer.named(node)
        published = InsertResult(count * self.page_size, joined(runs), node, spans(runs, present), **named)
        self._note_given(published)
        return published

    def reset(self) -> None:
        """Forget everything; receipts and matches from before are refused after. O(pool pages)."""
        self.receipts.void()
        self.order.clear()
        self.roots.clear()
        self.evicted.clear()
        self._last_matched = None
        self.owned.clear()
        for component in self.components:
            component.reset()
        self.evictable_pages = self.protected_pages = self.num_nodes = 0
        if self._events is not None:
            self._events.cleared()

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

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, a parent before its children. O(nodes)."""
        pending = list(self.roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    def _note_given(self, found: MatchResult | InsertResult) -> None:
        for component in self.components:
            component.latest = found

    def _lacks_a_part(self, node: TreeNode) -> bool:
        """A root has no parts and lacks none."""
        for component in self.components:
            if node not in component.parts:
                return node.parent is not None
        return False

    def _limit(self, num_tokens: int) -> int:
        """Bytes of the whole pages in `num_tokens`."""
        return num_tokens // self.page_size * self.page_bytes

    def _usable(self, place: Place) -> Place:
        """Cut to what every component can serve."""
        if place[2] is None and place[0].parent is None:
            return place
        return cut_to_usable(place, self.components, place[1] // self.page_bytes + place[3], self.page_size)[0]

    def _split(self, lower: TreeNode, num_pages: int) -> TreeNode:
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

    def _attach(self, parent: TreeNode, edge: bytes, pages: np.ndarray, priority: int) -> TreeNode:
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

    def _refresh(self, node: TreeNode, hits: int) -> list[np.ndarray]:
        """Make the path to `node` the most recent, deepest first, and add to its hits.

        -> the pages of its nodes, from the root down.
        """
        for component in self.components:
            component.touch(node)
        runs = []
        touch = self.order.touch
        now = self.clock()
        parent = node.parent
        while parent is not None:
            runs.append(node.pages)
            node.hits += hits
            node.used_at = now
            if not node.lock_ref:
                touch(node)
            node = parent
            parent = node.parent
        runs.reverse()
        return runs

    def _pin(self, node: TreeNode) -> None:
        while node.parent is not None:
            node.lock_ref += 1
            if node.lock_ref > 1:
                return
            self.order.remove(node)
            self.evictable_pages -= node.pages.size
            self.protected_pages += node.pages.size
            node = node.parent

    def _unpin(self, node: TreeNode) -> None:
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
