"""From registered cache types to the arms of the container's Selector."""

from __future__ import annotations

from dependency_injector import providers

from app.caches.base import BasePrefixCache, CacheDeps
from app.caches.registry import SealedCacheTypeRegistry


def cache_arms(
    registry: SealedCacheTypeRegistry, deps: providers.Provider[CacheDeps]
) -> dict[str, providers.Provider[BasePrefixCache]]:
    """One provider for each registered type; each builds its cache once, from `deps` alone."""
    return {each.name: providers.ThreadSafeSingleton(each.ctor, deps) for each in registry}
