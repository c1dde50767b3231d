"""What the tiers below the device pool do, as metrics and as JSON.

In two steps, like `cache_state`: a TierReading is taken on the engine's thread; it is put into words on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from app.caches.tiers.counters import TierCounters
from app.hicache.counters import DirectionCounters
from app.hicache.counters import TierCounters as MoveCounters
from app.hicache.storage.counters import StorageCounters
from app.hicache.storage.workers import WorkerLoad
from app.observability.tier_metrics import Labels, TierFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReading:
    """Values of one moment. control: what was decided, in tokens; moved: what was done, in bytes; storage, load: its
    keys, and what its workers have to do, of the storage that is attached or was last.
    """

    page_size: int
    control: TierCounters
    moved: MoveCounters
    storage: StorageCounters
    load: WorkerLoad | None
    is_attached: bool

    @property
    def used_host_pages(self) -> int:
        return self.control.num_host_pages - self.control.num_host_pages_free

    @property
    def hidden_ratio(self) -> float:
        """Part of the time of copies between device and host that lay behind steps, at least; 1 before the first.

        At least: a wait counts against it whatever it was for.
        """
        copying_s = self.moved.backup.seconds + self.moved.restore.seconds
        return max(0.0, 1.0 - self.moved.waited_s / copying_s) if copying_s else 1.0

    def directions(self) -> dict[str, DirectionCounters]:
        moved = self.moved
        return {"backup": moved.backup, "restore": moved.restore, "store": moved.store, "fetch": moved.fetch}


def figures_of(reading: TierReading) -> TierFigures:
    """By the names of TIER_METRICS."""
    control, moved, storage, load = reading.control, reading.moved, reading.control.storage, reading.load
    directions = reading.directions()
    drops = {"backup": control.backup_drops, "fetch": storage.fetches_dropped, "store": storage.stores_dropped}
    queues = {"backup": control.queue_length, "prefetch": storage.queued_prefixes, "store": storage.queued_stores}
    if load is not None:
        queues |= {"storage_reads": load.queued_reads, "storage_writes": load.queued_writes}
    figures: dict[str, Mapping[Labels, float]] = {
        "hicache_transfers": _labelled({name: each.num_transfers for name, each in directions.items()}),
        "hicache_bytes": _labelled({name: each.num_bytes for name, each in directions.items()}),
        "hicache_seconds": _labelled({name: each.seconds for name, each in directions.items()}),
        "hicache_failures": _by_reason({name: each.failures for name, each in directions.items()}),
        "hicache_drops": _by_reason(drops),
        "storage_outcomes": _by_reason({str(each): counts for each, counts in reading.storage.outcomes.items()}),
        "hicache_queue_length": _labelled(queues),
        "hicache_transfers_in_flight": _labelled(
            {
                "backup": control.backups_in_flight,
                "restore": control.restores_in_flight,
                "storage": storage.under_way,
            }
        ),
    }
    return figures | {
        name: {(): amount}
        for name, amount in {
            "host_backup_tokens": control.backed_up_tokens,
            "load_back_tokens": control.restored_tokens,
            "backuped_tokens": storage.stored_tokens,
            "prefetched_tokens": storage.fetched_tokens,
            "storage_lookup_tokens": storage.looked_up_tokens,
            "storage_found_tokens": storage.found_tokens,
            "hicache_restores_not_worth": control.not_worth_restoring,
            "hicache_waited_seconds": moved.waited_s,
            "hicache_held_back_seconds": storage.held_back_s,
            "hicache_bytes_in_flight": control.bytes_in_flight,
            "hicache_staging_bytes": moved.staging_bytes,
            "hicache_staging_peak_bytes": moved.most_staging_bytes,
            "hicache_hidden_ratio": reading.hidden_ratio,
            "hicache_host_used_tokens": reading.used_host_pages * reading.page_size,
            "hicache_host_total_tokens": control.num_host_pages * reading.page_size,
            "storage_attached": reading.is_attached,
            "storage_breaker_open": load is not None and load.breaker_open,
        }.items()
    }


def state_of(reading: TierReading) -> dict[str, Any]:
    """The tiers in /server_info: every value is ready for JSON."""
    control = reading.control
    return {
        "host": {
            "used_pages": reading.used_host_pages,
            "total_pages": control.num_host_pages,
            "used_tokens": reading.used_host_pages * reading.page_size,
            "total_tokens": control.num_host_pages * reading.page_size,
            "backed_up_tokens": control.backed_up_tokens,
            "restored_tokens": control.restored_tokens,
            "not_worth_restoring": control.not_worth_restoring,
            "backup_drops": dict(control.backup_drops),
            "restore_failures": dict(control.restore_failures),
            "bytes_in_flight": control.bytes_in_flight,
            "rates": control.rates._asdict(),
            "hidden_ratio": round(reading.hidden_ratio, 4),
        },
        "storage": storage_state(reading),
    }


def storage_state(reading: TierReading) -> dict[str, Any]:
    """The storage's part of it. Its counters are totals since the start, whatever was attached."""
    storage, load = reading.control.storage, reading.load
    return {
        "attached": reading.is_attached,
        "stored_tokens": storage.stored_tokens,
        "looked_up_tokens": storage.looked_up_tokens,
        "found_tokens": storage.found_tokens,
        "fetched_tokens": storage.fetched_tokens,
        "held_back_s": round(storage.held_back_s, 3),
        "stores_dropped": dict(storage.stores_dropped),
        "fetches_dropped": dict(storage.fetches_dropped),
        "under_way": storage.under_way,
        "outcomes": {str(each): dict(counts) for each, counts in reading.storage.outcomes.items() if counts},
        "workers": None if load is None else asdict(load),
    }


def _labelled(amounts: Mapping[str, float]) -> dict[Labels, float]:
    return {(name,): amount for name, amount in amounts.items()}


def _by_reason(counts: Mapping[str, Mapping[Any, int]]) -> dict[Labels, float]:
    return {(name, str(reason)): count for name, reasons in counts.items() for reason, count in reasons.items()}
