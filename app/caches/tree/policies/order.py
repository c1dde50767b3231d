"""What an eviction policy is: an order of nodes, from which the next one to evict is popped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from app.caches.tree.node import TreeNode


class EvictionOrder(Protocol):
    """An order of nodes. Every call is O(1), or O(log nodes).

    Every policy ranks by things of which a node has at least as much as any node below it: how lately, how often and
    for how urgent a request it was used; among equals the one added or touched first goes first. So, where a node is
    added and touched before its ancestors, never after, `pop` returns a node none of whose children is in the order: a
    leaf, if all unlocked nodes are in it. No policy looks at children or parents: an order may hold any nodes of a
    tree, told in any sequence, and then pops what is worth least, wherever that is in the tree.

    A node's `uses` and `priority` are read when it is added or touched, never in between.
    """

    def add(self, node: TreeNode) -> None:
        """A node that was not in the order enters it, as just used."""
        ...

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        """A use ended inside `lower`, which is in the order; `upper` was cut off its front and enters, as just used."""
        ...

    def remove(self, node: TreeNode) -> None:
        """A node in the order leaves it: it was locked."""
        ...

    def touch(self, node: TreeNode) -> None:
        """A node in the order was used."""
        ...

    def pop(self) -> TreeNode:
        """Take out the node to evict next. KeyError from an empty order."""
        ...

    def clear(self) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[TreeNode]:
        """The nodes, next to be evicted first."""
        ...

    def __reversed__(self) -> Iterator[TreeNode]:
        """The nodes, last to be evicted first: a parent before its children."""
        ...
