"""The prefix tree: which token prefixes are cached in which pages. RadixAttention, arXiv:2312.07104.

Ints and bytes only. It neither frees nor copies pages: it returns them, and its owner acts. Nothing here recurses.
How its nodes come and go is in structure.py, what evicts from it in eviction.py.
Every node has full pages; for what else a model needs, each component gives parts to some of the nodes (components/).

What makes it quick: an edge is compared in place by one memcmp; a child is found by the bytes of its first page; who
publishes more of a prefix that it has locked begins at the end of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.caches.base import NO_PAGES, InsertResult, LockReceipt, MatchResult
from app.caches.tree.components.base import Offer
from app.caches.tree.node import EVICTED, TreeNode, make_as_urgent
from app.caches.tree.place import Place, cut_to_usable, descend
from app.caches.tree.runs import joined, spans
from app.caches.tree.structure import TreeStructure
from app.core.keys import TOKEN_BYTES, RadixKey
from app.errors import OwnershipError, StaleHandleError

_NOTHING = MatchResult(NO_PAGES, 0, None)


class TreeCore(TreeStructure):
    """Pages found by key."""

    _last_matched: RadixKey | None = None

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
            node = self.split(partial, shared)
            end += shared * self.page_bytes
        if end == 0:
            return _NOTHING
        make_as_urgent(node, key.priority)
        hits = int(key is not self._last_matched)
        self._last_matched = key
        pages = joined(self._refresh(node, root, hits))
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
        self._require_there(found)
        for component in self.components:
            component.isolate(node, self.split)
        self.pin(node)
        receipt = self.receipts.issue(node)
        for component in self.components:
            component.lock(receipt.number, node)
        return receipt

    def relock(self, receipt: LockReceipt, found: InsertResult) -> None:
        """The receipt keeps that prefix, which continues the one that it kept: `lock` it and `unlock` the other.

        O(nodes between them, and nodes that hold what either needs). StaleHandleError as both, ValueError for a prefix
        that does not continue it; no change then.
        """
        before, node = self.receipts.held_by(receipt), found.node
        if node is before:
            return
        _require_below(node, before)
        self._require_there(found)
        for component in self.components:
            component.isolate(node, self.split)
        self.pin(node)
        for component in self.components:
            component.relock(receipt.number, node)
        if before is not None:
            before.lock_ref -= 1  # what is below is locked, so this stays locked
        self.receipts.move(receipt, node)

    def hold(self, node: TreeNode | None) -> LockReceipt:
        """Keep a node of this tree and all above it, full pages alone: for what is to come below.

        Give the receipt to `unlock`. O(nodes not locked yet).
        """
        if node is not None:
            self.pin(node)
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
        self.unpin(node)
        return self.left(self.drop_useless(node, self.clock())) if self.components else NO_PAGES

    def insert(
        self, key: RadixKey, pages: np.ndarray, offers: Sequence[Offer] = (), locked: TreeNode | None = None
    ) -> InsertResult:
        """Adopt the whole pages that are not there yet. O(tokens + nodes on the path), of those behind `locked`.

        offers: one for each component, in the same order. Without what a component needs at the end of the key, the
        prefix is cut to the longest that every component could serve.
        locked: the end of a prefix of `key` that the caller has locked; of that, only its last node is compared.
        OwnershipError and no change if something to adopt is in the tree already, under other tokens, or is page 0; or
        if what is locked has other tokens.
        """
        count = key.num_tokens // self.page_size
        first = 0 if locked is None else locked.end // self.page_size
        if count <= first:
            return InsertResult(first * self.page_size, NO_PAGES, locked, (), first)
        if pages.size < count:
            raise ValueError(f"{pages.size} pages for a key of {count} whole pages")
        raw, namespace = key.uncut, key.namespace
        if locked is not None and not locked.is_passed_by(raw, namespace):
            raise OwnershipError(pages=tuple(locked.pages.tolist()), reason="page: locked under other tokens")
        above = locked or self.roots.get(namespace) or TreeNode.root(namespace, self.receipts.epoch)
        place = descend(above, raw, count * self.page_bytes, self.page_bytes)
        if offers:
            place, count = cut_to_usable(place, offers, count, self.page_size)
            if count <= first:
                return InsertResult(first * self.page_size, NO_PAGES, locked, (), first)
        node, end, partial, shared = place
        present = end // self.page_bytes + shared
        adopted = pages[present:count].astype(np.int32)
        for offer in offers:
            offer.refuse(partial or node, present, count)
        if adopted.size:
            self.owned.adopt(self.owned.adoptable(adopted))
        if partial is not None:
            node = self.split(partial, shared)
        make_as_urgent(node, key.priority)
        before = node
        if adopted.size:
            begin = present
            for offer in offers:
                cut = offer.front(begin, count)
                if cut > begin:
                    edge = raw[begin * self.page_bytes : cut * self.page_bytes]
                    node = self.attach(node, edge, adopted[: cut - begin], key.priority)
                    begin, adopted = cut, adopted[cut - begin :]
            node = self.attach(node, raw[begin * self.page_bytes : count * self.page_bytes], adopted, key.priority)
        for offer in offers:
            offer.adopt(node, self.split)
        if before is not node and before is not locked:
            for component in self.components:
                component.touch(before)  # where two prefixes part a third may part too
        runs = self._refresh(node, above, 0)
        named: dict[str, Any] = {}
        for offer in offers:
            named |= offer.named(node, first)
        there = spans(runs, first, present)
        published = InsertResult(count * self.page_size, joined(runs), node, there, first, **named)
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

    def _note_given(self, found: MatchResult | InsertResult) -> None:
        for component in self.components:
            component.latest = found

    def _limit(self, num_tokens: int) -> int:
        """Bytes of the whole pages in `num_tokens`."""
        return num_tokens // self.page_size * self.page_bytes

    def _usable(self, place: Place) -> Place:
        """Cut to what every component can serve."""
        if place[2] is None and place[0].parent is None:
            return place
        return cut_to_usable(place, self.components, place[1] // self.page_bytes + place[3], self.page_size)[0]

    def _require_there(self, found: MatchResult | InsertResult) -> None:
        """StaleHandleError if a part of it was evicted, or it is from before a reset."""
        node = found.node
        if node.epoch != self.receipts.epoch:
            held = "evicted" if node.epoch == EVICTED else f"epoch {node.epoch}"
            raise StaleHandleError(what="match of", held=held, current=f"epoch {self.receipts.epoch}")
        for component in self.components:
            if found is not component.latest and not component.holds(found):  # what was given out last is there
                raise StaleHandleError(
                    what="match of", held=f"evicted {component.kind}", current=f"epoch {self.receipts.epoch}"
                )

    def _refresh(self, node: TreeNode, above: TreeNode, hits: int) -> list[np.ndarray]:
        """Make the path from `above`, a root or locked, to `node` the most recent, deepest first, and add to its hits.

        -> the pages of its nodes, from the top down, without those of `above`.
        """
        for component in self.components:
            component.touch(node)
        runs = []
        touch = self.order.touch
        now = self.clock()
        while node is not above:
            runs.append(node.pages)
            node.hits += hits
            node.used_at = now
            if not node.lock_ref:
                touch(node)
            assert node.parent is not None
            node = node.parent
        runs.reverse()
        return runs


def _require_below(node: TreeNode | None, above: TreeNode | None) -> None:
    if above is None:
        return
    at = node
    while at is not None and at.end > above.end:
        at = at.parent
    if at is not above:
        end = 0 if node is None else node.end
        raise ValueError(f"a prefix of {end} tokens does not continue the {above.end} that the receipt keeps")
