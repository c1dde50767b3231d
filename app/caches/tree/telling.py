"""What a tree tells others of its nodes as they come and go."""

from __future__ import annotations

from collections.abc import Callable

from app.caches.base import EVICTED_HEAD_TOKENS, EventSink, EvictionObserver
from app.caches.tree.node import TreeNode
from app.core.keys import TOKEN_BYTES, Namespace, page_hashes


def announce(
    events: EventSink, parent: TreeNode, leaf: TreeNode, seed: Callable[[Namespace], bytes], page_size: int
) -> None:
    """A new leaf, which gets its hashes here; `seed` starts the chain of its namespace."""
    above = parent.hashes[-1] if parent.hashes else None
    leaf.hashes = page_hashes(above or seed(leaf.namespace), leaf.edge, page_size)
    events.stored(namespace=leaf.namespace, parent_hash=above, page_hashes=leaf.hashes, raw=leaf.edge)


def tell_eviction(observer: EvictionObserver, leaf: TreeNode, now: float) -> None:
    """A leaf that is about to be cut off."""
    observer.evicted(
        num_tokens=len(leaf.edge) // TOKEN_BYTES,
        prefix_tokens=leaf.start,
        idle_s=now - leaf.used_at,
        hits=leaf.hits,
        head=leaf.edge[: EVICTED_HEAD_TOKENS * TOKEN_BYTES],
    )
