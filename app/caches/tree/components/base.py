"""What a tree holds for a model beside its full pages: the contract of a component, and what all of them share.

Full pages name the places of the tree, so every node has them: they are the tree itself, TreeCore. A component adds a
part of its own to some of the nodes, from a pool of its own:

    tokens      0 ---------- 8 ---------- 16 ---- 20       nodes of 2, 2 and 1 pages
    full          1  2         3  4         5              always
    SWA           -            7  8         9              window pages; "-" is a tombstone: the window went on, or
                                                           they were evicted
    RECURRENT               -            2       6         snapshots, of exactly the tokens before them

A prefix that ends at a node *needs* the parts from token `reach` to that end; a match may use it if they are all there.
What a request locks is what its prefix needs, so parts before it can be evicted under it, and prefixes get holes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from app.caches.base import NO_PAGES, InsertResult, MatchResult
from app.caches.tree.node import TreeNode
from app.caches.tree.owned import OwnedIds
from app.caches.tree.policies.order import EvictionOrder
from app.caches.tree.runs import joined
from app.config.model_config import Component

Split = Callable[[TreeNode, int], TreeNode]  # TreeCore's: puts the first pages of a node into a new one above it


class Judge(Protocol):
    def longest(self, node: TreeNode, present: int, end: int) -> int:
        """How long a prefix of at most `end` tokens can be that has all that it needs of one component.

        present: the path has so many tokens, the last of them in `node`, or at its end; an insert would bring those
            from there to `end`.
        -> `end`, `present`, or where a node of the path begins: whichever of these is the longest that could be
        matched. O(nodes that hold what it needs, and those left behind).
        """
        ...


class Offer(Judge, Protocol):
    """What an insert brings for one component; it judges what could be matched after that."""

    def refuse(self, node: TreeNode, present: int, count: int) -> None:
        """OwnershipError if something that `adopt` would take is the tree's already, elsewhere. Changes nothing.

        node: the last on the path that is there now, of which `present` pages are on the path; `count` will be.
        """
        ...

    def front(self, first: int, end: int) -> int:
        """Where new pages first .. end - 1 of one path are best divided, so that a lock of it keeps little more.

        -> a page index; `first` if they are best kept in one node.
        """
        ...

    def adopt(self, node: TreeNode, split: Split) -> None:
        """Give the nodes of the path that ends at `node` the parts that they lack. May split one of them."""
        ...

    def named(self, node: TreeNode, first: int) -> dict[str, Any]:
        """The component's own fields of the InsertResult for the prefix that ends at `node`, from page `first` on."""
        ...


class Part:
    """What one node holds of a component.

    ids: (n,) int32. lock_ref: receipts that need it.
    """

    __slots__ = ("ids", "lock_ref")

    def __init__(self, ids: np.ndarray, lock_ref: int = 0) -> None:
        self.ids = ids
        self.lock_ref = lock_ref


