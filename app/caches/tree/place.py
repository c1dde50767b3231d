"""Where a key's path ends in a tree. Reads only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.caches.tree.components.base import Judge
from app.caches.tree.node import TreeNode
from app.core.keys import TOKEN_BYTES

# The last node that matches whole, the byte position at its end, and, if the path ends inside an edge, that edge's node
# and how many of its pages match: at least one, not all.
Place = tuple[TreeNode, int, TreeNode | None, int]


def descend(node: TreeNode, raw: bytes, limit: int, page_bytes: int) -> Place:
    """Follow raw[:limit], whole pages, from the end of a node. O(what is left of limit + nodes on the path)."""
    position = node.end * TOKEN_BYTES
    while position < limit:
        child = node.children.get(raw[position : position + page_bytes])
        if child is None:
            break
        edge = child.edge
        end = position + len(edge)
        if end > limit or not raw.startswith(edge, position):
            return node, position, child, _shared_bytes(raw, position, limit, edge) // page_bytes
        node, position = child, end
    return node, position, None, 0


def _shared_bytes(raw: bytes, position: int, limit: int, edge: bytes) -> int:
    """Of the leading tokens of `edge` that are in raw[position:limit]."""
    count = min(len(edge), limit - position) // TOKEN_BYTES
    differs = np.frombuffer(raw, np.int32, count, position) != np.frombuffer(edge, np.int32, count)
    first = int(differs.argmax())
    return (first if differs[first] else count) * TOKEN_BYTES


def cut_to_usable(place: Place, judges: Sequence[Judge], count: int, page_size: int) -> tuple[Place, int]:
    """The longest prefix, of at most `count` pages, that every judge finds usable; some of it may be yet to come.

    -> the place at or after which it ends, and its pages. O(nodes that hold what it needs, and those left behind).
    """
    node, whole, partial, shared = place
    at = partial or node
    there = present = whole // TOKEN_BYTES + shared * page_size
    asked, end = -1, count * page_size
    while asked != end:  # what one leaves may be too long for another, or not end where it could
        asked = end
        for judge in judges:
            end = judge.longest(at, present, end)
            present = min(present, end)
            while at.start >= end and at.parent is not None:
                at = at.parent
    return (place if end >= there else (at, end * TOKEN_BYTES, None, 0)), end // page_size
