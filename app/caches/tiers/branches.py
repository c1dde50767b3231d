"""Whether what leaves the device is worth the copies of all that is above it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from app.caches.tree.node import TreeNode
from app.caches.tree.reading import upwards_from


class Branches:
    """A tier below holds no page without all those before it, and the device may keep these for long.

    So a few pages of a branch that was passed by would cost as many as the prefix that went on without it, a second
    time. They are given up, and added up at the node where they branched off; once they are as many as what is lacking
    above them, the next one goes down with that. What is given up is so at most what it saves: the rule of the ski
    rental (Karlin, Manasse, Rudolph and Sleator, 1988).
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._given_up: dict[TreeNode, int] = {}  # pages, by the node they branched off

    def branch(self, node: TreeNode) -> list[TreeNode]:
        """The node and those above it that were not used since, the deepest first: they go together. O(these)."""
        return list(takewhile(lambda each: each.used_at == node.used_at, upwards_from(node)))

    def has_to_go(self, branch: Sequence[TreeNode], num_there: int) -> bool:
        """Whether to copy it, if the tier below has the first `num_there` pages of its path. False gives it up."""
        fork = branch[-1].parent
        assert fork is not None
        given_up = self._given_up.pop(fork, 0) + sum(node.pages.size for node in branch)
        if fork.end // self._page_size - num_there <= given_up:
            return True
        self._given_up[fork] = given_up
        return False

    def left(self, node: TreeNode) -> None:
        """The node leaves the device."""
        self._given_up.pop(node, None)

    def forget(self) -> None:
        """The tree of the device is emptied."""
        self._given_up.clear()
