"""What a cache tells the tiers below it while it works."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from app.caches.base import InsertResult, MatchResult
from app.caches.tree.node import TreeNode
from app.core.keys import RadixKey


class TierListener(Protocol):
    """Called on the cache's own thread, in the middle of its work: it must be quick and must not call the cache."""

    def published(self, key: RadixKey, result: InsertResult, pages: np.ndarray) -> None:
        """`insert` did this; of `pages`, which its caller gave, those before `result.first` are the cache's."""
        ...

    def matched(self, key: RadixKey, found: MatchResult) -> None:
        """`match` found this."""
        ...

    def leaving(self, node: TreeNode) -> None:
        """Eviction is about to take this node, or a part of it; all of its path is there yet."""
        ...


def num_duplicates(result: InsertResult) -> int:
    """Pages that were there before."""
    return sum(result.duplicates[-1]) if result.duplicates else result.first  # first page index, count of the last run


class NobodyListens:
    """There are no tiers."""

    def published(self, key: RadixKey, result: InsertResult, pages: np.ndarray) -> None:
        """Nobody wants it."""

    def matched(self, key: RadixKey, found: MatchResult) -> None:
        """Nobody wants it."""

    def leaving(self, node: TreeNode) -> None:
        """Nobody wants it."""


NOBODY_LISTENS = NobodyListens()
