"""The cache that keeps nothing: for decode nodes, whose prefixes were computed elsewhere, and as a baseline."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from app.caches.base import (
    NO_PAGES,
    NOTHING_PUBLISHED,
    BasePrefixCache,
    CacheDeps,
    InsertResult,
    LockReceipt,
    MatchResult,
)
from app.caches.receipts import ReceiptBook
from app.caches.registry import register_kv_cache
from app.config.model_config import Component
from app.core.keys import RadixKey


class ChunkCache(BasePrefixCache):
    """Matches nothing and adopts nothing: a request owns all of its pages from start to end.

    Receipts are as strict as those of a cache that keeps something, so that a caller's mistake shows here too.
    """

    def __init__(self, deps: CacheDeps) -> None:
        super().__init__(deps)
        self._identity = deps.token_allocator.identity
        self._receipts: ReceiptBook[None] = ReceiptBook()

    @property
    def reuses_prefixes(self) -> bool:
        return False

    @property
    def evictable_pages(self) -> int:
        return 0

    @property
    def protected_pages(self) -> int:
        return 0

    def match(self, key: RadixKey) -> MatchResult:
        return MatchResult(NO_PAGES, 0, None)

    def probe(self, key: RadixKey) -> int:
        return 0

    def lock(self, found: MatchResult | InsertResult) -> LockReceipt:
        """A receipt for nothing; give it back all the same."""
        self._void_if_pool_is_gone()
        return self._receipts.issue(None)

    def unlock(self, receipt: LockReceipt) -> None:
        self._void_if_pool_is_gone()
        self._receipts.redeem(receipt)

    def insert(
        self,
        key: RadixKey,
        pages: np.ndarray,
        window_pages: np.ndarray = NO_PAGES,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        """Publishes 0 tokens: every page stays the caller's."""
        return NOTHING_PUBLISHED

    def evict(self, num_pages: int) -> int:
        return 0

    def cached_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        return NO_PAGES, NO_PAGES

    def reset(self) -> None:
        self._identity = self.token_allocator.identity
        self._receipts.void()

    def flush(self) -> int:
        return 0

    def check_integrity(self) -> None:
        """Nothing is kept, so nothing can break."""

    def _void_if_pool_is_gone(self) -> None:
        if self.token_allocator.identity != self._identity:
            self.reset()


_EVERY_SET = [frozenset(chosen) for size in (1, 2, 3) for chosen in combinations(Component, size)]

register_kv_cache("chunk_cache", ChunkCache, components=_EVERY_SET, builtin=True)
