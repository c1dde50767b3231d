"""The cache as one scheduler sees it: a few verbs over a request's life, each done whole or not at all.

    admit -> extend* -> publish* -> finish          (a normal end)
                                 -> release         (abort or retraction: nothing more is published)

Per request it keeps the lock receipt and the pages that PreparedBatch reported. Page indexes of a request:

    0 ------- shared -------------- num_pages
    |  cache's   |  the request's own  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.caches.base import BasePrefixCache, LockReceipt
from app.caches.inspection import Miss, TopPrefixes
from app.core.handles import CacheExtentRef, CacheIdentity
from app.core.keys import RadixKey
from app.errors import IntegrityError


class Prefix(NamedTuple):
    """A cached prefix, locked for the request."""

    extent: CacheExtentRef
    num_tokens: int


class Republished(NamedTuple):
    """Page indexes from `first_page_index` on now belong to the cache as `pages`; the row must read these."""

    first_page_index: int
    pages: np.ndarray  # (n,) int32


class PageCounts(NamedTuple):
    """How many pages of the pool are in which hands. They add up to its capacity."""

    free: int
    cached_unlocked: int
    cached_locked: int
    held_by_requests: int


@dataclass(slots=True)
class _Lease:
    receipt: LockReceipt
    pages: np.ndarray  # (capacity,) int32; the first num_pages are meant
    num_pages: int
    shared: int  # leading pages that are the cache's

    def own(self) -> np.ndarray:
        return self.pages[self.shared : self.num_pages]


class SchedulerAdapter:
    """Leases on one prefix cache, by request id. Single-threaded, like the cache."""

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        self._cache = tree_cache
        self._allocator = tree_cache.token_allocator
        self._page_size = tree_cache.page_size
        self._leases: dict[str, _Lease] = {}
        self.num_evicted_pages = 0  # to make room, ever

    @property
    def identity(self) -> CacheIdentity:
        return self._allocator.identity

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def capacity(self) -> int:
        """Pages of the pool."""
        return self._allocator.capacity

    @property
    def reuses_prefixes(self) -> bool:
        return self._cache.reuses_prefixes

    def available(self) -> int:
        """Pages that the next prepare may hand out without evicting."""
        return self._allocator.available()

    def reachable(self) -> int:
        """Pages that the next prepare may hand out if everything unlocked is evicted."""
        return self._allocator.available() + self._cache.evictable_pages

    def probe(self, key: RadixKey) -> int:
        """Tokens of `key` that are cached now. Changes nothing."""
        return self._cache.probe(key)

    def explain_miss(self, key: RadixKey, num_matched: int) -> Miss:
        """Why no more than `num_matched` tokens of `key` were cached. Ask right after `admit`. Changes nothing."""
        return self._cache.explain_miss(key, num_matched)

    def top_prefixes(self, limit: int) -> TopPrefixes:
        """The cached prefixes that saved most tokens. Changes nothing."""
        return self._cache.top_prefixes(limit)

    def page_counts(self) -> PageCounts:
        """O(1), from counters; `ledger` is the same by counting pages."""
        free = self._allocator.available()
        unlocked, locked = self._cache.evictable_pages, self._cache.protected_pages
        return PageCounts(free, unlocked, locked, self.capacity - free - unlocked - locked)

    def admit(self, request_id: str, key: RadixKey) -> Prefix:
        """Match and lock `key`'s cached prefix; the request starts with it."""
        if request_id in self._leases:
            raise IntegrityError(owner="SchedulerAdapter", broken=f"request {request_id!r} is admitted already")
        found = self._cache.match(key)
        receipt = self._cache.lock(found)
        num_pages = found.pages.size
        self._leases[request_id] = _Lease(
            receipt, np.concatenate([found.pages, np.zeros(16, np.int32)]), num_pages, num_pages
        )
        return Prefix(CacheExtentRef.of(self.identity, found.pages), found.num_tokens)

    def extend(self, request_id: str, pages: np.ndarray) -> None:
        """The request gained these pages, (n,) int32, as PreparedBatch said."""
        lease = self._leases[request_id]
        end = lease.num_pages + pages.size
        if end > lease.pages.size:
            grown = np.zeros(max(end, 2 * lease.pages.size), np.int32)
            grown[: lease.num_pages] = lease.pages[: lease.num_pages]
            lease.pages = grown
        lease.pages[lease.num_pages : end] = pages
        lease.num_pages = end

    def publish(self, request_id: str, settled: RadixKey) -> Republished | None:
        """Give the whole pages of `settled` to the cache: tokens whose KV is written and whose ids are final.

        -> what the row must read from now on, if the cache already had pages there; the request's are freed. Nothing
        happens for a request that has no lease: its pool was lost.
        """
        lease = self._leases.get(request_id)
        if lease is None or len(settled) // self._page_size <= lease.shared:
            return None
        result = self._cache.insert(settled, lease.pages[: lease.num_pages])
        published = result.pages.size
        if published <= lease.shared:
            return None
        receipt = self._cache.lock(result)
        self._cache.unlock(lease.receipt)
        lease.receipt = receipt
        first = lease.shared
        held, cached = lease.pages[first:published], result.pages[first:published]
        duplicates = held != cached
        lease.shared = published
        if not duplicates.any():
            return None
        self._allocator.free(held[duplicates])
        lease.pages[first:published] = cached
        return Republished(first, cached)

    def finish(self, request_id: str, settled: RadixKey) -> None:
        """Publish what is settled and let go of the rest. Nothing happens for a request that has no lease."""
        self.publish(request_id, settled)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Free the request's own pages and unlock its prefix. Idempotent: the one way out for every request."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return
        if lease.num_pages > lease.shared:
            self._allocator.free(lease.own())
        self._cache.unlock(lease.receipt)

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are available. -> whether they are; evicts nothing when that cannot be reached."""
        shortfall = num_pages - self._allocator.available()
        if shortfall <= 0:
            return True
        if shortfall > self._cache.evictable_pages:
            return False
        self.num_evicted_pages += self._cache.evict(shortfall)
        return True

    def recorded_frees(self) -> np.ndarray:
        """Freed pages for the next plan."""
        return self._allocator.recorded_frees()

    def num_pages(self, request_id: str) -> int:
        """Pages that the request reads, shared ones included."""
        return self._leases[request_id].num_pages

    def reset(self) -> None:
        """The pool is gone: forget every lease and everything cached."""
        self._leases.clear()
        self._cache.reset()

    def flush(self) -> int:
        """Drop everything cached; LockedPageError while a request runs. -> pages freed."""
        return self._cache.flush()

    def ledger(self) -> dict[str, np.ndarray]:
        """Page ids by class, int32 each: cached_evictable, cached_protected, requests, recorded, free. For checks."""
        evictable, protected = self._cache.cached_page_ids()
        own = [lease.own() for lease in self._leases.values()]
        return {
            "cached_evictable": evictable,
            "cached_protected": protected,
            "requests": np.concatenate(own) if own else np.empty(0, np.int32),
            "recorded": self._allocator.recorded_frees(),
            "free": self._allocator.free_page_ids(),
        }

    def check_integrity(self) -> None:
        """Every page of the pool is in exactly one class of the ledger; the cache's own invariants hold. O(pages)."""
        self._cache.check_integrity()
        classes = self.ledger()
        owners = np.zeros(self.capacity + 1, np.int32)
        for pages in classes.values():
            np.add.at(owners, pages, 1)
        double = np.flatnonzero(owners[1:] > 1) + 1
        leaked = np.flatnonzero(owners[1:] == 0) + 1
        if double.size or leaked.size or owners[0]:
            counts = {name: int(pages.size) for name, pages in classes.items()}
            raise IntegrityError(
                owner="ledger",
                broken=f"double owned: {double[:8].tolist()} ({double.size}), leaked: {leaked[:8].tolist()} "
                f"({leaked.size}), padding page owned: {bool(owners[0])}; counts {counts}, capacity {self.capacity}",
            )
        for request_id, lease in self._leases.items():
            if not 0 <= lease.shared <= lease.num_pages:
                raise IntegrityError(owner="SchedulerAdapter", broken=f"lease of {request_id!r}: {lease}")
