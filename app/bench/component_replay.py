"""A trace replayed against a prefix cache with sliding-window or recurrent components, over their real allocators.

A request is published as chunked prefill would: at the end of every chunk of its prompt, with the chunk's window pages
and a snapshot of that place, and once more with its output. What its window has passed, it gives up at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from app.bench.tree import IDENTITY, NewReplay, TraceReplay, deps_of, full_pages_replay, known_type, left_over, reserve
from app.caches.base import NO_PAGES
from app.caches.registry import CacheType
from app.config.model_config import Component
from app.core.keys import RadixKey
from app.core.sliding_window import first_needed_page
from app.errors import ConfigError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator

CHUNK_TOKENS = 16_384
WINDOW_TOKENS = 1024
WINDOW_POOL_PART = 4  # the full pool has so many times the pages of the window pool
_COMPONENTS = {component.value: component for component in Component}


def components_named(names: str) -> frozenset[Component]:
    """Of "full,swa" and the like. ConfigError for a name that is none."""
    try:
        return frozenset(_COMPONENTS[name.strip()] for name in names.split(","))
    except KeyError:
        raise ConfigError(
            field="--components", value=names, allowed=f"{', '.join(_COMPONENTS)}, with commas between"
        ) from None


def replay_of(components: frozenset[Component]) -> NewReplay:
    """The replay for a model with these components."""
    if components == {Component.FULL}:
        return full_pages_replay
    return lambda cache_type, num_pages, page_size, eviction_policy: ComponentReplay(
        known_type(cache_type), components, num_pages, page_size, eviction_policy
    )


class ComponentReplay(TraceReplay):
    """As TraceReplay, with the window pages and the snapshots that requests take, publish and free."""

    def __init__(
        self,
        cache_type: CacheType,
        components: frozenset[Component],
        num_pages: int,
        page_size: int,
        eviction_policy: str = "lru",
    ) -> None:
        """Empty pools: `num_pages` full pages, a part of that for windows, and two snapshots a chunk of the full pool.

        ConfigError for components that the type does not cover.
        """
        if components not in cache_type.components:
            held = sorted("+".join(each.value for each in Component if each in held) for held in cache_type.components)
            raise ConfigError(
                field="--components",
                value=",".join(each.value for each in Component if each in components),
                allowed=f"{cache_type.name} holds {', '.join(held)}",
            )
        pages_a_chunk = -(-CHUNK_TOKENS // page_size)
        self._windows = _pool(
            max(num_pages // WINDOW_POOL_PART, 2 * pages_a_chunk + 2 * WINDOW_TOKENS // page_size),
            page_size,
            wanted=Component.SWA in components,
        )
        self._snapshots = _pool(2 + 2 * num_pages // pages_a_chunk, 1, wanted=Component.RECURRENT in components)
        allocator = PagedTokenToKVPoolAllocator(num_pages, page_size, IDENTITY)
        deps = replace(
            deps_of(allocator, eviction_policy),
            components=components,
            sliding_window=WINDOW_TOKENS,
            window_allocator=None if self._windows is None else self._windows.port,
            state_allocator=None if self._snapshots is None else self._snapshots.port,
        )
        super().__init__(cache_type.ctor(deps), allocator)

    def _cycle(self, prompt: np.ndarray, settled: np.ndarray) -> int:
        cache, page_size = self.cache, self.cache.page_size
        key = RadixKey.of(settled)
        prompt_key = key.head(prompt.size)

        found = self._timed("match", lambda: cache.match(prompt_key))
        receipt = cache.lock(found)
        pages, window = found.pages, found.window_pages
        chunk_ends = range((found.num_tokens // CHUNK_TOKENS + 1) * CHUNK_TOKENS, prompt.size, CHUNK_TOKENS)
        for end in (*chunk_ends, settled.size):
            num_pages, shared = end // page_size, pages.size
            taken = self._take(self.allocator, -(-end // page_size) - pages.size, cache.evict)
            pages = np.concatenate([pages, taken])
            window = np.concatenate([window, self._take(self._windows, num_pages - window.size, cache.evict_window)])
            state = self._take(self._snapshots, 1, cache.evict_states)
            snapshot = int(state[0]) if state.size else 0
            insert = partial(cache.insert, key.head(num_pages * page_size), pages, window, snapshot, receipt)
            published = self._timed("insert", insert)
            behind = slice(shared - published.first, None)
            cached, cached_window = published.pages[behind], published.window_pages[behind]
            self.allocator.port.free(left_over(pages[shared:], cached))
            if self._windows is not None:
                self._windows.port.free(left_over(window[shared:], cached_window))
            if self._snapshots is not None and not published.state_adopted:
                self._snapshots.port.free(state)
            if end < settled.size and published.num_tokens > shared * page_size:
                receipt = self._timed("relock", partial(cache.relock, receipt, published))
            pages = np.concatenate([pages[:shared], cached])
            window = np.concatenate([window[:shared], cached_window])
            window[: first_needed_page(published.num_tokens, WINDOW_TOKENS, page_size)] = 0
        self._timed("unlock", lambda: cache.unlock(receipt))
        return found.num_tokens

    def _take(
        self, allocator: PagedTokenToKVPoolAllocator | None, count: int, evict: Callable[[int], int]
    ) -> np.ndarray:
        """`count` ids out of a pool, after evicting what is short; none from a pool that is not there."""
        if allocator is None or count <= 0:
            return NO_PAGES
        shortfall = count - allocator.port.available()
        if shortfall > 0:
            self._timed(evict.__name__, lambda: evict(shortfall))
        return reserve(allocator, count)


def _pool(num_pages: int, page_size: int, *, wanted: bool) -> PagedTokenToKVPoolAllocator | None:
    return PagedTokenToKVPoolAllocator(num_pages, page_size, IDENTITY) if wanted else None
