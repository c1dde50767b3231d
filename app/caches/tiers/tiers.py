"""The tiers below one cache's device pool. Who owns what:

    device tree     device pages, by its own locks          UnifiedRadixCache
    restores        device pages into which copies travel   Restores; locks its source in the host tree
    host tree       host pages, by its own locks            HostCache
    backups         host pages into which copies travel     Backups; locks their parents in the host tree
    fetches         host pages into which storage is read   StorageTier

Each transfer is known by its number, from its plan to its end, and belongs to one of the last three.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from app.caches.base import InsertResult, MatchResult
from app.caches.component_cache import ComponentCache
from app.caches.tiers.backups import Backups
from app.caches.tiers.counters import TierCounters, TierTally
from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.ports import RestoredTokens
from app.caches.tiers.restores import Restores
from app.caches.tiers.storage_tier import NO_INTENTS, StorageTier
from app.caches.tree.node import TreeNode
from app.core.keys import Namespace, RadixKey
from app.core.transfers import (
    NO_IDS,
    NO_TRANSFERS,
    PageCounts,
    PageIds,
    PreparedTransfers,
    TransferEnd,
    TransferPlan,
)
from app.errors import IntegrityError

_REMEMBERED = 4096  # requests that wait no more, whose restored tokens may still be asked for


class Tiers:
    """`CacheTiers`, and what the cache itself tells: `TierListener`. Single-threaded."""

    def __init__(
        self,
        *,
        device: ComponentCache,
        host: HostCache,
        backups: Backups,
        restores: Restores,
        storage: StorageTier,
        tally: TierTally,
    ) -> None:
        self.host = host
        self._device = device
        self._backups = backups
        self._restores = restores
        self._storage = storage
        self._tally = tally
        self._host_seen = host.identity
        self._has_planned = False  # whether anything was drafted for the plan that was made last, until it is prepared
        self._waiting: dict[str, RadixKey] = {}
        self._restored: OrderedDict[str, RestoredTokens] = OrderedDict()

    # -- what the cache tells

    def published(self, key: RadixKey, result: InsertResult, pages: np.ndarray) -> None:
        self._backups.published(key, result, pages)

    def matched(self, key: RadixKey, found: MatchResult) -> None:
        self._backups.matched(key, found)

    def leaving(self, node: TreeNode) -> None:
        self._catch_up_host()  # the device tells of its own nodes only
        self._backups.leaving(node)

    # -- what a scheduler asks, see CacheTiers

    def expect(self, request_id: str, key: RadixKey) -> None:
        self._catch_up()
        self._waiting[request_id] = key
        self._restored.pop(request_id, None)
        self._restores.expect(request_id)
        if self._storage.is_attached:
            self._storage.expect(request_id, key, max(self._device.probe(key), self.host.probe(key)))

    def forget(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is None:
            return
        brought = self.restored_tokens(request_id)
        if any(brought):
            self._restored[request_id] = brought
        if len(self._restored) > _REMEMBERED:
            self._restored.popitem(last=False)
        self._restores.forget(request_id)
        self._storage.forget(request_id)

    def holds_back(self, request_id: str) -> bool:
        return self._restores.holds_back(request_id, self._waiting.get(request_id)) or self._storage.holds_back(
            request_id
        )

    def probe(self, key: RadixKey) -> int:
        self._catch_up()
        return self.host.probe(key)

    def restorable(self, request_id: str, key: RadixKey, num_tokens: int) -> PageCounts:
        self._catch_up()
        return self._restores.restorable(request_id, key, num_tokens)

    def begin_restore(self, request_id: str, key: RadixKey, room: PageCounts) -> PageCounts:
        self._catch_up()
        return self._restores.begin(request_id, key, room)

    def restored_tokens(self, request_id: str) -> RestoredTokens:
        if request_id in self._restored:
            return self._restored[request_id]
        brought = self._restores.restored_tokens(request_id)
        fetched = min(self._storage.fetched_tokens(request_id), brought)
        return RestoredTokens(host=brought - fetched, storage=fetched)

    @property
    def is_urgent(self) -> bool:
        waits = self._backups.is_urgent and not self._backups.num_sent and not self._restores.num_sent
        return bool(waits or self._restores.num_drafted or self._storage.is_urgent)

    @property
    def num_under_way(self) -> int:
        return (
            self._backups.num_waiting
            + self._backups.num_sent
            + self._restores.num_drafted
            + self._restores.num_sent
            + self._storage.num_under_way
        )

    # -- plans

    def plan(self, wait_s: float = 0.0) -> TransferPlan:
        self._catch_up_host()
        if wait_s:
            self._backups.pace.lift()
        restoring_bytes = self._restores.bytes_in_flight
        has_backups = self._backups.next_plan(is_restoring=restoring_bytes > 0)
        is_due = has_backups or wait_s or self._restores.num_drafted or self._storage.is_urgent
        free_host = self.host.recorded_frees()
        if not is_due and free_host is NO_IDS:
            self._has_planned = False
            return NO_TRANSFERS
        self._device.catch_up()
        self.host.end_plan()
        self._has_planned = True
        restores = self._restores.draft()
        backups = self._backups.draft(restoring_bytes=restoring_bytes)
        intents = self._storage.draft()
        free_host = self.host.recorded_frees()
        if not (restores or backups or wait_s) and intents is NO_INTENTS and free_host is NO_IDS:
            return NO_TRANSFERS
        return TransferPlan(
            free_host=free_host,
            cancels=intents.cancels,
            backups=backups,
            restores=restores,
            stores=intents.stores,
            lookups=intents.lookups,
            fetches=intents.fetches,
            wait_s=wait_s,
        )

    def prepared(self, transfers: PreparedTransfers) -> None:
        if not self._has_planned:
            return
        self._has_planned = False
        self.host.end_plan()
        self._restores.prepared(transfers.restores)
        self._backups.prepared(transfers.backups)
        self._storage.prepared(transfers.fetches)

    def refused(self) -> None:
        self._catch_up()
        self.host.end_plan()
        self._restores.refused()
        self._backups.refused()
        if self._has_planned:
            self._has_planned = False
            self._storage.refused()

    def ended(self, ends: Sequence[TransferEnd]) -> None:
        self._catch_up()
        for end in ends:
            if self._restores.sends(end.number):
                self._restores.ended(end)
            elif self._backups.sends(end.number):
                landed = self._backups.ended(end)
                if landed is not None:
                    self._storage.hosted(*landed)
            else:
                self._storage.ended(end)

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        self._restores.choice.note_step(prompt_tokens=prompt_tokens, seconds=seconds)
        self._backups.note_step(prompt_tokens=prompt_tokens, decode_rows=decode_rows, seconds=seconds)

    def note_copies(self, *, restored_bytes_per_s: float) -> None:
        self._restores.choice.begin_at(restored_bytes_per_s)

    # -- storage at run time

    def attach_storage(self, seed: Callable[[Namespace], bytes]) -> None:
        """From now on prefixes are stored under keys whose chains begin with `seed`."""
        self._storage.attach(seed)

    def detach_storage(self) -> None:
        self._storage.detach()

    # -- ends of everything

    def reset_device(self) -> None:
        """Backups that were sent end by themselves; their host pages are held until then."""
        self._catch_up_host()
        self._backups.forget_waiting()
        self._restores.lose_device()
        self.host.nothing_spare()
        self.host.end_plan()

    def flush(self) -> None:
        self._catch_up()
        self._backups.forget_waiting()
        self.host.flush()

    def in_flight_ids(self) -> PageIds:
        return self._restores.in_flight_ids()

    def counters(self) -> TierCounters:
        """What happened so far, and what is under way. O(transfers under way)."""
        tally = self._tally
        return TierCounters(
            backed_up_tokens=tally.backed_up_tokens,
            restored_tokens=tally.restored_tokens,
            backed_up_bytes=tally.backed_up_bytes,
            restored_bytes=tally.restored_bytes,
            backup_s=tally.backup_s,
            restore_s=tally.restore_s,
            host_hits=tally.host_hits,
            not_worth_restoring=tally.not_worth_restoring,
            backup_drops=dict(tally.backup_drops),
            restore_failures=dict(tally.restore_failures),
            queue_length=self._backups.num_waiting,
            backups_in_flight=self._backups.num_sent,
            restores_in_flight=self._restores.num_sent,
            bytes_in_flight=self._backups.bytes_in_flight + self._restores.bytes_in_flight,
            backup_bytes_a_plan=self._backups.pace.bytes_a_plan,
            rates=self._restores.choice.rates,
            num_host_pages=self.host.capacities().pages,
            num_host_pages_free=self.host.available().pages,
            num_host_pages_unlocked=self.host.unlocked_pages,
            num_host_pages_locked=self.host.locked_pages,
            storage=self._storage.counters,
        )

    def check_integrity(self) -> None:
        self._catch_up()
        self.host.check_integrity()
        in_flight = [*self._backups.in_flight_ids(), self._storage.in_flight_ids()]
        broken = []
        for pool, (owned, capacity) in enumerate(zip(self.host.owned_ids(), self.host.capacities(), strict=True)):
            ids = np.concatenate([np.empty(0, np.int32), *owned, *(each[pool] for each in in_flight)])
            if not np.array_equal(np.sort(ids), np.arange(1, capacity + 1)):
                held = np.bincount(ids, minlength=capacity + 1)[1:]
                double, leaked = np.flatnonzero(held > 1) + 1, np.flatnonzero(held == 0) + 1
                broken.append(f"{PageIds._fields[pool]}: double owned {double[:8]}, leaked {leaked[:8]} of {capacity}")
        sent_bytes = self._backups.bytes_in_flight
        if sent_bytes < 0 or bool(sent_bytes) != bool(self._backups.num_sent):
            broken.append(f"{sent_bytes} bytes in {self._backups.num_sent} backups under way")
        if broken:
            raise IntegrityError(owner="ledger of the host tier", broken="; ".join(broken))

    def _catch_up(self) -> None:
        self._catch_up_host()
        self._device.catch_up()

    def _catch_up_host(self) -> None:
        """If a runtime came back with other host pools, what was in the old ones is no more."""
        if self.host.identity != self._host_seen:
            self._host_seen = self.host.identity
            self._backups.lose_host()
            self._restores.lose_host()
            self._storage.reset()
