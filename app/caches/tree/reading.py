"""What a tree holds, in all or along one path. Reads only: nothing is split, and no recency changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from app.caches.base import NO_PAGES
from app.caches.tiers.span import Span
from app.caches.tree.components.recurrent import StateComponent
from app.caches.tree.components.swa import WindowComponent
from app.caches.tree.core import TreeCore
from app.caches.tree.node import TreeNode
from app.caches.tree.place import descend
from app.caches.tree.runs import joined
from app.core.keys import RadixKey


def page_ids(tree: TreeCore) -> tuple[np.ndarray, np.ndarray]:
    """(evictable, protected) page ids, int32. O(pages)."""
    unlocked, locked = [NO_PAGES], [NO_PAGES]
    for node in tree.nodes():
        (locked if node.lock_ref else unlocked).append(node.pages)
    return np.concatenate(unlocked), np.concatenate(locked)


def num_present(tree: TreeCore, key: RadixKey) -> int:
    """Pages of `key` that are in the tree, usable or not. O(len(key))."""
    root = tree.roots.get(key.namespace)
    if root is None:
        return 0
    _, end, _, shared = descend(root, key.uncut, _whole_pages(tree, key), tree.page_bytes)
    return end // tree.page_bytes + shared


def last_on_path(tree: TreeCore, key: RadixKey) -> TreeNode | None:
    """The node in which, or at whose end, what is there of `key` ends; None if nothing is. O(len(key))."""
    root = tree.roots.get(key.namespace)
    if root is None:
        return None
    node, _, partial, _ = descend(root, key.uncut, _whole_pages(tree, key), tree.page_bytes)
    last = partial or node
    return None if last.parent is None else last


def end_of(tree: TreeCore, key: RadixKey) -> TreeNode | None:
    """The node at whose end `key`, whole pages, ends; None if it is not there, or ends inside a node."""
    root = tree.roots.get(key.namespace)
    if root is None:
        return None
    node, end, _, _ = descend(root, key.raw, len(key.raw), tree.page_bytes)
    return node if end == len(key.raw) and end else None


def upwards_from(node: TreeNode | None) -> Iterator[TreeNode]:
    """The node and those above it, the deepest first, without the root; none for None."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def span_of_key(
    tree: TreeCore, key: RadixKey, first: int, window: WindowComponent | None, states: StateComponent | None
) -> Span:
    """What is there of `key` from page index `first` on. O(len(key))."""
    root = tree.roots.get(key.namespace)
    if root is None:
        return Span(first, NO_PAGES)
    node, end, partial, shared = descend(root, key.uncut, _whole_pages(tree, key), tree.page_bytes)
    num_pages = end // tree.page_bytes + shared
    return span_above(partial or node, num_pages, first, tree.page_size, window, states)


def span_above(
    node: TreeNode,
    num_pages: int,
    first: int,
    page_size: int,
    window: WindowComponent | None,
    states: StateComponent | None,
) -> Span:
    """Page indexes first .. num_pages - 1 of the path through `node`, in or at the end of which the last of them is.

    O(nodes and pages that hold them).
    """
    if num_pages <= first:
        return Span(first, NO_PAGES)
    full: list[np.ndarray] = []
    windows: list[np.ndarray] = []
    snapshots: list[np.ndarray] = []
    end = num_pages
    at: TreeNode | None = node
    while at is not None and end > first:
        begin = at.start // page_size
        taken = slice(max(first - begin, 0), end - begin)
        full.append(at.pages[taken])
        if window is not None:
            part = window.parts.get(at)
            windows.append(np.zeros(full[-1].size, np.int32) if part is None else part.ids[taken])
        if states is not None:
            here = np.zeros(full[-1].size, np.int32)
            if end * page_size == at.end:
                here[-1] = states.state_of(at)
            snapshots.append(here)
        end = begin
        at = at.parent
    return Span(first, *(joined(runs[::-1]) if runs else NO_PAGES for runs in (full, windows, snapshots)))


def key_of_node(node: TreeNode) -> RadixKey:
    """The tokens from the root to the end of the node's edge. O(tokens)."""
    edges = [each.edge for each in upwards_from(node)]
    return RadixKey(b"".join(reversed(edges)), node.namespace, node.priority)


def _whole_pages(tree: TreeCore, key: RadixKey) -> int:
    """In bytes."""
    return key.num_tokens // tree.page_size * tree.page_bytes
