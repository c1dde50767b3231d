"""The prefix tree: which token prefixes are cached in which pages. RadixAttention, arXiv:2312.07104.

Ints and bytes only. It neither frees nor copies pages: it returns them, and its owner acts. Nothing here recurses.

    roots[namespace] -- edge: 3 pages --+-- edge: 2 pages --- ...
                                        `-- edge: 1 page

What makes it quick: an edge is compared in place by one memcmp; a child is found by the bytes of its first page; one
order over all unlocked nodes makes eviction a pop; locking stops at the first ancestor that is locked already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from app.caches.base import (
    EVICTED_HEAD_TOKENS,
    NO_PAGES,
    EventSink,
    EvictionObserver,
    InsertResult,
    LockReceipt,
    MatchResult,
)
from app.caches.receipts import ReceiptBook
from app.caches.tree.evicted import EvictionMemory
from app.caches.tree.lru import EvictionOrder
from app.caches.tree.node import EVICTED, TreeNode
from app.core.keys import TOKEN_BYTES, Namespace, RadixKey, page_hashes
from app.errors import OwnershipError, StaleHandleError


def _sealed(pages: np.ndarray) -> np.ndarray:
    """The tree hands out its own arrays, so nobody may write to them."""
    pages.setflags(write=False)
    return pages


_NOTHING = MatchResult(NO_PAGES, 0, None)


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
        events: EventSink | None = None,
        observer: EvictionObserver | None = None,
    ) -> None:
        """`capacity`: the pool's page ids are 1..capacity. `clock`: seconds that never go back."""
        self.evictable_pages = 0
        self.protected_pages = 0
        self.num_nodes = 0
        self.roots: dict[Namespace, TreeNode] = {}
        self.order = order
        self.receipts: ReceiptBook[TreeNode | None] = ReceiptBook()
        self.owned = np.zeros(capacity + 1, np.bool_)  # by page id: whether a node holds it
        self.owned[0] = True  # the padding page: never to be adopted
        self.evicted = EvictionMemory()
        self.page_size = page_size
        self.clock = clock
        self._page_bytes = page_size * TOKEN_BYTES
        self._events = events
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
        node, end, partial, shared = self.descend(root, key.raw, limit)
        if partial is not None:
            node = self._split(partial, shared)
            end += shared * self._page_bytes
        if end == 0:
            return _NOTHING
        hits = int(key is not self._last_matched)
        self._last_matched = key
        return MatchResult(_joined(self._refresh(node, hits)), end // TOKEN_BYTES, node)

    def probe(self, key: RadixKey) -> int:
        """The number of tokens that `match` would return. Changes nothing."""
        limit = self._limit(key.num_tokens - 1)
        root = self.roots.get(key.namespace)
        if root is None or limit <= 0:
            return 0
        _, end, _, shared = self.descend(root, key.raw, limit)
        return end // TOKEN_BYTES + shared * self.page_size

    def lock(self, node: TreeNode | None) -> LockReceipt:
        """Keep `node` and all above it; None, of an empty match, keeps nothing. O(nodes not locked yet).

        StaleHandleError if the node was evicted, or is from before a reset.
        """
        if node is not None:
            if node.epoch != self.receipts.epoch:
                held = "evicted" if node.epoch == EVICTED else f"epoch {node.epoch}"
                raise StaleHandleError(what="match of", held=held, current=f"epoch {self.receipts.epoch}")
            self._pin(node)
        return self.receipts.issue(node)

    def unlock(self, receipt: LockReceipt) -> None:
        """Undo one lock; what becomes unlocked counts as just used. StaleHandleError and no change for a stale one."""
        node = self.receipts.redeem(receipt)
        if node is not None:
            self._unpin(node)

    def insert(self, key: RadixKey, pages: np.ndarray) -> InsertResult:
        """Adopt the whole pages that are not there yet. O(tokens + nodes on the path).

        OwnershipError and no change if one of those is in the tree already, under other tokens, or is page 0.
        """
        count = key.num_tokens // self.page_size
        if count == 0:
            return InsertResult(0, NO_PAGES, None, ())
        if pages.size < count:
            raise ValueError(f"{pages.size} pages for a key of {count} whole pages")
        raw, namespace = key.raw, key.namespace
        limit = count * self._page_bytes
        node = self.roots.get(namespace)
        if node is None:
            node = self._new_root(namespace)
        node, end, partial, shared = self.descend(node, raw, limit)
        present = end // self._page_bytes + shared
        adopted = np.array(pages[present:count], np.int32)
        if adopted.size:
            self._claim(adopted)
        if partial is not None:
            node = self._split(partial, shared)
        if adopted.size:
            node = self._attach(node, raw[present * self._page_bytes : limit], adopted)
        runs = self._refresh(node, 0)
        return InsertResult(count * self.page_size, _joined(runs), node, _spans(runs, present))

    def evict(self, num_pages: int) -> np.ndarray:
        """Drop the least recently used leaves until `num_pages` or more are out, or nothing is unlocked.

        -> (n,) int32, the pages, no longer the tree's. O(nodes dropped).
        """
        runs: list[np.ndarray] = []
        hashes: list[bytes] = []
        freed = 0
        now = self.clock()
        while freed < num_pages and self.order:
            node = self.order.pop()
            if self._observer is not None:
                _tell_eviction(self._observer, node, now)
            self._detach(node, now)
            runs.append(node.pages)
            hashes += node.hashes
            freed += node.pages.size
        if not runs:
            return NO_PAGES
        self.evictable_pages -= freed
        pages = _joined(runs)
        self.owned[pages.astype(np.intp)] = False
        if self._events is not None:
            self._events.removed(page_hashes=hashes)
        return pages

    def reset(self) -> None:
        """Forget everything; receipts and matches from before are refused after. O(pool pages)."""
        self.receipts.void()
        self.order.clear()
        self.roots.clear()
        self.evicted.clear()
        self._last_matched = None
        self.owned[1:] = False
        self.evictable_pages = self.protected_pages = self.num_nodes = 0
        if self._events is not None:
            self._events.cleared()

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, a parent before its children. O(nodes)."""
        pending = list(self.roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    def page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """(evictable, protected) page ids, int32. O(pages)."""
        unlocked, locked = [NO_PAGES], [NO_PAGES]
        for node in self.nodes():
            (locked if node.lock_ref else unlocked).append(node.pages)
        return np.concatenate(unlocked), np.concatenate(locked)

    def _limit(self, num_tokens: int) -> int:
        """Bytes of the whole pages in `num_tokens`."""
        return num_tokens // self.page_size * self._page_bytes

    def descend(self, node: TreeNode, raw: bytes, limit: int) -> tuple[TreeNode, int, TreeNode | None, int]:
        """Follow raw[:limit] from a root. Changes nothing.

        -> the last node that matches whole, the byte position at its end, and, if the path ends inside an edge, that
        edge's node and how many of its pages match: at least one, not all.
        """
        step = self._page_bytes
        position = 0
        while position < limit:
            child = node.children.get(raw[position : position + step])
            if child is None:
                break
            edge = child.edge
            end = position + len(edge)
            if end > limit or not raw.startswith(edge, position):
                return node, position, child, self._shared_pages(raw, position, limit, edge)
            node, position = child, end
        return node, position, None, 0

    def _shared_pages(self, raw: bytes, position: int, limit: int, edge: bytes) -> int:
        """How many leading pages of `edge` are in raw[position:limit]; the first one is known to be."""
        count = min(len(edge), limit - position) // TOKEN_BYTES
        differs = np.frombuffer(raw, np.int32, count, position) != np.frombuffer(edge, np.int32, count)
        first = int(differs.argmax())
        return (first if differs[first] else count) // self.page_size

    def _split(self, lower: TreeNode, num_pages: int) -> TreeNode:
        """Put the first pages of a node into a new node above it. The lower one stays the object that it was."""
        cut = num_pages * self._page_bytes
        first_page = lower.edge[: self._page_bytes]
        parent = lower.parent
        assert parent is not None
        upper = TreeNode(
            parent=parent,
            namespace=lower.namespace,
            edge=lower.edge[:cut],
            pages=_sealed(lower.pages[:num_pages].copy()),
            epoch=lower.epoch,
            start=lower.start,
            serial=next(self._serials),  # the lower one still ends where it ended
            hits=lower.hits,
            used_at=lower.used_at,
        )
        lower.start += num_pages * self.page_size
        upper.hashes, lower.hashes = lower.hashes[:num_pages], lower.hashes[num_pages:]
        lower.edge, lower.pages, lower.parent = lower.edge[cut:], _sealed(lower.pages[num_pages:].copy()), upper
        upper.children[lower.edge[: self._page_bytes]] = lower
        parent.children[first_page] = upper
        self.num_nodes += 1
        if lower.lock_ref:
            upper.lock_ref = 1
        else:
            self.order.add(upper)
        return upper

    def _attach(self, parent: TreeNode, edge: bytes, pages: np.ndarray) -> TreeNode:
        """A new leaf. Its ancestors are refreshed after it, by the caller."""
        leaf = TreeNode(
            parent=parent,
            namespace=parent.namespace,
            edge=edge,
            pages=_sealed(pages),
            epoch=self.receipts.epoch,
            start=parent.end,
            serial=next(self._serials),
            hits=0,
            used_at=0.0,
        )
        if parent.parent is None:
            self.roots[parent.namespace] = parent
        parent.children[edge[: self._page_bytes]] = leaf
        self.num_nodes += 1
        self.evictable_pages += pages.size
        self.order.add(leaf)
        if self._events is not None:
            self._announce(self._events, parent, leaf)
        return leaf

    def _announce(self, events: EventSink, parent: TreeNode, leaf: TreeNode) -> None:
        above = parent.hashes[-1] if parent.hashes else None
        leaf.hashes = page_hashes(above or leaf.namespace.seed(), leaf.edge, self.page_size)
        events.stored(namespace=leaf.namespace, parent_hash=above, page_hashes=leaf.hashes, raw=leaf.edge)

    def _detach(self, leaf: TreeNode, now: float) -> None:
        """Cut a leaf off, and its root too if that was the last one."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        first_page = leaf.edge[: self._page_bytes]
        del parent.children[first_page]
        self.evicted.remember(parent.serial, first_page, now)
        leaf.epoch = EVICTED
        self.num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]

    def _claim(self, pages: np.ndarray) -> None:
        """Mark pages as owned. A page in two places would be freed by one and read by the other."""
        index = pages.astype(np.intp)  # once: numpy would do it for each use
        if self.owned.take(index).any():
            twice = pages[self.owned[index]].tolist()
            raise OwnershipError(pages=tuple(twice), reason="cached already under other tokens, or padding")
        self.owned[index] = True

    def _refresh(self, node: TreeNode, hits: int) -> list[np.ndarray]:
        """Make the path to `node` the most recent, deepest first, and add to its hits.

        -> the pages of its nodes, from the root down.
        """
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

    def _new_root(self, namespace: Namespace) -> TreeNode:
        return TreeNode(
            parent=None,
            namespace=namespace,
            edge=b"",
            pages=NO_PAGES,
            epoch=self.receipts.epoch,
            start=0,
            serial=namespace,
            hits=0,
            used_at=0.0,
        )

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


def _tell_eviction(observer: EvictionObserver, leaf: TreeNode, now: float) -> None:
    observer.evicted(
        num_tokens=len(leaf.edge) // TOKEN_BYTES,
        prefix_tokens=leaf.start,
        idle_s=now - leaf.used_at,
        hits=leaf.hits,
        head=leaf.edge[: EVICTED_HEAD_TOKENS * TOKEN_BYTES],
    )


def _joined(runs: list[np.ndarray]) -> np.ndarray:
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _spans(runs: list[np.ndarray], num_pages: int) -> tuple[tuple[int, int], ...]:
    """(first page index, page count) of each run within the first `num_pages` pages."""
    spans = []
    first = 0
    for run in runs:
        if first == num_pages:
            break
        spans.append((first, run.size))
        first += run.size
    return tuple(spans)
