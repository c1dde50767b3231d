"""What must hold of a TreeCore between two calls. O(nodes); no recursion."""

from __future__ import annotations

from collections import Counter

import numpy as np

from app.caches.tree.core import TreeCore
from app.caches.tree.node import TreeNode
from app.core.keys import TOKEN_BYTES
from app.errors import IntegrityError


def check_tree(tree: TreeCore, *, page_size: int) -> None:
    """Raise IntegrityError, with everything that is broken, unless every invariant holds."""
    nodes = list(tree.nodes())
    broken = [
        *_shape(tree, nodes, page_size * TOKEN_BYTES),
        *_locks(tree, nodes),
        *_order(tree, nodes),
        *_pages(tree, nodes),
        *_uses(tree, nodes),
    ]
    if broken:
        raise IntegrityError(owner="TreeCore", broken="; ".join(broken))


def _shape(tree: TreeCore, nodes: list[TreeNode], page_bytes: int) -> list[str]:
    broken = []
    for namespace, root in tree.roots.items():
        if root.namespace != namespace or root.parent is not None or root.edge or not root.children:
            broken.append(f"the root of {namespace} is not an empty node with children")
    for node in [*tree.roots.values(), *nodes]:
        for first_page, child in node.children.items():
            if child.parent is not node or child.namespace != node.namespace or child.edge[:page_bytes] != first_page:
                broken.append("a child is not under its parent, its namespace or its first page")
            if child.start != node.end:
                broken.append(f"a child of a node that ends after {node.end} tokens starts after {child.start}")
    for node in nodes:
        if not node.edge or len(node.edge) != node.pages.size * page_bytes:
            broken.append(f"a node of {node.pages.size} pages has {len(node.edge)} bytes of tokens")
        if node.hashes and len(node.hashes) != node.pages.size:
            broken.append(f"a node of {node.pages.size} pages has {len(node.hashes)} hashes")
        if node.epoch != tree.receipts.epoch:
            broken.append("a node in the tree is marked as evicted or from before a reset")
    if len(nodes) != tree.num_nodes:
        broken.append(f"{len(nodes)} nodes are counted as {tree.num_nodes}")
    return broken


def _locks(tree: TreeCore, nodes: list[TreeNode]) -> list[str]:
    receipts = Counter(node for node in tree.receipts.held() if node is not None)
    broken = []
    for node in nodes:
        holders = receipts[node] + sum(child.lock_ref > 0 for child in node.children.values())
        if node.lock_ref != holders:
            broken.append(f"a node with {holders} holders has lock_ref {node.lock_ref}")
    if not receipts.keys() <= set(nodes):
        broken.append("a receipt holds a node that is not in the tree")
    return broken


def _order(tree: TreeCore, nodes: list[TreeNode]) -> list[str]:
    position = {node: index for index, node in enumerate(tree.order)}
    broken = []
    if position.keys() != {node for node in nodes if not node.lock_ref}:
        broken.append("the eviction order does not hold exactly the unlocked nodes")
    for node, index in position.items():
        parent = node.parent
        if parent in position and position[parent] < index:
            broken.append("a parent would be evicted before its child")
    return broken


def _pages(tree: TreeCore, nodes: list[TreeNode]) -> list[str]:
    evictable, protected = tree.page_ids()
    pages = np.concatenate([evictable, protected])
    broken = []
    if np.unique(pages).size != pages.size:
        broken.append("a page is in two places (double owned)")
    if not np.array_equal(np.flatnonzero(tree.owned), np.union1d(pages, [0])):
        broken.append("the pages marked as owned are not those of the nodes")
    if (evictable.size, protected.size) != (tree.evictable_pages, tree.protected_pages):
        broken.append(
            f"{evictable.size} evictable and {protected.size} protected pages are counted as "
            f"{tree.evictable_pages} and {tree.protected_pages}"
        )
    return broken


def _uses(tree: TreeCore, nodes: list[TreeNode]) -> list[str]:
    broken = []
    for node in nodes:
        if node.hits < sum(child.hits for child in node.children.values()):
            broken.append("the children of a node were matched more often than the node")
        if not node.lock_ref and any(child.used_at > node.used_at for child in node.children.values()):
            broken.append("a child was used after its parent")
        if node.used_at > tree.clock():
            broken.append("a node was used in the future")
    serials = {node.serial for node in nodes}
    if len(serials) != len(nodes) or any(root.serial != namespace for namespace, root in tree.roots.items()):
        broken.append("two nodes have one serial, or a root has another than its namespace")
    return broken
