"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from app.caches.tree.node import TreeNode


class LruOrder:
    """The one used longest ago goes first. Every call is one operation of a dictionary."""

    __slots__ = ("_nodes", "remove", "touch")

    def __init__(self) -> None:
        self._nodes: OrderedDict[TreeNode, None] = OrderedDict()
        # Bound methods of the dictionary itself: these two run once for every node of a path.
        self.touch: Callable[[TreeNode], None] = self._nodes.move_to_end
        self.remove: Callable[[TreeNode], None] = self._nodes.__delitem__

    def add(self, node: TreeNode) -> None:
        self._nodes[node] = None

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        self._nodes[upper] = None

    def pop(self) -> TreeNode:
        return self._nodes.popitem(last=False)[0]

    def clear(self) -> None:
        self._nodes.clear()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._nodes)

    def __reversed__(self) -> Iterator[TreeNode]:
        return reversed(self._nodes)
