"""One prefix cache for every model, and the tiers below its device pool, where it is given some."""

from __future__ import annotations

import numpy as np

from app.caches.base import NO_PAGES, CacheDeps, InsertResult, LockReceipt, MatchResult
from app.caches.component_cache import ComponentCache
from app.caches.registry import register_kv_cache
from app.caches.tiers.building import build_tiers
from app.caches.tiers.listening import NOBODY_LISTENS, TierListener
from app.caches.tiers.ports import NO_TIERS, CacheTiers
from app.caches.tree.node import TreeNode
from app.config.model_config import Component
from app.core.keys import Namespace, RadixKey


class UnifiedRadixCache(ComponentCache):
    """A ComponentCache that tells the tiers below what it publishes, matches and lets go.

    A flush forgets what is on the host too; a reset, when only the device pool is gone, does not.
    """

    takes_host_tier = True

    def __init__(self, deps: CacheDeps) -> None:
        parts = None if deps.host_tier is None else deps.host_tier()
        self._tiers: CacheTiers = NO_TIERS
        self._listener: TierListener = NOBODY_LISTENS
        if parts is None:
            super().__init__(deps)
            return
        super().__init__(deps, leaving=self._tell_leaving, seed=parts.storage_seed or Namespace.seed)
        self._tiers = self._listener = build_tiers(self, deps, parts)

    @property
    def tiers(self) -> CacheTiers:
        return self._tiers

    def match(self, key: RadixKey) -> MatchResult:
        found = super().match(key)
        self._listener.matched(key, found)
        return found

    def insert(
        self,
        key: RadixKey,
        pages: np.ndarray,
        window_pages: np.ndarray = NO_PAGES,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        result = super().insert(key, pages, window_pages, state, after)
        self._listener.published(key, result, pages)
        return result

    def reset(self) -> None:
        super().reset()
        self._tiers.reset_device()

    def flush(self) -> int:
        freed = super().flush()
        self._tiers.flush()
        return freed

    def _tell_leaving(self, node: TreeNode) -> None:
        self._listener.leaving(node)


_FULL, _SWA, _RECURRENT = Component.FULL, Component.SWA, Component.RECURRENT

register_kv_cache(
    "unified_radix_cache",
    UnifiedRadixCache,
    components=[
        frozenset({_FULL}),
        frozenset({_SWA}),
        frozenset({_RECURRENT}),
        frozenset({_FULL, _SWA}),
        frozenset({_FULL, _RECURRENT}),
        frozenset({_FULL, _SWA, _RECURRENT}),
    ],
    builtin=True,
)
