"""A prefix tree with the components of a model, over the pools of one tier.

The tree's full pages name its places; a model without full-attention layers has such page ids too, and they cost it no
memory. See docs/caches.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from app.caches.base import NO_PAGES, CacheDeps, InsertResult, LockReceipt
from app.caches.radix_cache import RadixCache
from app.caches.tiers.span import Span
from app.caches.tree.components.base import Offer, TreeComponent
from app.caches.tree.components.recurrent import StateComponent
from app.caches.tree.components.swa import WindowComponent
from app.caches.tree.eviction import Leaving, evict_parts, nobody_watches
from app.caches.tree.node import TreeNode
from app.caches.tree.policies.choice import make_eviction_order
from app.caches.tree.reading import num_present, span_above, span_of_key
from app.config.model_config import Component
from app.core.keys import Namespace, RadixKey
from app.core.ports import TokenAllocator
from app.errors import ConfigError

_Given = TypeVar("_Given")


class ComponentCache(RadixCache):
    """A RadixCache whose tree also has the components of the model. With FULL alone, it is one."""

    def __init__(
        self,
        deps: CacheDeps,
        *,
        leaving: Leaving = nobody_watches,
        seed: Callable[[Namespace], bytes] = Namespace.seed,
    ) -> None:
        """ConfigError if a component's allocator, or the window, is missing. leaving, seed: as RadixCache has them."""
        pools: list[tuple[TreeComponent, TokenAllocator]] = []
        self._window: WindowComponent | None = None
        self._states: StateComponent | None = None
        if Component.SWA in deps.components:
            allocator = _given("window_allocator", deps.window_allocator)
            self._window = WindowComponent(
                capacity=allocator.capacity,
                order=make_eviction_order(deps.eviction_policy),
                window=_given("sliding_window", deps.sliding_window),
                page_size=deps.page_size,
            )
            pools.append((self._window, allocator))
        if Component.RECURRENT in deps.components:
            allocator = _given("state_allocator", deps.state_allocator)
            self._states = StateComponent(capacity=allocator.capacity, order=make_eviction_order(deps.eviction_policy))
            pools.append((self._states, allocator))
        super().__init__(deps, pools, leaving=leaving, seed=seed)

    @property
    def evictable_window_pages(self) -> int:
        return self._held_evictable(self._window)

    @property
    def protected_window_pages(self) -> int:
        return self._held_protected(self._window)

    @property
    def evictable_states(self) -> int:
        return self._held_evictable(self._states)

    @property
    def protected_states(self) -> int:
        return self._held_protected(self._states)

    def insert(
        self,
        key: RadixKey,
        pages: np.ndarray,
        window_pages: np.ndarray = NO_PAGES,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        """As the base says.

        OwnershipError, and no change, if anything to adopt, of whichever pool, is cached already under other tokens.
        ValueError for too few window pages, for a gap in them, or for a snapshot of a key that ends within a page.
        """
        if not self._pools:
            return super().insert(key, pages, after=after)
        tree = self._tree()
        locked = tree.receipts.held_by(after) if after else None
        first = locked.end // self.page_size if locked else 0
        return tree.insert(key, pages, self._offers(key, window_pages, first, state), locked)

    def unlock_window(self, receipt: LockReceipt) -> None:
        """As the base says. StaleHandleError for a receipt that `unlock` would refuse."""
        self._tree().receipts.check(receipt)
        if self._window is not None:
            self._window.unlock(receipt.number)

    def evict_window(self, num_pages: int) -> int:
        return self._evict_parts(self._window, num_pages)

    def evict_states(self, num_states: int) -> int:
        return self._evict_parts(self._states, num_states)

    def cached_window_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        return self._held_ids(self._window)

    def cached_states(self) -> tuple[np.ndarray, np.ndarray]:
        return self._held_ids(self._states)

    def catch_up(self) -> None:
        """Reset, if the pool was lost, as any other call would."""
        self._tree()

    def num_present(self, key: RadixKey) -> int:
        """Pages of `key` that are cached, usable or not. Changes nothing. O(len(key))."""
        return num_present(self._tree(), key)

    def span(self, key: RadixKey, first: int) -> Span:
        """What is cached of `key` from page index `first` on, usable or not. Changes nothing. O(len(key))."""
        return span_of_key(self._tree(), key, first, self._window, self._states)

    def span_to(self, node: TreeNode, first: int) -> Span:
        """What is cached of the path to the end of one of the tree's nodes, from page index `first` on."""
        return span_above(node, node.end // self.page_size, first, self.page_size, self._window, self._states)

    def _offers(self, key: RadixKey, window_pages: np.ndarray, first: int, state: int) -> list[Offer]:
        offers: list[Offer] = []
        num_pages, rest = divmod(key.num_tokens, self.page_size)
        if self._window is not None:
            if window_pages.size < num_pages:
                raise ValueError(f"{window_pages.size} window pages for a key of {num_pages} whole pages")
            # A match leaves a token to compute, and ends where there is a snapshot.
            match_end = num_pages if rest or self._states is not None else num_pages - 1
            offers.append(self._window.offer(window_pages[:num_pages], first, match_end))
        if self._states is not None:
            if state and rest:
                raise ValueError(f"snapshot {state} of {key.num_tokens} tokens, which are not whole pages")
            offers.append(self._states.offer(state, key.num_tokens))
        return offers

    def _evict_parts(self, component: TreeComponent | None, count: int) -> int:
        tree = self._tree()
        if component is None:
            return 0
        pages = evict_parts(tree, component, count, self._leaving)
        num_ids = component.num_let_go
        self._free(pages)
        return num_ids

    def _held_evictable(self, component: TreeComponent | None) -> int:
        self._tree()
        return 0 if component is None else component.evictable

    def _held_protected(self, component: TreeComponent | None) -> int:
        self._tree()
        return 0 if component is None else component.protected

    def _held_ids(self, component: TreeComponent | None) -> tuple[np.ndarray, np.ndarray]:
        self._tree()
        return (NO_PAGES, NO_PAGES) if component is None else component.ids()


def _given(name: str, value: _Given | None) -> _Given:
    if value is None:
        raise ConfigError(
            field=name, value=None, allowed="what the model's components need: this cache cannot do without"
        )
    return value
