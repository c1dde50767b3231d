"""What a TreeCore says about itself. Reads only: no recency changes, nothing is split."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

import numpy as np

from app.caches.inspection import CONTEXT_TOKENS, CachedPrefix, Miss, TopPrefixes, miss_by_length
from app.caches.tree.core import TreeCore
from app.caches.tree.node import TreeNode
from app.caches.tree.place import cut_to_usable, descend
from app.config.model_config import Component
from app.core.keys import TOKEN_BYTES, Namespace, RadixKey

VISITED_NODES = 4096
HEAD_TOKENS = 24
TAIL_TOKENS = 8

# Bounds of explaining one miss. What is compared in other namespaces is also at most so many times the prompt.
NAMESPACES = 64
CHILDREN = 256
COMPARISONS = 4


def top_prefixes(tree: TreeCore, limit: int) -> TopPrefixes:
    """The `limit` prefixes that saved most tokens; of those that saved equally much, the longest nodes.

    O(4096 nodes, and the depth of each that is shown).
    """
    nodes = list(islice(_most_recent(tree), VISITED_NODES))
    best = nlargest(limit, nodes, key=lambda node: (node.hits * len(node.edge), len(node.edge)))
    now = tree.clock()
    return TopPrefixes(tuple(_described(node, now) for node in best), len(nodes), tree.num_nodes)


def explain_miss(tree: TreeCore, key: RadixKey, num_matched: int) -> Miss:
    """Why the cached part of `key` ended after `num_matched` tokens. Ask before the tree changes again.

    If the tree can serve less of it by now, the answer is for that. O(tokens of the key), and at most 256 children of
    one node and 64 other namespaces.
    """
    told = miss_by_length(key, num_matched, tree.page_size)
    if told is not None:
        return told
    usable = tree.probe(key)
    num_matched = min(num_matched, usable)
    place = _place(tree, key, num_matched * TOKEN_BYTES)
    page = key.raw[place.end : place.end + tree.page_bytes]
    miss = Miss(
        reason="ends" if place.end else "unseen",
        prompt_tokens=key.num_tokens,
        num_matched=place.end // TOKEN_BYTES,
        page_size=tree.page_size,
    )
    if page in place.first_pages:
        if usable > num_matched:
            return replace(miss, reason="late")
        return replace(miss, reason="incomplete", lacking=_lacking(tree, key, num_matched))
    evicted_at = None if place.serial is None else tree.evicted.when(place.serial, page)
    if evicted_at is not None:
        return replace(miss, reason="evicted", evicted_s_ago=tree.clock() - evicted_at)
    fields = _fields_in_the_way(tree, key, place.end + len(page))
    if fields:
        return replace(miss, reason="other_namespace", other_fields=fields)
    return _with_difference(miss, key.raw, page, place)


def _lacking(tree: TreeCore, key: RadixKey, num_matched: int) -> tuple[Component, ...]:
    """Which components, of a prefix that is cached beyond `num_matched` tokens, have no more that they could serve.

    All of them, if each alone could serve more, but none the same.
    """
    limit = (key.num_tokens - 1) // tree.page_size * tree.page_bytes
    place = descend(tree.roots[key.namespace], key.raw, limit, tree.page_bytes)
    num_pages = place[1] // tree.page_bytes + place[3]
    served = {
        component.component: cut_to_usable(place, [component], num_pages, tree.page_size)[1] * tree.page_size
        for component in tree.components
    }
    return tuple(component for component, usable in served.items() if usable <= num_matched) or tuple(served)


class _Place(NamedTuple):
    """Where a prompt's cached part ends: after `end` bytes.

    serial: of the node that ends there; None within an edge, after which nothing can have been evicted.
    first_pages: by which pages the cached prompts go on from there.
    edges: how they go on, the latest first; at most CHILDREN of them, each with its first page and more if it has more.
    """

    end: int
    serial: int | Namespace | None
    first_pages: Container[bytes]
    edges: list[bytes]


def _place(tree: TreeCore, key: RadixKey, limit: int) -> _Place:
    root = tree.roots.get(key.namespace)
    if root is None:
        return _Place(0, key.namespace, (), [])
    node, end, partial, shared = descend(root, key.raw, limit, tree.page_bytes)
    if partial is None:
        latest = islice(reversed(node.children.values()), CHILDREN)
        return _Place(end, node.serial, node.children, [child.edge for child in latest])
    rest = partial.edge[shared * tree.page_bytes :]
    return _Place(end + shared * tree.page_bytes, None, (rest[: tree.page_bytes],), [rest])


def _fields_in_the_way(tree: TreeCore, key: RadixKey, end: int) -> tuple[str, ...]:
    """In which fields a namespace that has key.raw[:end] differs from the key's; empty if none has it, within bounds.

    Of several namespaces, the one that differs in the fewest.
    """
    least: tuple[str, ...] = ()
    left = COMPARISONS * end
    for namespace, root in islice(tree.roots.items(), NAMESPACES):
        if namespace == key.namespace:
            continue
        _, reached, _, shared = descend(root, key.raw, end, tree.page_bytes)
        reached += shared * tree.page_bytes
        if reached >= end:
            fields = zip(Namespace._fields, namespace, key.namespace, strict=True)
            differing = tuple(name for name, theirs, ours in fields if theirs != ours)
            least = min(least or differing, differing, key=len)
        left -= reached
        if left <= 0 or len(least) == 1:
            break
    return least


def _with_difference(miss: Miss, raw: bytes, page: bytes, place: _Place) -> Miss:
    """The miss, with the cached prompt that stays equal longest within `page`, if there is one."""
    if not place.edges:
        return miss
    firsts = np.frombuffer(b"".join(edge[: len(page)] for edge in place.edges), np.int32).reshape(len(place.edges), -1)
    runs = (firsts != np.frombuffer(page, np.int32)).argmax(axis=1)  # none is equal: it would have been matched
    closest = int(runs.argmax())
    run = int(runs[closest]) * TOKEN_BYTES
    differs_at = place.end + run
    if differs_at == 0:
        return miss
    context = CONTEXT_TOKENS * TOKEN_BYTES
    return replace(
        miss,
        reason="differs",
        same_tokens=differs_at // TOKEN_BYTES,
        same=_ids(raw[max(0, differs_at - context) : differs_at]),
        prompt_goes_on=_ids(raw[differs_at : differs_at + context]),
        cached_goes_on=_ids(place.edges[closest][run : run + context]),
    )


def _most_recent(tree: TreeCore) -> Iterator[TreeNode]:
    """Every node once: the locked ones, then the others, last to be evicted first."""
    seen: set[TreeNode] = set()
    for holder in tree.receipts.held():
        node = holder
        while node is not None and node.parent is not None and node not in seen:
            seen.add(node)
            yield node
            node = node.parent
    yield from reversed(tree.order)


def _described(node: TreeNode, now: float) -> CachedPrefix:
    edges = _edges_upwards(node)
    head_tokens = min(HEAD_TOKENS, node.end)
    tail_tokens = min(TAIL_TOKENS, node.end - head_tokens)
    return CachedPrefix(
        num_tokens=node.end,
        node_tokens=node.end - node.start,
        hits=node.hits,
        locked=node.lock_ref > 0,
        idle_s=0.0 if node.lock_ref else now - node.used_at,
        namespace=node.namespace,
        head=_ids(_first(reversed(edges), head_tokens * TOKEN_BYTES)),
        tail=_ids(_last(edges, tail_tokens * TOKEN_BYTES)),
    )


def _edges_upwards(node: TreeNode) -> list[bytes]:
    edges = []
    at: TreeNode | None = node
    while at is not None:
        edges.append(at.edge)
        at = at.parent
    return edges


def _first(edges: Iterable[bytes], size: int) -> bytes:
    head = b""
    for edge in edges:
        if len(head) == size:
            break
        head += edge[: size - len(head)]
    return head


def _last(edges: Iterable[bytes], size: int) -> bytes:
    tail = b""
    for edge in edges:
        if len(tail) == size:
            break
        tail = edge[len(tail) - size :] + tail
    return tail


def _ids(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, np.int32).tolist())
