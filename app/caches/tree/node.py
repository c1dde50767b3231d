"""A node of the prefix tree."""

from __future__ import annotations

import numpy as np

from app.caches.base import NO_PAGES
from app.core.keys import TOKEN_BYTES, Namespace

EVICTED = -1


class TreeNode:
    """Some pages of tokens, after those of its ancestors. A root has none, and no parent.

    edge: the tokens' bytes, whole pages.
    pages: (len(edge) // page bytes,) int32, read-only, the page ids; the tree owns these pages.
    children: by the bytes of their first page.
    lock_ref: receipts held on this node plus children that are locked; a locked node protects all its ancestors.
    epoch: that of the tree it is in, or EVICTED.
    hashes: one for each page while events are wanted, else empty.
    start, end: tokens from the root to the begin and to the end of the edge.
    serial: names the place at the end of the edge, and no other place ever, even after the node is gone. A root's is
        its namespace: roots come and go with their first and last child.
    hits: matches whose path covers the node; one for a request that had to ask again and again.
    past_uses: uses of its place before the node was made, as far as the tree remembers.
    priority: that of the most urgent request that used it or anything below it; lower is more urgent.
    used_at: when it last was matched, inserted or unlocked; the tree's clock.
    """

    __slots__ = (
        "children",
        "edge",
        "end",
        "epoch",
        "hashes",
        "hits",
        "lock_ref",
        "namespace",
        "pages",
        "parent",
        "past_uses",
        "priority",
        "serial",
        "start",
        "used_at",
    )

    def __init__(
        self,
        *,
        parent: TreeNode | None,
        namespace: Namespace,
        edge: bytes,
        pages: np.ndarray,
        epoch: int,
        start: int,
        serial: int | Namespace,
        hits: int = 0,
        used_at: float = 0.0,
        past_uses: int = 0,
        priority: int = 0,
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.edge = edge
        self.pages = pages
        self.epoch = epoch
        self.start = start
        self.end = start + len(edge) // TOKEN_BYTES
        self.serial = serial
        self.hits = hits
        self.used_at = used_at
        self.past_uses = past_uses
        self.priority = priority
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.hashes: list[bytes] = []

    @classmethod
    def root(cls, namespace: Namespace, epoch: int) -> TreeNode:
        """Of a namespace; not in the tree before it has a child."""
        return cls(
            parent=None,
            namespace=namespace,
            edge=b"",
            pages=NO_PAGES,
            epoch=epoch,
            start=0,
            serial=namespace,
        )

    def is_passed_by(self, raw: bytes, namespace: Namespace) -> bool:
        """Whether these tokens go on after the node, if they are the path's before it. O(its edge)."""
        return namespace == self.namespace and raw.startswith(self.edge, self.start * TOKEN_BYTES)

    @property
    def uses(self) -> int:
        """How often its place was used again; never more often than that of its parent."""
        return self.hits + self.past_uses


def make_as_urgent(node: TreeNode, priority: int) -> None:
    """Raise a path to the urgency of a request that uses it. Stops at the first node that is as urgent already."""
    while node.priority > priority and node.parent is not None:
        node.priority = priority
        node = node.parent
