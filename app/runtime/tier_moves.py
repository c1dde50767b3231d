"""What a plan moves between tiers, beside its rows: device pages for restores, and the host tier that does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from app.core.batch import BatchPlan, PreparedBatch
from app.core.transfers import (
    NO_IDS,
    NO_TRANSFERS,
    NOTHING_PREPARED,
    Backup,
    OfEachPool,
    PageCounts,
    PageIds,
    PreparedTransfers,
    TransferEnd,
)
from app.errors import ConfigError, OwnershipError
from app.hicache.host_tier import HostTier
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.state_slots import StateSlots
from app.memory.window_pages import WindowPagePool
from app.runtime.warmup import WarmupStep

_NOTHING = PageCounts()
_FEW = 1 << 14  # comparisons


def tier_moves(
    tiers: HostTier | None,
    allocator: PagedTokenToKVPoolAllocator,
    window: WindowPagePool | None,
    states: StateSlots | None,
) -> TierMoves | NoTierMoves:
    """allocator, window, states: of the device's full pages, window pages, snapshots."""
    if tiers is None:
        return NoTierMoves()
    of_window = None if window is None else window.allocator
    return TierMoves(tiers, OfEachPool(allocator, of_window, None if states is None else states.allocator))


class TierMoves:
    """Couples the device pools' allocators with the host tier. Each call is one of the runtime's own of that name."""

    def __init__(self, tiers: HostTier, allocators: OfEachPool[PagedTokenToKVPoolAllocator | None]) -> None:
        self._tiers = tiers
        self._allocators = allocators

    def open(self) -> None:
        self._tiers.open()

    def close(self) -> None:
        self._tiers.close()

    def warm_up_steps(self) -> list[WarmupStep]:
        """Every program that moves pages; for a runtime in which nothing moves yet."""
        warm_up = self._tiers.warm_up
        return [
            WarmupStep(f"copies between tiers, {step + 1} of {warm_up.num_steps}", partial(warm_up.run, step))
            for step in range(warm_up.num_steps)
        ]

    def restored_bytes_per_s(self) -> float | None:
        return self._tiers.warm_up.restored_bytes_per_s

    def check_plan(self, plan: BatchPlan) -> None:
        """Raise unless everything that the plan's transfers name may be named. See HostTier.check_plan.

        The source of a backup may be in the plan's own free lists: it is read before anybody gets the page. A page that
        a restore is to write may be in neither.
        """
        self._tiers.check_plan(plan.transfers)
        restoring = self._tiers.restoring()
        if restoring is NO_IDS and not plan.transfers.backups:
            return
        freed = PageIds(plan.free_pages, plan.free_window_pages, plan.free_states)
        if restoring is not NO_IDS:
            for gone, written in zip(freed, restoring, strict=True):
                _refuse_common(gone, written, "freed while a restore is to write it")
        if plan.transfers.backups:
            self._check_backups(plan.transfers.backups, freed, restoring)

    def restored_counts(self, plan: BatchPlan) -> PageCounts:
        """Device pages that the plan's restores take."""
        if not plan.transfers.restores:
            return _NOTHING
        each = [restore.source.counts() for restore in plan.transfers.restores]
        return PageCounts(*map(sum, zip(*each, strict=True)))

    def reserve(self, batch_id: int, plan: BatchPlan) -> PreparedTransfers:
        """Of a plan that was checked, also for capacity, and whose frees of device pages are applied."""
        if plan.transfers is NO_TRANSFERS or plan.transfers.is_empty:
            return NOTHING_PREPARED
        targets = tuple(
            PageIds(*(self._allocate(*each) for each in zip(self._allocators, restore.source.counts(), strict=True)))
            for restore in plan.transfers.restores
        )
        return self._tiers.prepare(batch_id, plan.transfers, targets)

    def launch(self, batch_id: int) -> None:
        self._tiers.launch(batch_id)

    def launched(self) -> None:
        self._tiers.launched()

    def undo(self, prepared: PreparedBatch) -> None:
        self._tiers.undo(prepared.batch_id)
        for target in prepared.transfers.restores:
            for allocator, pages in zip(self._allocators, target, strict=True):
                if allocator is not None:
                    allocator.give_back(pages)

    def has_news(self) -> bool:
        return self._tiers.has_news()

    def wait(self, timeout_s: float) -> None:
        self._tiers.wait(timeout_s)

    def collect(self) -> tuple[TransferEnd, ...]:
        return self._tiers.collect()

    def device_lost(self) -> None:
        self._tiers.device_lost()

    def check_integrity(self) -> None:
        self._tiers.check_integrity()

    def _check_backups(self, backups: Sequence[Backup], freed: PageIds, restoring: PageIds) -> None:
        for pool, allocator in enumerate(self._allocators):
            each = [backup.source[pool] for backup in backups if backup.source[pool].size]
            if not each:
                continue
            if allocator is None:
                numbers = [backup.number for backup in backups]
                raise OwnershipError(what=f"backups {numbers}", reason="the model has no such pages")
            source = each[0] if len(each) == 1 else np.concatenate(each)
            _refuse_common(source, restoring[pool], "backed up while a restore is to write it")
            allocator.check_held(_without(source, freed[pool]))  # whoever reads what is freed comes before

    @staticmethod
    def _allocate(allocator: PagedTokenToKVPoolAllocator | None, count: int) -> np.ndarray:
        return np.empty(0, np.int32) if allocator is None else allocator.allocate(count)


def _without(pages: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Of a few, one comparison of all with all is ten times quicker than sorting them."""
    if not others.size:
        return pages
    if pages.size * others.size <= _FEW:
        return pages[~(pages[:, None] == others).any(1)]
    return pages[~np.isin(pages, others)]


def _refuse_common(pages: np.ndarray, others: np.ndarray, reason: str) -> None:
    if pages.size and others.size:
        common = np.intersect1d(pages, others)
        if common.size:
            raise OwnershipError(what=f"device pages {common[:8].tolist()}", reason=reason)


class NoTierMoves:
    """Of a runtime without a host tier: nothing moves."""

    def warm_up_steps(self) -> list[WarmupStep]:
        return []

    def restored_bytes_per_s(self) -> float | None:
        return None

    def open(self) -> None: ...

    def close(self) -> None: ...

    def check_plan(self, plan: BatchPlan) -> None:
        """ConfigError for a plan that wants something moved."""
        if not plan.transfers.is_empty:
            allowed = "only with --enable-hierarchical-cache: this runtime has no host tier"
            raise ConfigError(field="transfers", value=plan.transfers.numbers(), allowed=allowed)

    def restored_counts(self, plan: BatchPlan) -> PageCounts:
        return PageCounts()

    def reserve(self, batch_id: int, plan: BatchPlan) -> PreparedTransfers:
        return NOTHING_PREPARED

    def launch(self, batch_id: int) -> None: ...

    def launched(self) -> None: ...

    def undo(self, prepared: PreparedBatch) -> None: ...

    def has_news(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None: ...

    def collect(self) -> tuple[TransferEnd, ...]:
        return ()

    def device_lost(self) -> None: ...

    def check_integrity(self) -> None: ...
