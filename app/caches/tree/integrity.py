"""What must hold of a TreeCore between two calls. O(nodes); no recursion."""

from __future__ import annotations

from collections import Counter

import numpy as np

from app.caches.tree.components.base import TreeComponent
from app.caches.tree.core import TreeCore
from app.caches.tree.node import TreeNode
from app.caches.tree.reading import page_ids
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
        *(fault for component in tree.components for fault in _parts(tree, component, set(nodes))),
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
        if (node.end - node.start) * TOKEN_BYTES != len(node.edge):
            broken.append(f"a node of {len(node.edge)} bytes of tokens goes from token {node.start} to {node.end}")
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
    evictable, protected = page_ids(tree)
    pages = np.concatenate([evictable, protected])
    broken = []
    if np.unique(pages).size != pages.size:
        broken.append("a page is in two places (double owned)")
    if not np.array_equal(tree.owned.ids(), np.unique(pages)):
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
        if any(child.uses > node.uses or child.priority < node.priority for child in node.children.values()):
            broken.append("a child was used more often, or by a more urgent request, than its parent")
        if node.used_at > tree.clock():
            broken.append("a node was used in the future")
    serials = {node.serial for node in nodes}
    if len(serials) != len(nodes) or any(root.serial != namespace for namespace, root in tree.roots.items()):
        broken.append("two nodes have one serial, or a root has another than its namespace")
    return broken


def _parts(tree: TreeCore, component: TreeComponent, nodes: set[TreeNode]) -> list[str]:
    kind, parts = component.kind, component.parts
    broken = [*component.misplaced()]
    if not parts.keys() <= nodes:
        broken.append(f"a {kind} is held by a node that is not in the tree")
    receipts = Counter(node for held in component.locks().values() for node in held)
    for node, part in parts.items():
        if part.lock_ref != receipts.pop(node, 0):
            broken.append(f"a {kind} has lock_ref {part.lock_ref}, which is not the number of its holders")
        if part.lock_ref and not node.lock_ref:
            broken.append(f"a {kind} is locked on a node that is not")
    if receipts:
        broken.append(f"a receipt holds a {kind} that is not there")
    if set(component.order) != {node for node, part in parts.items() if not part.lock_ref}:
        broken.append(f"the eviction order does not hold exactly the unlocked {kind}s")
    for node in nodes:
        if node not in parts and not node.children and not node.lock_ref:
            broken.append(f"a leaf has no {kind} and nobody locks it: none could match it")
    evictable, protected = component.ids()
    ids = np.concatenate([evictable, protected])
    if np.unique(ids).size != ids.size:
        broken.append(f"a {kind} is in two places (double owned)")
    if not np.array_equal(component.owned.ids(), np.unique(ids)):
        broken.append(f"the {kind}s marked as owned are not those of the nodes")
    if (evictable.size, protected.size) != (component.evictable, component.protected):
        broken.append(
            f"{evictable.size} evictable and {protected.size} protected {kind}s are counted as "
            f"{component.evictable} and {component.protected}"
        )
    if component.num_let_go:
        broken.append(f"{component.num_let_go} {kind}s were let go and freed by nobody")
    return broken
