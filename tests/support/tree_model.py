"""A prefix cache as a flat list, slow and plain, to compare the real tree with; and a cache with a pool to try on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from app.caches.base import BasePrefixCache, CacheDeps, EventSink, InsertResult
from app.caches.builtin import load_builtin_caches
from app.caches.registry import default_registry
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
    """A registered cache over a pool of its own, and the little that a runtime does for it."""

    def __init__(
        self, cache_type: str, *, num_pages: int = 64, page_size: int = 4, events: EventSink | None = None
    ) -> None:
        load_builtin_caches()
        self.page_size = page_size
        self.allocator = PagedTokenToKVPoolAllocator(num_pages, page_size, identity())
        spec = PoolSpec(
            num_pages=num_pages, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
        )
        deps = CacheDeps(
            token_allocator=self.allocator.port, device_pool=ShapeOnlyPool(spec), page_size=page_size, events=events
        )
        self.cache: BasePrefixCache = default_registry.seal().get(cache_type).ctor(deps)

    def take(self, num_pages: int) -> np.ndarray:
        """Pages for a request, as a prepared batch would give them."""
        self.allocator.apply_frees(self.allocator.port.recorded_frees())
        return self.allocator.allocate(num_pages)

    def store(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> InsertResult:
        """A request that computed `tokens` without looking, published them and ended, so that the rest is freed."""
        key = key_of(tokens, namespace)
        own = self.take(-(-len(key) // self.page_size))
        result = self.cache.insert(key, own)
        self.free_what_was_not_adopted(own, result)
        return result

    def free_what_was_not_adopted(self, own: np.ndarray, result: InsertResult) -> None:
        published = result.pages.size
        duplicates = own[:published][own[:published] != result.pages]
        self.allocator.port.free(np.concatenate([duplicates, own[published:]]))

    def matched(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        return self.cache.match(key_of(tokens, namespace)).num_tokens

    def lose_pool(self) -> None:
        """What a runtime does when its pool is gone."""
        self.allocator.reset(identity(self.allocator.identity.generation + 1))

    def check(self, held_by_requests: np.ndarray | None = None) -> None:
        """Every owner's invariants, and the ledger: each page has one owner, and all pages are there."""
        self.cache.check_integrity()
        self.allocator.check_integrity()
        requests = np.empty(0, np.int32) if held_by_requests is None else held_by_requests
        evictable, protected = self.cache.cached_page_ids()
        cached_and_requests = np.sort(np.concatenate([evictable, protected, requests]))
        assert np.array_equal(cached_and_requests, self.allocator.held_page_ids()), "leaked, or double owned"


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
