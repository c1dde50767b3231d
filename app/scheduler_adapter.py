"""The cache as one scheduler sees it: a few verbs over a request's life, each done whole or not at all.

    admit -> extend* -> publish* -> finish          (a normal end)
                                 -> release         (abort or retraction: nothing more is published)

Per request it keeps the lock receipt and the pages that PreparedBatch reported. Page indexes of a request:

    0 ------- shared -------------- num_pages
    |  cache's   |  the request's own  |

Window pages of models with sliding windows, and snapshots of recurrent states, have books of their own beside it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.caches.base import NO_PAGES, BasePrefixCache, InsertResult, LockReceipt
from app.caches.inspection import Miss, TopPrefixes
from app.caches.ledger import check_ledger, page_classes
from app.caches.page_list import PageList
from app.caches.snapshot_leases import SnapshotLeases
from app.caches.tiers.ports import NO_TIERS, CacheTiers
from app.caches.window_leases import WindowLeases
from app.core.handles import CacheExtentRef, CacheIdentity
from app.core.keys import RadixKey
from app.core.transfers import PageCounts
from app.errors import IntegrityError

NOTHING = PageCounts()


class Prefix(NamedTuple):
    """A cached prefix, locked for the request. window_pages, state: as in MatchResult."""

    extent: CacheExtentRef
    num_tokens: int
    window_pages: np.ndarray = NO_PAGES
    state: int = 0


class Published(NamedTuple):
    """The first `num_pages` pages of a request are the cache's now.

    pages: (n,) int32, what the row must read from `first_page_index` on because the cache had pages there already;
        empty where the row's own pages became the cache's. window_pages: as many with sliding windows.
    """

    num_pages: int
    first_page_index: int = 0
    pages: np.ndarray = NO_PAGES
    window_pages: np.ndarray = NO_PAGES


class Frees(NamedTuple):
    """Freed and not yet told to the runtime, (n,) int32 each: full pages, window pages, snapshots."""

    pages: np.ndarray
    window_pages: np.ndarray
    snapshots: np.ndarray


class PoolUse(NamedTuple):
    """How many pages of the pool are in which hands. They add up to its capacity.

    restoring: being written with what the host tier has of a prefix.
    """

    free: int
    cached_unlocked: int
    cached_locked: int
    held_by_requests: int
    restoring: int = 0


@dataclass(slots=True)
class _Lease:
    receipt: LockReceipt
    pages: PageList
    shared: int  # leading pages that are the cache's

    def own(self) -> np.ndarray:
        return self.pages.view()[self.shared :]


class SchedulerAdapter:
    """Leases on one prefix cache, by request id. Single-threaded, like the cache."""

    def __init__(self, tree_cache: BasePrefixCache, num_rows: int = 0) -> None:
        """num_rows: request rows of the runtime, for models with sliding windows."""
        self._cache = tree_cache
        self._windows = _window_leases(tree_cache, num_rows)
        self._snapshots = SnapshotLeases(tree_cache.state_allocator) if tree_cache.state_allocator else None
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

    @property
    def tiers(self) -> CacheTiers:
        """What is below the device pool."""
        return self._cache.tiers

    @property
    def has_tiers(self) -> bool:
        return self._cache.tiers is not NO_TIERS

    @property
    def is_restoring(self) -> bool:
        """Whether pages are on their way into the pool: the cache's, and free to be evicted, once they have landed."""
        return any(ids.size for ids in self._cache.tiers.in_flight_ids())

    def available(self) -> int:
        """Pages that the next prepare may hand out without evicting."""
        return self._allocator.available()

    def reachable(self, beside: PageCounts = NOTHING) -> int:
        """Pages that the next prepare may hand out if everything unlocked is evicted; a window page for each.

        beside: what it hands out besides.
        """
        return min(self.reachable_full() - beside.pages, self.reachable_window() - beside.window_pages)

    def reachable_full(self) -> int:
        """`reachable` as far as full pages are concerned."""
        return self._allocator.available() + self._cache.evictable_pages

    def reachable_window(self) -> int:
        """`reachable` as far as window pages are concerned; more than there can be without sliding windows."""
        if self._windows is None:
            return sys.maxsize
        return self._windows.available() + self._cache.evictable_window_pages

    def reachable_snapshots(self) -> int:
        """Snapshots that the next prepare may hand out if all that are unlocked are evicted."""
        return 0 if self._snapshots is None else self._snapshots.available() + self._cache.evictable_states

    @property
    def window_pages_kept(self) -> int:
        """The most window pages that a row holds while it decodes; 0 without sliding windows."""
        return 0 if self._windows is None else self._windows.kept_pages

    def num_own_window_pages(self, request_id: str) -> int:
        """Window pages that the request holds and the cache does not."""
        return 0 if self._windows is None else self._windows.num_own(request_id)

    def probe(self, key: RadixKey) -> int:
        """Tokens of `key` that are cached now. Changes nothing."""
        return self._cache.probe(key)

    def probe_all(self, key: RadixKey) -> int:
        """The same in the tier that has most of it. Changes nothing."""
        return max(self._cache.probe(key), self._cache.tiers.probe(key))

    def explain_miss(self, key: RadixKey, num_matched: int) -> Miss:
        """Why no more than `num_matched` tokens of `key` were cached. Ask right after `admit`. Changes nothing."""
        return self._cache.explain_miss(key, num_matched)

    def top_prefixes(self, limit: int) -> TopPrefixes:
        """The cached prefixes that saved most tokens. Changes nothing."""
        return self._cache.top_prefixes(limit)

    def page_counts(self) -> PoolUse:
        """From counters; `ledger` is the same by counting pages. O(pages that are being restored)."""
        free = self._allocator.available()
        unlocked, locked = self._cache.evictable_pages, self._cache.protected_pages
        restoring = self._cache.tiers.in_flight_ids().pages.size
        return PoolUse(free, unlocked, locked, self.capacity - free - unlocked - locked - restoring, restoring)

    def admit(self, request_id: str, key: RadixKey) -> Prefix:
        """Match and lock `key`'s cached prefix; the request starts with it."""
        if request_id in self._leases:
            raise IntegrityError(owner="SchedulerAdapter", broken=f"request {request_id!r} is admitted already")
        found = self._cache.match(key)
        receipt = self._cache.lock(found)
        self._leases[request_id] = _Lease(receipt, PageList(found.pages), found.pages.size)
        if self._windows is not None:
            self._windows.begin(request_id, found.window_pages)
        extent = CacheExtentRef.of(self.identity, found.pages)
        return Prefix(extent, found.num_tokens, found.window_pages, found.state)

    def prepared(self, snapshot_slots: np.ndarray) -> None:
        """A plan was prepared: the runtime has retired window pages, and reserved these snapshots, (rows,) int32.

        To be told before the rows that the plan admitted are seated and any row extended.
        """
        if self._windows is not None:
            for request_id in self._windows.retire():
                self._cache.unlock_window(self._leases[request_id].receipt)
        if self._snapshots is not None:
            self._snapshots.hold(snapshot_slots)

    def seat(self, request_id: str, slot: int) -> None:
        """The runtime gave the request a row."""
        if self._windows is not None:
            self._windows.seat(request_id, slot)

    def settle(self, slots: int | np.ndarray, num_tokens: int | np.ndarray) -> None:
        """A step was read that computed the last of so many tokens of these rows."""
        if self._windows is not None:
            self._windows.settle(slots, num_tokens)

    def extend(self, request_id: str, pages: np.ndarray, window_pages: np.ndarray = NO_PAGES) -> None:
        """The request gained these pages, (n,) int32, as PreparedBatch said."""
        if self._windows is not None:
            self._windows.extend(request_id, window_pages)
        self._leases[request_id].pages.append(pages)

    def publish(self, request_id: str, settled: RadixKey, snapshot: int = 0) -> Published | None:
        """Give the whole pages of `settled` to the cache: tokens whose KV is written and whose ids are final.

        snapshot: the recurrent state after exactly these tokens, as a plan took it, or 0. It is the cache's afterwards,
            or free.
        -> None when nothing more of the request is the cache's than before; its own duplicates are freed. Nothing
        happens for a request that has no lease: its pool was lost.
        """
        lease = self._leases.get(request_id)
        if lease is None:
            return None
        if len(settled) // self._page_size <= lease.shared:
            self.drop_snapshot(snapshot)
            return None
        result = self._insert(request_id, lease, settled, snapshot)
        if result.num_tokens // self._page_size <= lease.shared:
            return None
        lease.receipt = self._cache.relock(lease.receipt, result)
        return self._hand_over(request_id, lease, result)

    def _hand_over(self, request_id: str, lease: _Lease, result: InsertResult) -> Published:
        """What was published is the cache's; where that has pages of its own, the request's are freed."""
        published, first = result.num_tokens // self._page_size, lease.shared
        lease.shared = published
        held, cached = lease.pages.view()[first:published], result.pages[first - result.first :]
        differs = held.tobytes() != cached.tobytes()  # as bytes, which is quicker than `!=` and `any`
        if differs:
            self._allocator.free(held[held != cached])
            held[:] = cached
        if self._windows is not None:
            differs |= self._windows.publish(request_id, result.window_pages[first - result.first :])
        if not differs:
            return Published(published)
        window_pages = NO_PAGES
        if self._windows is not None:
            window_pages = self._windows.held_pages(request_id)[first:published].copy()
        return Published(published, first, cached, window_pages)

    def drop_snapshot(self, snapshot: int) -> None:
        """A snapshot that a plan took is of no use; 0 is none."""
        if snapshot and self._snapshots is not None:
            self._snapshots.drop(snapshot)

    def _insert(self, request_id: str, lease: _Lease, settled: RadixKey, snapshot: int) -> InsertResult:
        pages = lease.pages.view()
        if self._windows is None and self._snapshots is None:
            return self._cache.insert(settled, pages, after=lease.receipt)
        window_pages = NO_PAGES if self._windows is None else self._windows.held_pages(request_id)
        result = self._cache.insert(settled, pages, window_pages, snapshot, lease.receipt)
        if snapshot and self._snapshots is not None:
            (self._snapshots.adopted if result.state_adopted else self._snapshots.drop)(snapshot)
        return result

    def finish(self, request_id: str, settled: RadixKey) -> None:
        """Publish what is settled and let go of the rest. Nothing happens for a request that has no lease."""
        lease = self._leases.get(request_id)
        if lease is not None and len(settled) // self._page_size > lease.shared:
            result = self._insert(request_id, lease, settled, 0)
            if result.num_tokens // self._page_size > lease.shared:
                self._hand_over(request_id, lease, result)  # nobody locks it: nobody reads it
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Free the request's own pages and unlock its prefix. Idempotent: the one way out for every request."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return
        if lease.pages.size > lease.shared:
            self._allocator.free(lease.own())
        if self._windows is not None:
            self._windows.release(request_id)
        self._cache.unlock(lease.receipt)

    def make_room(self, num_pages: int, beside: PageCounts = NOTHING) -> bool:
        """Evict until `num_pages` are available, with a window page for each, and besides what `beside` says.

        -> whether they are; evicts nothing when that cannot be reached. Snapshots are not looked at.
        """
        shortfall = num_pages + beside.pages - self._allocator.available()
        if shortfall <= 0 and self._window_shortfall(num_pages + beside.window_pages) <= 0:
            return True  # without a look at the cache: this is asked in every step
        if num_pages > self.reachable(beside):
            return False
        if shortfall > 0:
            self.num_evicted_pages += self._cache.evict(shortfall)
        shortfall = self._window_shortfall(num_pages + beside.window_pages)
        if shortfall > 0:
            self._cache.evict_window(shortfall)
        return True

    def _window_shortfall(self, num_pages: int) -> int:
        return 0 if self._windows is None else num_pages - self._windows.available()

    def make_room_for_snapshots(self, count: int) -> None:
        """Evict until so many snapshots are available, or nothing unlocked is left: who gets none does without."""
        if self._snapshots is not None and count > self._snapshots.available():
            self._cache.evict_states(count - self._snapshots.available())

    def recorded_frees(self) -> Frees:
        """What was freed, for the next plan."""
        cache = self._cache
        return Frees(
            self._allocator.recorded_frees(),
            cache.window_allocator.recorded_frees() if cache.window_allocator else NO_PAGES,
            cache.state_allocator.recorded_frees() if cache.state_allocator else NO_PAGES,
        )

    def num_pages(self, request_id: str) -> int:
        """Pages that the request reads, shared ones included."""
        return self._leases[request_id].pages.size

    def reset(self) -> None:
        """The pool is gone: forget every lease, everything cached, and what was to be copied from or into it."""
        self._leases.clear()
        if self._windows is not None:
            self._windows.reset()
        if self._snapshots is not None:
            self._snapshots.reset()
        self._cache.tiers.reset_device()
        self._cache.reset()

    def flush(self) -> int:
        """Drop everything cached, on the host too; LockedPageError while a request runs. -> pages of the pool freed."""
        num_pages = self._cache.flush()
        self._cache.tiers.flush()
        return num_pages

    def ledger(self) -> dict[str, np.ndarray]:
        """Page ids by class, int32 each: cached_evictable, cached_protected, requests, restoring, recorded, free.

        For checks.
        """
        own = [lease.own() for lease in self._leases.values()]
        requests = np.concatenate(own) if own else NO_PAGES
        restoring = self._cache.tiers.in_flight_ids().pages
        return page_classes(self._allocator, self._cache.cached_page_ids(), requests, restoring)

    def window_ledger(self) -> dict[str, np.ndarray]:
        """The same of window pages; empty without sliding windows."""
        if self._windows is None or self._cache.window_allocator is None:
            return {}
        cached, restoring = self._cache.cached_window_page_ids(), self._cache.tiers.in_flight_ids().window_pages
        return page_classes(self._cache.window_allocator, cached, self._windows.own_page_ids(), restoring)

    def snapshot_ledger(self) -> dict[str, np.ndarray]:
        """The same of snapshots; empty without recurrent layers."""
        if self._snapshots is None or self._cache.state_allocator is None:
            return {}
        cached, restoring = self._cache.cached_states(), self._cache.tiers.in_flight_ids().states
        return page_classes(self._cache.state_allocator, cached, self._snapshots.in_flight_ids(), restoring)

    def check_integrity(self) -> None:
        """Every page of each pool is in exactly one class of its ledger; the cache's own invariants hold. O(pages)."""
        self._cache.check_integrity()
        self._cache.tiers.check_integrity()
        check_ledger("pages", self.ledger(), self.capacity)
        if self._windows is not None and self._cache.window_allocator is not None:
            check_ledger("window pages", self.window_ledger(), self._cache.window_allocator.capacity)
            self._windows.check_integrity()
        if self._cache.state_allocator is not None:
            check_ledger("snapshots", self.snapshot_ledger(), self._cache.state_allocator.capacity)
        for request_id, lease in self._leases.items():
            if not 0 <= lease.shared <= lease.pages.size:
                raise IntegrityError(owner="SchedulerAdapter", broken=f"lease of {request_id!r}: {lease}")


def _window_leases(cache: BasePrefixCache, num_rows: int) -> WindowLeases | None:
    if cache.window_allocator is None or cache.sliding_window is None:
        return None
    return WindowLeases(allocator=cache.window_allocator, window=cache.sliding_window, num_rows=num_rows)
