"""The policy that learns, while it runs, how soon nodes of which history are used again.

From LHD (Beckmann, Chen, Cidon, NSDI 2018): what to keep is what brings most hits for the room and the time that it
takes, and that is estimated from the ages at which nodes were used again or evicted. Here the classes are how often a
node was used, and ages are counted in pages that entered the order, so that neither load nor idle hours matter.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from app.caches.tree.node import TreeNode

NUM_CLASSES = 5
NUM_BINS = 48
_LEARN_AFTER = 256  # ended lives, or as many as there are nodes
_REMEMBER = 1 << 16  # ended lives; then each of them counts half
_PRIOR = 2.0  # lives


def use_class(node: TreeNode) -> int:
    """0: never used again; then once, 2-3, 4-7 and 8 or more times."""
    return min(node.uses.bit_length(), NUM_CLASSES - 1)


def age_bin(age: int) -> int:
    """Bin of an age in pages: one for each doubling. Bin b begins at 2**(b - 1), bin 0 at 0."""
    return min(age.bit_length(), NUM_BINS - 1)


_STARTS = [0, *(1 << at for at in range(NUM_BINS))]  # first age of each bin, and of the one that would be next
_EDGES = np.array(_STARTS, np.float64)


class ReuseRates:
    """How likely a node of a class is to be used within the next page of its life, by age; from lives.

    A life begins with a use and ends with the next one, or with an eviction.

    worth[class][bin]: the highest rate that a node of that class and age has still before it. It never grows with age,
        and never falls with the class: more uses are never held against a node.
    """

    __slots__ = ("_ended", "_inside", "_lives", "_reused", "due", "worth")

    def __init__(self) -> None:
        self._reused = _table()  # lives that ended in a use, by class and bin
        self._ended = _table()  # all that ended
        self._inside = _table()  # pages that those lived within the bin in which they ended
        self._lives = 0
        self.worth: list[list[float]] = []
        self.learn([np.empty(0)] * NUM_CLASSES)

    def record(self, lived_as: int, age: int, *, reused: bool) -> None:
        """One life ended. O(1)."""
        at = age_bin(age)
        self._ended[lived_as][at] += 1.0
        self._inside[lived_as][at] += age - _STARTS[at]
        if reused:
            self._reused[lived_as][at] += 1.0
        self._lives += 1
        self.due -= 1

    def learn(self, living_ages: list[np.ndarray]) -> None:
        """Work out `worth` from the ended lives and, for each class, the ages of nodes that live. O(nodes)."""
        below = np.zeros(NUM_BINS)
        worth = []
        for reused, ended, inside, ages in zip(self._reused, self._ended, self._inside, living_ages, strict=True):
            rates = _rates(reused, _pages_lived(ended, inside, ages))
            below = np.maximum(below, np.maximum.accumulate(rates[::-1])[::-1])
            worth.append(below.tolist())
        self.worth = worth
        if self._lives > _REMEMBER:
            self._lives //= 2
            for table in (self._reused, self._ended, self._inside):
                for row in table:
                    row[:] = [value / 2 for value in row]
        self.due = max(_LEARN_AFTER, sum(ages.size for ages in living_ages))


def _table() -> list[list[float]]:
    return [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]


def _pages_lived(ended: list[float], inside: list[float], living_ages: np.ndarray) -> np.ndarray:
    """(NUM_BINS,) pages that all lives of a class spent in each bin of age."""
    at = np.minimum(np.frexp(living_ages)[1], NUM_BINS - 1)
    ends = ended + np.bincount(at, minlength=NUM_BINS)
    within = inside + np.bincount(at, living_ages - _EDGES[at], NUM_BINS)
    beyond = ends.sum() - np.cumsum(ends)
    return beyond * np.diff(_EDGES) + within


def _rates(reused: list[float], lived: np.ndarray) -> np.ndarray:
    """(NUM_BINS,) uses per page of life. Where little is known, the rate falls as 1 / age from the bin before."""
    rates = []
    expected = 1.0
    for uses, pages in zip(reused, lived.tolist(), strict=True):
        rate = (uses + _PRIOR) / (pages + _PRIOR / expected)
        rates.append(rate)
        expected = rate / 2
    return np.array(rates)


class HitDensityOrder:
    """What is least likely to be used soon goes first, by what was seen of nodes of the same class.

    One queue a class, used longest ago first; `pop` compares the heads, each the least of its class. O(classes), and
    O(nodes) once in as many ended lives.
    """

    __slots__ = ("_class_of", "_now", "_queues", "_rates")

    def __init__(self) -> None:
        self._queues: list[OrderedDict[TreeNode, int]] = [OrderedDict() for _ in range(NUM_CLASSES)]  # to the last use
        self._class_of: dict[TreeNode, int] = {}  # as it was at the last use
        self._rates = ReuseRates()
        self._now = 0  # pages that entered so far

    def add(self, node: TreeNode) -> None:
        self._now += node.pages.size
        self._begin_life(node)

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        lived_as = self._class_of[lower]
        self._end_life(lived_as, self._queues[lived_as][lower], reused=True)
        self._begin_life(upper)

    def remove(self, node: TreeNode) -> None:
        del self._queues[self._class_of.pop(node)][node]

    def touch(self, node: TreeNode) -> None:
        lived_as = self._class_of[node]
        self._end_life(lived_as, self._queues[lived_as].pop(node), reused=True)
        self._begin_life(node)

    def pop(self) -> TreeNode:
        worth, now = self._rates.worth, self._now
        least, least_worth = -1, float("inf")
        for lives_as, queue in enumerate(self._queues):
            if queue:
                head_worth = worth[lives_as][age_bin(now - next(iter(queue.values())))]
                if head_worth < least_worth:
                    least, least_worth = lives_as, head_worth
        if least < 0:
            raise KeyError("the order is empty")
        node, used_at = self._queues[least].popitem(last=False)
        del self._class_of[node]
        self._end_life(least, used_at, reused=False)
        return node

    def clear(self) -> None:
        """Forget the nodes, not what was learned."""
        self._class_of.clear()
        for queue in self._queues:
            queue.clear()

    def __len__(self) -> int:
        return len(self._class_of)

    def __iter__(self) -> Iterator[TreeNode]:
        return heapq.merge(*self._queues, key=self._rank)

    def __reversed__(self) -> Iterator[TreeNode]:
        return heapq.merge(*(reversed(queue) for queue in reversed(self._queues)), key=self._rank, reverse=True)

    def _begin_life(self, node: TreeNode) -> None:
        lives_as = use_class(node)
        self._class_of[node] = lives_as
        self._queues[lives_as][node] = self._now

    def _end_life(self, lived_as: int, used_at: int, *, reused: bool) -> None:
        age = self._now - used_at
        if age:  # else one use was told twice
            self._rates.record(lived_as, age, reused=reused)
            if self._rates.due <= 0:
                self._rates.learn([self._ages(queue) for queue in self._queues])

    def _ages(self, queue: OrderedDict[TreeNode, int]) -> np.ndarray:
        return self._now - np.fromiter(queue.values(), np.float64, len(queue))

    def _rank(self, node: TreeNode) -> tuple[float, int]:
        lives_as = self._class_of[node]
        return self._rates.worth[lives_as][age_bin(self._now - self._queues[lives_as][node])], lives_as
