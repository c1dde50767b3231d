"""Everything that a runtime does to move pages between device, host memory and storage. Execution only.

It moves what plans say, in the runtime's own thread, and blocks nowhere but in `wait` and `close`:

    check_plan -> prepare -> launch, before the programs of the plan's step -> launched, after them -> collect, when a
                         `-> undo, when the batch is discarded                                         step is read

    device pool  --Backups-->  HostKVPool  --StorageMoves-->  StorageLane
                <--Restores--             <--StorageMoves--
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import structlog

from app.core.handles import CacheIdentity, Generation
from app.core.transfers import (
    NO_IDS,
    NO_TRANSFERS,
    OfEachPool,
    PageIds,
    PreparedTransfers,
    TierLimits,
    TransferEnd,
    TransferPlan,
)
from app.errors import IntegrityError, OwnershipError
from app.hicache.backups import Backups
from app.hicache.copy_rates import CopyWarmUp
from app.hicache.counters import TierCounters
from app.hicache.parts import joined_ids
from app.hicache.ports import StorageLane
from app.hicache.restores import Restores
from app.hicache.staging import Staging
from app.hicache.storage_moves import StorageMoves
from app.memory.host_kv_pool import HostKVPool
from app.tpu.lent_arrays import LentArrays
from app.tpu.page_carrier import PageCarrier
from app.tpu.tier_copies import TierCopies

_log = structlog.get_logger(__name__)

POLL_S = 0.0005  # between looks at copies of the device, which wake nobody
CLOSE_S = 5.0


class HostTier:
    """Owner of the host pool's contents and of what is under way. Single-threaded: the thread that dispatches."""

    def __init__(
        self,
        *,
        host_pool: HostKVPool,
        carriers: OfEachPool[PageCarrier | None],
        device_pool: LentArrays,
        limits: TierLimits,
        lane: StorageLane,
        copies: TierCopies,
        clock: Callable[[], float] = time.monotonic,
        attach_again: Callable[[], None] = lambda: None,
    ) -> None:
        """ConfigError for limits that not even one page fits in. `lane` is closed with this.

        attach_again: gives a closed lane the storage that it had.
        """
        self._host = host_pool
        self._lane = lane
        self._clock = clock
        self._attach_again = attach_again
        self._counters = TierCounters()
        self._staging = Staging(limits)
        self._backups = Backups(
            host_pool=host_pool,
            carriers=carriers,
            device_pool=device_pool,
            copies=copies,
            staging=self._staging,
            limits=limits,
            counters=self._counters.backup,
        )
        self._restores = Restores(
            carriers=carriers,
            device_pool=device_pool,
            copies=copies,
            staging=self._staging,
            limits=limits,
            counters=self._counters.restore,
        )
        self.warm_up = CopyWarmUp(carriers, device_pool)
        self._storage = StorageMoves(
            host_pool=host_pool, page_bytes=limits.page_bytes, lane=lane, counters=self._counters
        )
        self._ends: list[TransferEnd] = []  # not told yet
        self._restored: list[TransferEnd] = []  # likewise: ends of restores
        self._unlaunched: dict[int, TransferPlan] = {}  # by batch
        self._wake = threading.Event()
        self._is_closed = False
        lane.wake_with(self._wake)

    # -- a plan ------------------------------------------------------------------------------------------------------

    def check_plan(self, transfers: TransferPlan) -> None:
        """Raise unless the plan may name every number and every host page that it names. Changes nothing.

        OwnershipError for a number that is under way or named twice, for a source that is not filled, and for freeing a
        page that is still being written; DoubleFreeError or ForeignPageError for freeing what nobody freed.
        """
        if transfers is NO_TRANSFERS or transfers.is_empty:
            return
        numbers = transfers.numbers()
        under_way = self._backups.numbers | self._restores.numbers | self._storage.numbers
        for number in numbers:
            if number in under_way:
                raise OwnershipError(what=f"transfer {number}", reason="its number is another transfer's")
            under_way.add(number)
        if transfers.free_host is not NO_IDS:
            self._check_frees(transfers.free_host)
        for restore in transfers.restores:
            self._host.get(restore.source)
        for store in transfers.stores:
            self._host.get(store.source)

    def prepare(
        self, batch_id: int, transfers: TransferPlan, restore_targets: tuple[PageIds, ...]
    ) -> PreparedTransfers:
        """Reserve what a checked plan needs, and begin the copies of its restores. restore_targets: device pages.

        Backups are refused while a restore waits for staging, so that it gets its turn.
        """
        now = self._clock()
        restored = [self._host.get(restore.source) for restore in transfers.restores]
        for store in transfers.stores:
            self._storage.reserve_store(store, self._host.get(store.source))
        if transfers.free_host is not NO_IDS:
            self._host.apply_frees(transfers.free_host)  # what was read of them is kept
        for number in transfers.cancels:
            self._storage.cancel(number)
        for restore, contents, target in zip(transfers.restores, restored, restore_targets, strict=True):
            self._restores.begin(restore.number, contents, target, now)
        backups: tuple[PageIds | None, ...] = (None,) * len(transfers.backups)
        if backups and not self._restores.is_waiting:
            backups = self._backups.reserve(transfers.backups)
        for lookup in transfers.lookups:
            self._storage.reserve_lookup(lookup)
        fetches = tuple(self._storage.reserve_fetch(fetch) for fetch in transfers.fetches)
        self._unlaunched[batch_id] = transfers
        return PreparedTransfers(backups=backups, restores=restore_targets, fetches=fetches)

    def launch(self, batch_id: int) -> None:
        """Before anything of the plan's step is dispatched: gather its backups, write restores that have landed.

        Raises what the device raises: then the pool is lost, and `device_lost` comes next.
        """
        now = self._clock()
        transfers = self._unlaunched.pop(batch_id, None)
        if transfers is not None:
            self._ends += self._backups.launch([backup.number for backup in transfers.backups], now)
            self._restores.launch([restore.number for restore in transfers.restores])
            self._ends += self._storage.launch(transfers)
        self._restored += self._restores.advance(now)

    def launched(self) -> None:
        """After everything of the plan's step is dispatched: begin the copies of what was gathered."""
        self._ends += self._backups.begin_copies(self._clock())

    def undo(self, batch_id: int) -> None:
        """Its batch is discarded: what it reserved is free again, and none of it ends. Frees and cancels stay."""
        transfers = self._unlaunched.pop(batch_id, None)
        if transfers is None:
            return  # it moves nothing
        for backup in transfers.backups:
            self._backups.undo(backup.number)
        for restore in transfers.restores:
            self._restores.undo(restore.number)
        self._storage.undo(transfers)

    def _check_frees(self, freed: PageIds) -> None:
        self._host.check_recorded(freed)
        written = joined_ids(self._backups.targets() + self._storage.targets())
        for pages, in_flight in zip(freed, written, strict=True):
            early = pages[np.isin(pages, in_flight)] if in_flight.size else in_flight
            if early.size:
                raise OwnershipError(what=f"host pages {early[:8].tolist()}", reason="freed while they are written")

    # -- what is under way -------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether `collect` would find something to do now. Costs O(transfers under way)."""
        now = self._clock()
        return bool(
            self._ends
            or self._restored
            or self._wake.is_set()
            or self._backups.has_news(now)
            or self._restores.has_news(now)
        )

    def wait(self, timeout_s: float) -> None:
        """Until there is news, or so long. For a plan without rows: nothing else happens meanwhile."""
        began = self._clock()
        while not self.has_news():
            left = timeout_s - (self._clock() - began)
            if left <= 0:
                break
            is_polled = self._backups.is_copying or self._restores.is_copying
            self._wake.wait(min(left, POLL_S) if is_polled else left)
        self._counters.waited_s += self._clock() - began

    def collect(self) -> tuple[TransferEnd, ...]:
        """Move on whatever can be moved on. -> every transfer that has ended since the last time.

        Raises what the device raises, as `launch` does; nothing of what has ended is lost by that.
        """
        now = self._clock()
        self._wake.clear()  # before taking: what comes later sets it again
        self._ends += self._storage.take_ends()
        self._ends += self._backups.advance(now)
        self._staging.sweep()
        self._restored += self._restores.advance(now)
        ends = (*self._ends, *self._restored)
        self._ends, self._restored = [], []
        return ends

    def device_lost(self) -> None:
        """The device pool is made anew: backups and restores fail, whatever was only prepared too.

        Host pages stay, and what storage was given goes on.
        """
        now = self._clock()
        self._ends += [replace(end, failure="failed", num_bytes=0) for end in self._restored]  # it went with the pool
        self._restored = []
        self._ends += self._backups.fail_all(now)
        self._ends += self._restores.fail_all(now)
        for transfers in self._unlaunched.values():
            self._ends += self._storage.fail(transfers)
        self._unlaunched.clear()

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """After `close`: the host pool is empty, under a new identity; the storage is attached again."""
        if self._is_closed:
            runtime_id, generation = next(each for each in self._host.allocators if each is not None).identity
            self._host.reset(CacheIdentity(runtime_id, Generation(generation + 1)))
            self._attach_again()
            self._is_closed = False

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Storage writes or drops what is queued, within the time; everything else is dropped. Idempotent.

        Copies that are still under way are not waited for: what they read and write lives until they are over.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._lane.close(timeout_s)
        self._backups.clear()
        self._restores.clear()
        self._storage.clear()
        self._staging.clear()
        self._unlaunched.clear()
        self._ends.clear()
        self._restored.clear()
        self._host.close()

    def restoring(self) -> PageIds:
        """Device pages that restores are to write."""
        targets = self._restores.targets()
        return joined_ids(targets) if targets else NO_IDS

    def counters(self) -> TierCounters:
        """A copy."""
        self._counters.staging_bytes = self._staging.num_bytes
        self._counters.most_staging_bytes = self._staging.most_bytes
        return self._counters.snapshot()

    def check_integrity(self) -> None:
        """Staging is what transfers hold; host pages that are being written are held, empty, and written once."""
        self._host.check_integrity()
        self._lane.check_integrity()
        self._staging.check_integrity(self._backups.staged_bytes + self._restores.staged_bytes)
        written = joined_ids(self._backups.targets() + self._storage.targets())
        for allocator, ids, filled in zip(self._host.allocators, written, self._host.filled(), strict=True):
            if np.unique(ids).size != ids.size:
                raise IntegrityError(owner="HostTier", broken="a host page is written by two transfers")
            if np.intersect1d(ids, filled).size:
                raise IntegrityError(owner="HostTier", broken="a host page is filled and is being written")
            if ids.size and (allocator is None or np.setdiff1d(ids, allocator.held_page_ids()).size):
                raise IntegrityError(owner="HostTier", broken="a host page is being written and nobody holds it")
