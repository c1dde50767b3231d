"""What takes nodes and parts out of a tree: eviction in the order of a policy, and letting go of one path.

The tree frees nothing: every function returns the full pages that are no longer the tree's; what components let go of
waits with them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.caches.tree.components.base import TreeComponent
from app.caches.tree.core import TreeCore
from app.caches.tree.node import TreeNode

# Told of a node that eviction is about to take, or to take a part of, while it is all there yet.
Leaving = Callable[[TreeNode], None]


def nobody_watches(node: TreeNode) -> None:
    """Of a cache that has no tier below: nobody wants it."""


def evict_pages(tree: TreeCore, num_pages: int, leaving: Leaving) -> np.ndarray:
    """Drop leaves, in the order of the policy, until `num_pages` or more are out, or nothing is unlocked.

    -> (n,) int32, the pages. O(nodes dropped).
    """
    dropped: list[TreeNode] = []
    freed = 0
    now = tree.clock()
    while freed < num_pages and tree.order:
        node = tree.order.pop()
        leaving(node)
        tree.cut_off(node, now)
        dropped.append(node)
        freed += node.pages.size
        if tree.components:
            useless = tree.drop_useless(node.parent, now)
            dropped += useless
            freed += sum(each.pages.size for each in useless)
    return tree.left(dropped)


def evict_parts(tree: TreeCore, component: TreeComponent, count: int, leaving: Leaving) -> np.ndarray:
    """Let a component let go of `count` ids or more, or of all that are not locked, the next in its order first.

    A node that nobody could match any more for it leaves the tree whole. `leaving` is not told of a part that no prefix
    has needed, where the node stays.
    -> (n,) int32, the full pages of those. O(nodes that lose something).
    """
    dropped: list[TreeNode] = []
    now = tree.clock()
    while component.num_let_go < count and component.order:
        node, was_needed = component.pop()
        if was_needed or not node.children:
            leaving(node)
        component.hollow(node)
        dropped += tree.drop_useless(node, now)
    return tree.left(dropped)


def drop_upwards(tree: TreeCore, node: TreeNode, num_pages: int) -> np.ndarray:
    """Drop `node`, and then those above it, while nobody locks them and nothing is below, until `num_pages` are out.

    -> (n,) int32, the pages. O(nodes dropped).
    """
    dropped: list[TreeNode] = []
    freed = 0
    now = tree.clock()
    at: TreeNode | None = node
    while at is not None and at.parent is not None and freed < num_pages and not at.children and not at.lock_ref:
        tree.order.remove(at)
        tree.cut_off(at, now)
        dropped.append(at)
        freed += at.pages.size
        at = at.parent
    return tree.left(dropped + tree.drop_useless(at, now))
