"""A prefix cache as a flat list, slow and plain, to compare the real tree with; and a cache with a pool to try on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.caches.base import NO_PAGES, BasePrefixCache, CacheDeps, EventSink, EvictionObserver, InsertResult, LockReceipt
from app.caches.builtin import load_builtin_caches
from app.caches.registry import default_registry
from app.config.model_config import Component
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, page_hashes
from app.core.ports import PoolSpec
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator

Page = tuple[int, ...]


def identity(generation: int = 0) -> CacheIdentity:
    return CacheIdentity(RuntimeId("test"), Generation(generation))


def key_of(tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> RadixKey:
    return RadixKey.of(np.array(tokens, np.int32).ravel(), namespace)


@dataclass(frozen=True)
class ShapeOnlyPool:
    spec: PoolSpec


class CacheRig:
    """A registered cache over pools of its own, and the little that a runtime does for it.

    window: W of a SWA component, in tokens.
    """

    def __init__(
        self,
        cache_type: str,
        *,
        components: frozenset[Component] = frozenset({Component.FULL}),
        window: int = 8,
        num_pages: int = 64,
        page_size: int = 4,
        events: EventSink | None = None,
        eviction_observer: EvictionObserver | None = None,
        eviction_policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        load_builtin_caches()
        self.page_size = page_size
        self.window = window
        self.allocator = PagedTokenToKVPoolAllocator(num_pages, page_size, identity())
        self.window_allocator = PagedTokenToKVPoolAllocator(num_pages, page_size, identity())
        self.state_allocator = PagedTokenToKVPoolAllocator(num_pages, 1, identity())
        self.has_window = Component.SWA in components
        self.has_states = Component.RECURRENT in components
        spec = PoolSpec(
            num_pages=num_pages, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
        )
        self.deps = CacheDeps(
            token_allocator=self.allocator.port,
            device_pool=ShapeOnlyPool(spec),
            components=components,
            sliding_window=window if self.has_window else None,
            window_allocator=self.window_allocator.port if self.has_window else None,
            state_allocator=self.state_allocator.port if self.has_states else None,
            page_size=page_size,
            events=events,
            eviction_observer=eviction_observer,
            eviction_policy=eviction_policy,
            clock=clock,
        )
        self.cache: BasePrefixCache = default_registry.seal().get(cache_type).ctor(self.deps)

    def take(self, num_pages: int) -> np.ndarray:
        """Pages for a request, as a prepared batch would give them."""
        return _take(self.allocator, num_pages)

    def take_window(self, num_pages: int) -> np.ndarray:
        return _take(self.window_allocator, num_pages)

    def take_state(self) -> int:
        return int(_take(self.state_allocator, 1)[0])

    def store(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> InsertResult:
        """A request that computed `tokens` without looking, published them and ended, so that the rest is freed."""
        key = key_of(tokens, namespace)
        own = self.take(-(-len(key) // self.page_size))
        result = self.publish(key, own)
        self.free_what_was_not_adopted(own, result)
        return result

    def publish(self, key: RadixKey, own: np.ndarray) -> InsertResult:
        """Insert with all that the components can hold, of which what the cache does not take is freed.

        Window pages for every page, and a snapshot of every page's end: so any prefix can be used.
        """
        num_pages = len(key) // self.page_size
        if not self.has_states or num_pages == 0:
            return self.publish_once(key, own)
        for end in range(1, num_pages + 1):
            result = self.publish_once(
                key.head(end * self.page_size), own, first_window_page=end - 1, state=self.take_state()
            )
        return result

    def publish_once(
        self,
        key: RadixKey,
        own: np.ndarray,
        *,
        first_window_page: int = 0,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        """One insert, with window pages from that page index on and that snapshot."""
        num_pages = len(key) // self.page_size
        window = np.zeros(num_pages if self.has_window else 0, np.int32)
        first_window_page = min(first_window_page, window.size)
        window[first_window_page:] = self.take_window(window.size - first_window_page)
        result = self.cache.insert(key, own, window, state, after)
        kept = np.zeros_like(window)
        kept[result.first : result.first + result.window_pages.size] = result.window_pages
        self.window_allocator.port.free(window[(window != kept) & (window != 0)])
        if state and not result.state_adopted:
            self.state_allocator.port.free(np.array([state], np.int32))
        return result

    def free_what_was_not_adopted(self, own: np.ndarray, result: InsertResult) -> None:
        published = result.pages.size
        duplicates = own[:published][own[:published] != result.pages]
        self.allocator.port.free(np.concatenate([duplicates, own[published:]]))

    def matched(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        return self.cache.match(key_of(tokens, namespace)).num_tokens

    def lose_pool(self) -> None:
        """What a runtime does when its pools are gone."""
        gone = identity(self.allocator.identity.generation + 1)
        for allocator in (self.allocator, self.window_allocator, self.state_allocator):
            allocator.reset(gone)

    def check(
        self,
        held_by_requests: np.ndarray = NO_PAGES,
        held_window_pages: np.ndarray = NO_PAGES,
        held_states: np.ndarray = NO_PAGES,
    ) -> None:
        """Every owner's invariants, and the ledgers: each id has one owner, and all are there."""
        self.cache.check_integrity()
        _check_ledger(self.allocator, *self.cache.cached_page_ids(), held_by_requests)
        _check_ledger(self.window_allocator, *self.cache.cached_window_page_ids(), held_window_pages)
        _check_ledger(self.state_allocator, *self.cache.cached_states(), held_states)