class TreeComponent(ABC):
    """The parts that nodes hold of one component; which node has none is known by its absence. Single-threaded.

    It frees nothing: what it lets go of waits for `take_let_go`.

    evictable, protected: ids of unlocked and of locked parts. num_let_go: ids that wait.
    order: over the nodes whose part is not locked, inner ones too.
    latest: what the tree gave out last; None once a part has left since.
    """

    component: Component
    kind: str  # what an id names, in words for an error

    def __init__(self, *, capacity: int, order: EvictionOrder) -> None:
        """`capacity`: the pool's ids are 1..capacity."""
        self.order = order
        self.owned = OwnedIds(capacity, self.kind)
        self.parts: dict[TreeNode, Part] = {}
        self.evictable = 0
        self.protected = 0
        self.num_let_go = 0
        self.latest: MatchResult | InsertResult | None = None
        self._let_go: list[np.ndarray] = []
        self._locks: dict[int, tuple[TreeNode, int]] = {}  # by receipt: the node, and the first token locked above it

    # -- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def reach(self, node: TreeNode) -> int:
        """The first token whose part is needed by a prefix that ends at `node`; all of them if it is not positive."""

    @abstractmethod
    def begin(self, node: TreeNode) -> int:
        """The first token that the part of `node` stands for."""

    @abstractmethod
    def longest(self, node: TreeNode, present: int, end: int) -> int:
        """As `Judge` says, for a match."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` was split and gave its first pages to `upper`, new, which has no part yet: divide its part."""

    @abstractmethod
    def named(self, node: TreeNode) -> dict[str, Any]:
        """The component's own fields of the MatchResult for the prefix that ends at `node`."""

    @abstractmethod
    def holds(self, found: MatchResult | InsertResult) -> bool:
        """Whether what `found` names, and its prefix needs, is all there, and is the same. Its node is in the tree."""

    # -- what a lock holds ----------------------------------------------------------------------------------------

    def isolate(self, node: TreeNode, split: Split) -> None:  # noqa: B027  most parts cannot be divided
        """Split a node, so that `lock` holds little more than the prefix that ends at `node` needs."""

    def lock(self, number: int, node: TreeNode) -> None:
        """Keep what the prefix that ends at `node` needs, for the receipt of this number; `isolate` went before.

        It is all there. O(nodes from `reach` on).
        """
        parts, first = self.parts, node
        for at in upwards(node, self.reach(node)):
            part = parts[at]
            part.lock_ref += 1
            if part.lock_ref == 1:
                self.order.remove(at)
                self.evictable -= part.ids.size
                self.protected += part.ids.size
            first = at
        self._locks[number] = node, self.begin(first)

    def relock(self, number: int, node: TreeNode) -> None:
        """`lock` for a receipt that has one, which is undone after it."""
        before = self._locks.pop(number, None)
        self.lock(number, node)
        if before is not None:
            self._undo(*before)

    def unlock(self, number: int) -> None:
        """Undo that lock, if it was not undone before; what becomes unlocked counts as just used."""
        lock = self._locks.pop(number, None)
        if lock is not None:
            self._undo(*lock)

    def _undo(self, node: TreeNode, first: int) -> None:
        # Splits since then have divided locked parts among more nodes; together they are the same tokens.
        for at in upwards(node, first):
            part = self.parts[at]
            part.lock_ref -= 1
            if part.lock_ref == 0:
                self.order.add(at)
                self.evictable += part.ids.size
                self.protected -= part.ids.size

    # -- use ------------------------------------------------------------------------------------------------------

    def touch(self, node: TreeNode) -> None:
        """The prefix that ends at `node` was used: what it needs becomes the most recent, and only that."""
        for at in upwards(node, self.reach(node)):
            part = self.parts.get(at)
            if part is not None and not part.lock_ref:
                self.order.touch(at)

    # -- what a node owns -----------------------------------------------------------------------------------------

    def give(self, node: TreeNode, ids: np.ndarray) -> None:
        """A node that has no part gets one: ids that `owned` has already."""
        self.parts[node] = Part(ids)
        self.enter(node)
        self.evictable += ids.size

    def enter(self, node: TreeNode) -> None:
        """A node that got its part enters the order; `touch` follows for those that the new prefix needs."""
        self.order.add(node)

    # -- what eviction takes --------------------------------------------------------------------------------------

    def pop(self) -> tuple[TreeNode, bool]:
        """The node whose part goes next, out of the order. -> it, and whether a prefix has needed that part."""
        return self.order.pop(), True

    def hollow(self, node: TreeNode) -> None:
        """A node that was popped from the order loses its part and stays in the tree."""
        part = self.parts.pop(node)
        self.latest = None
        self.evictable -= part.ids.size
        self.num_let_go += part.ids.size
        self._let_go.append(part.ids)

    def drop(self, node: TreeNode) -> None:
        """A node leaves the tree, with its part if it has one."""
        if node in self.parts:
            self.order.remove(node)
            self.hollow(node)

    def take_let_go(self) -> np.ndarray:
        """(n,) int32: ids that are no longer the tree's and that nobody took yet. The caller frees them."""
        if not self._let_go:
            return NO_PAGES
        ids = joined(self._let_go)
        self.owned.release(ids)
        self._let_go.clear()
        self.num_let_go = 0
        return ids

    def reset(self) -> None:
        """Forget everything, freeing nothing. O(capacity)."""
        self.order.clear()
        self.owned.clear()
        self.parts.clear()
        self._let_go.clear()
        self._locks.clear()
        self.latest = None
        self.evictable = self.protected = self.num_let_go = 0

    # -- checks ---------------------------------------------------------------------------------------------------

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """(evictable, protected) ids, int32. O(ids)."""
        unlocked, locked = [NO_PAGES], [NO_PAGES]
        for part in self.parts.values():
            (locked if part.lock_ref else unlocked).append(part.ids)
        return np.concatenate(unlocked), np.concatenate(locked)

    @abstractmethod
    def misplaced(self) -> Iterator[str]:
        """In words, each part that does not fit its node."""

    def locks(self) -> dict[int, list[TreeNode]]:
        """The nodes whose part is locked, by receipt number. For checks."""
        return {number: upwards(node, first) for number, (node, first) in self._locks.items()}


def upwards(node: TreeNode, first: int) -> list[TreeNode]:
    """`node` and those above it that end after `first` tokens, the deepest first."""
    path = []
    at: TreeNode | None = node
    first = max(first, 0)  # a root ends after none
    while at is not None and at.end > first:
        path.append(at)
        at = at.parent
    return path
