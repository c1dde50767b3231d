"""Policies that rank nodes by a whole number, and equals by recency: lfu, slru, priority."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from app.caches.tree.node import TreeNode


class RankedOrder:
    """The lowest rank goes first; of one rank, the one used longest ago.

    One queue a rank, and a heap of the ranks that have one. O(1), and O(log ranks) where a queue begins or ends.
    """

    __slots__ = ("_queues", "_rank", "_rank_of", "_ranks")

    def __init__(self, rank: Callable[[TreeNode], int]) -> None:
        self._rank = rank
        self._rank_of: dict[TreeNode, int] = {}  # as it was when the node was last used
        self._queues: dict[int, OrderedDict[TreeNode, None]] = {}  # none is empty
        self._ranks: list[int] = []  # a heap; some have no queue any more, some are in it twice

    def add(self, node: TreeNode) -> None:
        rank = self._rank(node)
        self._rank_of[node] = rank
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
            self._note(rank)
        queue[node] = None

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        self.add(upper)

    def remove(self, node: TreeNode) -> None:
        rank = self._rank_of.pop(node)
        queue = self._queues[rank]
        del queue[node]
        if not queue:
            del self._queues[rank]

    def touch(self, node: TreeNode) -> None:
        rank = self._rank_of[node]
        if rank == self._rank(node):
            self._queues[rank].move_to_end(node)
        else:
            self.remove(node)
            self.add(node)

    def pop(self) -> TreeNode:
        while self._ranks:
            queue = self._queues.get(self._ranks[0])
            if queue is not None:
                node = next(iter(queue))
                self.remove(node)
                return node
            heappop(self._ranks)
        raise KeyError("the order is empty")

    def clear(self) -> None:
        self._rank_of.clear()
        self._queues.clear()
        self._ranks.clear()

    def __len__(self) -> int:
        return len(self._rank_of)

    def __iter__(self) -> Iterator[TreeNode]:
        for rank in sorted(self._queues):
            yield from self._queues[rank]

    def __reversed__(self) -> Iterator[TreeNode]:
        for rank in sorted(self._queues, reverse=True):
            yield from reversed(self._queues[rank])

    def _note(self, rank: int) -> None:
        """Put a rank into the heap. What is stale there never outgrows the rest, however high ranks climb."""
        heappush(self._ranks, rank)
        if len(self._ranks) > 2 * len(self._queues) + 16:
            self._ranks = list(self._queues)
            heapify(self._ranks)


def lfu_order() -> RankedOrder:
    """Least often used first, counting what is remembered from before an eviction. Nothing ages."""
    return RankedOrder(lambda node: node.uses)


def slru_order() -> RankedOrder:
    """What was never used again goes first: segmented LRU, a probationary and a protected segment.

    The protected one has no bound; a place that comes back after an eviction enters it at once, as in 2Q (VLDB 1994).
    """
    return RankedOrder(lambda node: min(node.uses, 1))


def priority_order() -> RankedOrder:
    """The least urgent first. A node is as urgent as the most urgent request that used it: its lowest `priority`."""
    return RankedOrder(lambda node: -node.priority)
