"""What the tiers below one cache are made of, put together."""

from __future__ import annotations

import itertools

from app.caches.base import CacheDeps
from app.caches.component_cache import ComponentCache
from app.caches.tiers.backups import Backups
from app.caches.tiers.counters import TierTally
from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.host_tree import HostTree
from app.caches.tiers.needs import Needs
from app.caches.tiers.ports import TierParts
from app.caches.tiers.restores import Restores
from app.caches.tiers.storage_tier import StorageTier
from app.caches.tiers.tiers import Tiers
from app.config.model_config import Component
from app.core.keys import Namespace


def build_tiers(device: ComponentCache, deps: CacheDeps, parts: TierParts) -> Tiers:
    """Below `device`, which was made of `deps`. ConfigError if a pool is missing that the model's components need."""
    needs = Needs(
        page_size=deps.page_size,
        window=deps.sliding_window if Component.SWA in deps.components else None,
        has_states=Component.RECURRENT in deps.components,
    )
    host = HostCache(HostTree(_host_deps(deps, parts), parts.storage_seed or Namespace.seed), needs)
    numbers = itertools.count(1)
    tally = TierTally()
    storage = StorageTier(
        host=host,
        needs=needs,
        seed=parts.storage_seed,
        settings=parts.settings,
        numbers=numbers,
        clock=deps.clock,
        events=parts.storage_events,
    )
    backups = Backups(
        device=device,
        host=host,
        needs=needs,
        settings=parts.settings,
        limits=parts.limits,
        numbers=numbers,
        tally=tally,
    )
    restores = Restores(
        device=device,
        host=host,
        needs=needs,
        settings=parts.settings,
        limits=parts.limits,
        numbers=numbers,
        tally=tally,
    )
    return Tiers(device=device, host=host, backups=backups, restores=restores, storage=storage, tally=tally)


def _host_deps(deps: CacheDeps, parts: TierParts) -> CacheDeps:
    """The same model over the host's pools. Nobody observes evictions there."""
    return CacheDeps(
        token_allocator=parts.token_allocator,
        device_pool=deps.device_pool,
        components=deps.components,
        sliding_window=deps.sliding_window,
        window_allocator=parts.window_allocator,
        state_allocator=parts.state_allocator,
        page_size=deps.page_size,
        tp_rank=deps.tp_rank,
        tp_size=deps.tp_size,
        events=parts.host_events,
        clock=deps.clock,
    )
