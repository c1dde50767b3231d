"""The tiers below the device pool, as facts for `tpukv doctor` and /server_info: plain values for JSON."""

from __future__ import annotations

from typing import Any

from app.config.server_args import ServerArgs
from app.core.ports import PoolSpec
from app.hicache.copy_rates import measure_copies
from app.hicache.storage.base import HiCacheStorage
from app.providers.host_sizing import HostSize
from app.tpu.lent_arrays import LentArrays
from app.tpu.page_carrier import PageCarrier

RESTORED_RATE = "restored_tokens_per_s"


def tier_facts(args: ServerArgs, size: HostSize | None, storage: HiCacheStorage | None) -> dict[str, Any]:
    """What was chosen. storage: if it is open."""
    if size is None:
        return {"host_tier": "none"}
    return {
        "host_tier": args.hicache_host_mode,
        "host_write_policy": args.hicache_write_policy,
        **size_facts(size, args.page_size),
        **_storage_facts(args, storage),
    }


def size_facts(size: HostSize, page_size: int) -> dict[str, Any]:
    """The host pool, and what copies may take of the device."""
    pages, window_pages, states = size.counts
    return {
        "host_pool_pages": pages,
        "host_pool_tokens": pages * page_size,
        **({"host_window_pages": window_pages} if window_pages else {}),
        **({"host_snapshots": states} if states else {}),
        "host_pool_bytes": size.num_bytes,
        "host_staging_bytes": size.limits.staging_bytes,
    }


def copy_facts(pool: LentArrays, carrier: PageCarrier, spec: PoolSpec) -> dict[str, Any]:
    """Measured, on an open pool that nobody uses meanwhile. Nothing where full pages have no bytes."""
    rates = measure_copies(pool, carrier, spec.num_pages)
    if rates is None:
        return {}
    moved = f"in {rates.num_bytes / 1e6:.0f} MB"
    restored = round(rates.to_device / carrier.page_bytes * spec.page_size)
    return {
        "copied_to_host": f"{rates.to_host / 1e9:.2f} GB a second, {moved}",
        "copied_to_device": f"{rates.to_device / 1e9:.2f} GB a second, {moved}",
        RESTORED_RATE: restored,
        "restoring_pays": f"where less than {restored:,} prompt tokens a second are computed",
    }


def _storage_facts(args: ServerArgs, storage: HiCacheStorage | None) -> dict[str, Any]:
    backend = args.hicache_storage_backend
    if backend is None:
        return {"storage": "none"}
    facts: dict[str, Any] = {"storage": f"{backend} {args.hicache_storage_path}".rstrip()}
    if storage is None:
        return facts
    able = storage.capabilities
    facts["storage_is"] = [word for word, so in (("persistent", able.persistent), ("shared", able.shared)) if so]
    usage = storage.usage()
    if usage is not None:
        facts |= {"storage_bytes": usage.num_bytes, "storage_values": usage.num_values}
    return facts