def _take(allocator: PagedTokenToKVPoolAllocator, num_pages: int) -> np.ndarray:
    allocator.apply_frees(allocator.port.recorded_frees())
    return allocator.allocate(num_pages)


def _check_ledger(allocator: PagedTokenToKVPoolAllocator, *owners: np.ndarray) -> None:
    allocator.check_integrity()
    assert np.array_equal(np.sort(np.concatenate(owners)), allocator.held_page_ids()), "leaked, or double owned"


@dataclass(eq=False)
class ListNode:
    """`path`: the pages of tokens from the start of the prefix to the node's end; its own begin at `first`."""

    namespace: Namespace
    path: tuple[Page, ...]
    first: int
    pages: list[int]

    def covers(self, namespace: Namespace, path: tuple[Page, ...]) -> bool:
        return self.namespace == namespace and path[: len(self.path)] == self.path


@dataclass
class ListModel:
    """The contract of RadixCache, by searching lists.

    oldest_first: the unlocked nodes in the order in which they will be evicted.
    locks: for each receipt number, the namespace and path that it protects.
    """

    page_size: int
    nodes: list[ListNode] = field(default_factory=list)
    oldest_first: list[ListNode] = field(default_factory=list)
    locks: dict[int, tuple[Namespace, tuple[Page, ...]]] = field(default_factory=dict)
    next_lock: int = 0

    def cut(self, tokens: list[int]) -> tuple[Page, ...]:
        whole = len(tokens) // self.page_size
        return tuple(tuple(tokens[i * self.page_size : (i + 1) * self.page_size]) for i in range(whole))

    def probe(self, namespace: Namespace, path: tuple[Page, ...]) -> int:
        """The number of leading pages of `path` that are cached."""
        return max((_shared(path, node.path) for node in self.nodes if node.namespace == namespace), default=0)

    def match(self, namespace: Namespace, path: tuple[Page, ...]) -> list[int]:
        found = path[: self.probe(namespace, path)]
        self._split_at(namespace, found)
        return self._refresh(namespace, found)

    def insert(self, namespace: Namespace, path: tuple[Page, ...], pages: list[int]) -> list[int]:
        present = self.probe(namespace, path)
        self._split_at(namespace, path[:present])
        if present < len(path):
            leaf = ListNode(namespace, path, present, pages[present : len(path)])
            self.nodes.append(leaf)
            self.oldest_first.append(leaf)
        return self._refresh(namespace, path)

    def lock(self, namespace: Namespace, path: tuple[Page, ...]) -> int:
        self.locks[self.next_lock] = (namespace, path)
        self.next_lock += 1
        self.oldest_first = [node for node in self.oldest_first if not self.is_locked(node)]
        return self.next_lock - 1

    def unlock(self, number: int) -> None:
        namespace, path = self.locks[number]
        before = [node for node in self.nodes if self.is_locked(node)]
        del self.locks[number]
        self.oldest_first += [
            node for node in self._on_path(namespace, path)[::-1] if node in before and not self.is_locked(node)
        ]

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages and self.oldest_first:
            node = self.oldest_first.pop(0)
            self.nodes.remove(node)
            assert not any(node.covers(other.namespace, other.path) for other in self.nodes), "not a leaf"
            freed += node.pages
        return freed

    def reset(self) -> None:
        self.nodes, self.oldest_first, self.locks = [], [], {}

    def is_locked(self, node: ListNode) -> bool:
        return any(node.covers(namespace, path) for namespace, path in self.locks.values())

    def pages(self, *, locked: bool) -> set[int]:
        return {page for node in self.nodes if self.is_locked(node) == locked for page in node.pages}

    def page_hashes(self) -> set[bytes]:
        """By hashing each node's whole prefix anew."""
        hashes: set[bytes] = set()
        for node in self.nodes:
            raw = np.array(node.path, np.int32).tobytes()
            hashes.update(page_hashes(node.namespace.seed(), raw, self.page_size))
        return hashes

    def _on_path(self, namespace: Namespace, path: tuple[Page, ...]) -> list[ListNode]:
        return sorted((node for node in self.nodes if node.covers(namespace, path)), key=lambda node: node.first)

    def _split_at(self, namespace: Namespace, path: tuple[Page, ...]) -> None:
        for lower in self.nodes:
            if (
                lower.namespace == namespace
                and lower.first < len(path) < len(lower.path)
                and _shared(path, lower.path) == len(path)
            ):
                kept = len(path) - lower.first
                upper = ListNode(namespace, path, lower.first, lower.pages[:kept])
                lower.first, lower.pages = len(path), lower.pages[kept:]
                self.nodes.append(upper)
                if not self.is_locked(upper):
                    self.oldest_first.append(upper)
                return

    def _refresh(self, namespace: Namespace, path: tuple[Page, ...]) -> list[int]:
        on_path = self._on_path(namespace, path)
        for node in reversed(on_path):
            if node in self.oldest_first:
                self.oldest_first.remove(node)
                self.oldest_first.append(node)
        return [page for node in on_path for page in node.pages]


def _shared(one: tuple[Page, ...], other: tuple[Page, ...]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
