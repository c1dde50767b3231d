"""Prefix cache for models whose every layer attends to every token; unified_radix_cache.py builds on it for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from app.caches.base import NO_PAGES, BasePrefixCache, CacheDeps, InsertResult, LockReceipt, MatchResult
from app.caches.inspection import Miss, TopPrefixes
from app.caches.registry import register_kv_cache
from app.caches.tree import inspection
from app.caches.tree.components.base import TreeComponent
from app.caches.tree.core import TreeCore
from app.caches.tree.eviction import Leaving, evict_pages, nobody_watches
from app.caches.tree.integrity import check_tree
from app.caches.tree.policies.choice import make_eviction_order
from app.caches.tree.reading import page_ids
from app.config.model_config import Component
from app.core.keys import Namespace, RadixKey
from app.core.ports import TokenAllocator
from app.errors import LockedPageError


class RadixCache(BasePrefixCache):
    """One TreeCore over one pool; what the tree lets go of is freed through the allocator's port.

    If the pool was lost, flushed or reopened since the last call, whatever that call is finds an empty cache: pages of
    a dead pool are never served.
    """

    def __init__(
        self,
        deps: CacheDeps,
        pools: Sequence[tuple[TreeComponent, TokenAllocator]] = (),
        *,
        leaving: Leaving = nobody_watches,
        seed: Callable[[Namespace], bytes] = Namespace.seed,
    ) -> None:
        """`pools`: for each component that the tree has beside full pages, where its ids come from and go back to.

        leaving: told of what eviction takes; not of what a flush takes. seed: as TreeCore has it.
        """
        super().__init__(deps)
        self._pools = pools
        self._leaving = leaving
        self._identity = deps.token_allocator.identity
        self._live_tree = TreeCore(
            capacity=deps.token_allocator.capacity,
            page_size=deps.page_size,
            order=make_eviction_order(deps.eviction_policy),
            clock=deps.clock,
            components=tuple(component for component, _ in pools),
            events=deps.events,
            seed=seed,
            observer=deps.eviction_observer,
        )

    @property
    def reuses_prefixes(self) -> bool:
        return True

    @property
    def evictable_pages(self) -> int:
        return self._tree().evictable_pages

    @property
    def protected_pages(self) -> int:
        return self._tree().protected_pages

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, without the roots of namespaces."""
        return self._tree().num_nodes

    def match(self, key: RadixKey) -> MatchResult:
        return self._tree().match(key)

    def probe(self, key: RadixKey) -> int:
        return self._tree().probe(key)

    def lock(self, found: MatchResult | InsertResult) -> LockReceipt:
        return self._tree().lock(found)

    def unlock(self, receipt: LockReceipt) -> None:
        pages = self._tree().unlock(receipt)
        if pages.size:
            self._free(pages)

    def relock(self, receipt: LockReceipt, found: InsertResult) -> LockReceipt:
        """As the base says; the receipt stays the same. ValueError for what does not continue the prefix it keeps."""
        self._tree().relock(receipt, found)
        return receipt

    def insert(
        self,
        key: RadixKey,
        pages: np.ndarray,
        window_pages: np.ndarray = NO_PAGES,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        """As the base says. OwnershipError, and no change, if a page to adopt is cached already under other tokens, or
        if `after` keeps other tokens than `key` begins with. StaleHandleError, and no change, if it is stale.
        """
        tree = self._tree()
        return tree.insert(key, pages, (), tree.receipts.held_by(after) if after else None)

    def evict(self, num_pages: int) -> int:
        return self._evict_pages(num_pages, self._leaving)

    def cached_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        return page_ids(self._tree())

    def top_prefixes(self, limit: int) -> TopPrefixes:
        return inspection.top_prefixes(self._tree(), limit)

    def explain_miss(self, key: RadixKey, num_matched: int) -> Miss:
        return inspection.explain_miss(self._tree(), key, num_matched)

    def reset(self) -> None:
        self._identity = self.token_allocator.identity
        self._live_tree.reset()

    def flush(self) -> int:
        tree = self._tree()
        if tree.protected_pages:
            raise LockedPageError(pages=tuple(page_ids(tree)[1].tolist()))
        return self._evict_pages(tree.evictable_pages, nobody_watches)

    def check_integrity(self) -> None:
        check_tree(self._tree(), page_size=self.page_size)

    def _tree(self) -> TreeCore:
        """The tree, emptied first if its pages belonged to a pool that is gone.

        A runtime makes all pools at once, so the identity of one tells of all.
        """
        if self.token_allocator.identity != self._identity:
            self.reset()
        return self._live_tree

    def _evict_pages(self, num_pages: int, leaving: Leaving) -> int:
        pages = evict_pages(self._tree(), num_pages, leaving)
        self._free(pages)
        return int(pages.size)

    def _free(self, pages: np.ndarray) -> None:
        """Give back full pages that left the tree, and all that components let go of."""
        if pages.size:
            self.token_allocator.free(pages)
        for component, allocator in self._pools:
            let_go = component.take_let_go()
            if let_go.size:
                allocator.free(let_go)


register_kv_cache("radix_cache", RadixCache, components=[frozenset({Component.FULL})], builtin=True)
