"""A runtime whose transfers end at once, over the real allocators: what control does with its tiers, and nothing else.

It holds no contents. A storage below keeps so many pages, those used last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from app.caches.tiers.ports import CacheTiers
from app.core.transfers import (
    OfEachPool,
    PageCounts,
    PageIds,
    PageKeys,
    PreparedTransfers,
    TransferEnd,
    TransferPlan,
)
from app.errors import OutOfPagesError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator

_SECONDS = 1e-9  # that each transfer takes
_NONE = np.empty(0, np.bool_)


class InstantStorage:
    """Keys of at most `num_pages` pages; the one not used for longest goes first. num_pages 0: it keeps nothing."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def store(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_pages:
            self._keys.popitem(last=False)

    def has(self, keys: Iterable[bytes]) -> np.ndarray:
        """(n,) bool. Who is asked for counts as used."""
        there = []
        for key in keys:
            there.append(key in self._keys)
            if there[-1]:
                self._keys.move_to_end(key)
        return np.array(there, np.bool_)


class InstantRuntime:
    """Full pages only. Owner of nothing: device and host pages are in the allocators' hands."""

    def __init__(
        self,
        *,
        tiers: CacheTiers,
        device: PagedTokenToKVPoolAllocator,
        host: PagedTokenToKVPoolAllocator,
        storage: InstantStorage,
        page_bytes: int,
    ) -> None:
        self._tiers = tiers
        self._device = device
        self._host = host
        self._storage = storage
        self._page_bytes = page_bytes
        self.num_moved = {"backups": 0, "restores": 0, "stores": 0, "fetches": 0}  # pages

    def step(self) -> None:
        """One plan: its frees, its transfers, and their ends."""
        plan = self._tiers.plan()
        needed = sum(restore.source.pages.size for restore in plan.restores)
        freed = self._device.port.recorded_frees()
        if needed > self._device.num_free + freed.size:
            self._tiers.refused()
            return
        self._device.apply_frees(freed)
        self._host.apply_frees(plan.free_host.pages)
        backups = tuple(self._host_pages(backup.source.counts()) for backup in plan.backups)
        restores = tuple(PageIds(self._device.allocate(restore.source.pages.size)) for restore in plan.restores)
        fetches = tuple(self._host_pages(PageCounts(len(fetch.keys.pages))) for fetch in plan.fetches)
        self._tiers.prepared(PreparedTransfers(backups=backups, restores=restores, fetches=fetches))
        self._tiers.ended(self._ends(plan, backups, fetches))

    def drain(self) -> None:
        """Until nothing moves or waits to."""
        while self._tiers.num_under_way:
            self.step()

    def reserve(self, count: int) -> np.ndarray:
        """Device pages for a prompt, with a plan that frees what was evicted for them. OutOfPagesError if short."""
        self.step()
        if count > self._device.num_free:
            raise OutOfPagesError(need=count, free=self._device.num_free)
        return self._device.allocate(count)

    def _host_pages(self, counts: PageCounts) -> PageIds | None:
        return PageIds(self._host.allocate(counts.pages)) if counts.pages <= self._host.num_free else None

    def _ends(
        self, plan: TransferPlan, backups: tuple[PageIds | None, ...], fetches: tuple[PageIds | None, ...]
    ) -> list[TransferEnd]:
        ends = []
        for backup, given in zip(plan.backups, backups, strict=True):
            if given is not None:
                ends.append(self._moved("backups", backup.number, given.pages.size))
        ends += [self._moved("restores", restore.number, restore.source.pages.size) for restore in plan.restores]
        for store in plan.stores:
            self._storage.store(store.keys.pages)
            stored = np.ones(len(store.keys.pages), np.bool_)
            ends.append(self._moved("stores", store.number, len(store.keys.pages), stored))
        ends += [TransferEnd(number=each.number, arrived=self._there(each.keys)) for each in plan.lookups]
        for fetch, given in zip(plan.fetches, fetches, strict=True):
            if given is not None:
                there = self._there(fetch.keys)
                ends.append(self._moved("fetches", fetch.number, int(there.pages.sum()), there.pages))
        return ends

    def _there(self, keys: PageKeys) -> OfEachPool[np.ndarray]:
        return OfEachPool(self._storage.has(keys.pages), _NONE, _NONE)

    def _moved(self, what: str, number: int, count: int, arrived: np.ndarray | None = None) -> TransferEnd:
        self.num_moved[what] += count
        return TransferEnd(
            number=number,
            arrived=None if arrived is None else OfEachPool(arrived, _NONE, _NONE),
            num_bytes=count * self._page_bytes,
            seconds=_SECONDS,
        )
