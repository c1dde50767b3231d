"""A node of the prefix tree."""

from __future__ import annotations

import numpy as np

from app.core.keys import Namespace

EVICTED = -1


class TreeNode:
    """Some pages of tokens, after those of its ancestors. A root has none, and no parent.

    edge: the tokens' bytes, whole pages.
    pages: (len(edge) // page bytes,) int32, read-only, the page ids; the tree owns these pages.
    children: by the bytes of their first page.
    lock_ref: receipts held on this node plus children that are locked; a locked node protects all its ancestors.
    epoch: that of the tree it is in, or EVICTED.
    hashes: one for each page while events are wanted, else empty.
    """

    __slots__ = ("children", "edge", "epoch", "hashes", "lock_ref", "namespace", "pages", "parent")

    def __init__(
        self, *, parent: TreeNode | None, namespace: Namespace, edge: bytes, pages: np.ndarray, epoch: int
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.edge = edge
        self.pages = pages
        self.epoch = epoch
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.hashes: list[bytes] = []
