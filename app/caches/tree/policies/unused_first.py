"""An order in which parts that no prefix has needed yet go before those that one has: for window pages.

Of a long prompt, a later request that goes on after it needs the window pages of its end; those before are of use only
to one that leaves it half-way. There are far more of them, so without this they would push the ends out. They keep a
small share all the same, for the second of two requests that begin alike: the queue for newcomers of 2Q (Johnson and
Shasha, VLDB 1994). See docs/decisions/0018.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from app.caches.tree.node import TreeNode
from app.caches.tree.policies.order import EvictionOrder

SHARE = 8  # what nobody needed may hold one page of so many that could be evicted


class UnusedFirst:
    """An EvictionOrder: a queue of unused nodes, in the order in which they came, and another order of used ones.

    Counted by the full pages of nodes, which are as many as their window pages. Every call adds O(1) to the other's.
    """

    __slots__ = ("_num_unused", "_num_used", "_unused", "_used")

    def __init__(self, used: EvictionOrder) -> None:
        self._used = used
        self._unused: OrderedDict[TreeNode, None] = OrderedDict()
        self._num_used = 0
        self._num_unused = 0

    @property
    def num_pages(self) -> int:
        return self._num_used + self._num_unused

    def add(self, node: TreeNode) -> None:
        self._used.add(node)
        self._num_used += node.pages.size

    def add_unused(self, node: TreeNode) -> None:
        """A node that was not in the order enters it without a use."""
        self._unused[node] = None
        self._num_unused += node.pages.size

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        if lower in self._unused:
            self._unused[upper] = None
        else:
            self._used.split(lower, upper)

    def split_unused(self, lower: TreeNode, upper: TreeNode) -> None:
        """`upper` was cut off the front of `lower`, and whoever used `lower` had no need of it."""
        if lower not in self._unused:
            self._num_used -= upper.pages.size
            self._num_unused += upper.pages.size
        self._unused[upper] = None

    def remove(self, node: TreeNode) -> None:
        if node in self._unused:
            del self._unused[node]
            self._num_unused -= node.pages.size
        else:
            self._used.remove(node)
            self._num_used -= node.pages.size

    def touch(self, node: TreeNode) -> None:
        if node in self._unused:
            self.remove(node)
            self.add(node)
        else:
            self._used.touch(node)

    def pop(self) -> TreeNode:
        return self.pop_next()[0]

    def pop_next(self) -> tuple[TreeNode, bool]:
        """`pop`. -> the node, and whether it was used."""
        num_unused = self._num_unused
        if num_unused and (SHARE * num_unused > self._num_used + num_unused or not self._used):
            node = self._unused.popitem(last=False)[0]
            self._num_unused = num_unused - node.pages.size
            return node, False
        node = self._used.pop()
        self._num_used -= node.pages.size
        return node, True

    def clear(self) -> None:
        self._unused.clear()
        self._used.clear()
        self._num_used = self._num_unused = 0

    def __len__(self) -> int:
        return len(self._unused) + len(self._used)

    def __iter__(self) -> Iterator[TreeNode]:
        """The unused ones first; which of both goes next depends on their shares."""
        return chain(self._unused, self._used)

    def __reversed__(self) -> Iterator[TreeNode]:
        return chain(reversed(self._used), reversed(self._unused))
