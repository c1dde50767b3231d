"""Which node leaves next. The tree holds one order over all its unlocked nodes, inner ones too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from app.caches.tree.node import TreeNode
from app.errors import ConfigError


class EvictionOrder(Protocol):
    """An order of nodes. Every call is O(1), or nearly.

    The tree adds and touches a node before its parent, never after, so that an order may rely on it: `pop` must return
    a node none of whose children is in the order.
    """

    def add(self, node: TreeNode) -> None:
        """A node that was not in the order enters it, as just used."""
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


class LruOrder:
    """Least recently used first. A parent is always more recent than its children, so the oldest is always a leaf."""

    __slots__ = ("_nodes", "remove", "touch")

    def __init__(self) -> None:
        self._nodes: OrderedDict[TreeNode, None] = OrderedDict()
        # Bound methods of the dictionary itself: these two run once for every node of a path.
        self.touch: Callable[[TreeNode], None] = self._nodes.move_to_end
        self.remove: Callable[[TreeNode], None] = self._nodes.__delitem__

    def add(self, node: TreeNode) -> None:
        self._nodes[node] = None

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


_ORDERS: dict[str, Callable[[], EvictionOrder]] = {"lru": LruOrder}


def make_eviction_order(policy: str) -> EvictionOrder:
    """A new, empty order. ConfigError for a policy that does not exist."""
    try:
        return _ORDERS[policy]()
    except KeyError:
        raise ConfigError(field="eviction_policy", value=policy, allowed=f"one of {', '.join(_ORDERS)}") from None
