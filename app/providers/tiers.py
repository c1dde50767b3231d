"""The tiers below the device pool, put together. Every function here gives None without --enable-hierarchical-cache."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import structlog

from app.caches.tiers.ports import TierParts
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs, flag_of
from app.config.tier_settings import TierSettings
from app.core.handles import CacheIdentity
from app.core.keys import Namespace
from app.core.transfers import OfEachPool
from app.errors import ConfigError
from app.hicache.host_tier import HostTier
from app.hicache.identities import Identities, storage_identities
from app.hicache.storage.base import HiCacheStorage
from app.hicache.storage.registry import StorageConfig, backend_names, open_storage
from app.hicache.storage.workers import WorkerLimits
from app.hicache.storage_lane import WorkersLane
from app.memory.host_kv_pool import HostKVPool
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.providers.host_sizing import HostSize, Specs
from app.providers.hybrid import port_of
from app.providers.tier_demand import GB
from app.tpu.lent_arrays import LentArrays
from app.tpu.page_carrier import PageCarrier
from app.tpu.tier_copies import DeviceCopies, TierCopies

_log = structlog.get_logger(__name__)

CLOSING_S = 5.0  # for what is queued to be written, when the storage goes
_QUEUE_PART = 8  # of the host pool, that pages on their way to storage may take beside it

Carriers = OfEachPool[PageCarrier | None]
OpenStorage = Callable[[], HiCacheStorage]


def check_backend(args: ServerArgs) -> None:
    """ConfigError for a storage that nobody can open."""
    name = args.hicache_storage_backend
    if name is not None and name not in backend_names():
        raise ConfigError(
            field="--hicache-storage-backend", value=name, allowed=f"known backends are {', '.join(backend_names())}"
        )


def host_pool(
    size: HostSize | None,
    page_size: int,
    identity: CacheIdentity,
    carriers: Callable[[], Carriers],
) -> HostKVPool | None:
    """Owner of the host's pages; takes memory for what is put into it, not before."""
    if size is None:
        return None
    each = carriers()
    tokens = OfEachPool(page_size, page_size, 1)
    allocators = OfEachPool(
        *(
            None if carrier is None else PagedTokenToKVPoolAllocator(count, of_page, identity)
            for carrier, count, of_page in zip(each, size.counts, tokens, strict=True)
        )
    )
    return HostKVPool(allocators=allocators, carriers=each)


def identities(
    weights_digest: str, model: ModelConfig, dtype: str, specs: Specs, tp_size: int, carriers: Carriers
) -> Identities:
    """What tells this engine's pages from those of others. dtype: of weights and activations."""
    forms = OfEachPool(*(None if carrier is None else carrier.page for carrier in carriers))
    return storage_identities(
        weights_digest=weights_digest,
        model=model,
        computed_dtype=dtype,
        tp_size=tp_size,
        pages=specs.pages,
        window_pages=specs.window_pages,
        states=specs.states,
        forms=forms,
    )


def storage_lane(
    size: HostSize | None, identities: Callable[[], Identities], carriers: Callable[[], Carriers]
) -> WorkersLane | None:
    """The way to a storage, which may be attached while the engine runs."""
    if size is None:
        return None
    page_bytes = OfEachPool(*(0 if carrier is None else carrier.page_bytes for carrier in carriers()))
    room = max(size.num_bytes // _QUEUE_PART, max(page_bytes))
    limits = WorkerLimits(max_queued_bytes=min(room, WorkerLimits().max_queued_bytes))
    return WorkersLane(page_bytes=page_bytes, identities=identities(), forms=carriers(), limits=limits)


def mover(
    size: HostSize | None,
    pool: HostKVPool | None,
    carriers: Callable[[], Carriers],
    device_pool: LentArrays,
    lane: WorkersLane | None,
    storage: AttachedStorage,
    copies: Callable[[Carriers], TierCopies] = DeviceCopies,
) -> HostTier | None:
    """What moves pages, for the runtime."""
    if size is None or pool is None or lane is None:
        return None
    each = carriers()
    return HostTier(
        host_pool=pool,
        carriers=each,
        device_pool=device_pool,
        limits=size.limits,
        lane=lane,
        copies=copies(each),
        attach_again=storage.attach_again,
    )


def parts(
    args: ServerArgs,
    size: HostSize | None,
    pool: HostKVPool | None,
    identities: Callable[[], Identities],
    host_events: object,
    storage_events: object,
) -> TierParts | None:
    """What the cache makes its tiers of."""
    if size is None or pool is None:
        return None
    full, window, states = pool.allocators
    assert full is not None  # every device pool has full pages
    stores = args.hicache_storage_backend is not None
    return TierParts(
        token_allocator=full.port,
        window_allocator=port_of(window),
        state_allocator=port_of(states),
        limits=size.limits,
        settings=tier_settings(args),
        storage_seed=seed_of(identities()) if stores else None,
        host_events=host_events,
        storage_events=storage_events,
    )


def if_enabled(args: ServerArgs, host_tier: Callable[[], TierParts]) -> Callable[[], TierParts] | None:
    """The way to the parts, for a cache that asks for them."""
    return host_tier if args.enable_hierarchical_cache else None


def tier_settings(args: ServerArgs) -> TierSettings:
    return TierSettings(
        write_policy=args.hicache_write_policy,
        write_min_hits=args.hicache_write_min_hits,
        host_mode=args.hicache_host_mode,
        prefetch_policy=args.hicache_storage_prefetch_policy,
        prefetch_timeout_s=args.hicache_storage_prefetch_timeout,
        storage_deadline_s=args.hicache_storage_deadline,
    )


def storage_opener(args: ServerArgs) -> OpenStorage | None:
    """What opens the storage that the settings name. None where they name none."""
    name = args.hicache_storage_backend
    if name is None:
        return None
    size = args.hicache_storage_size
    config = StorageConfig(
        path=args.hicache_storage_path,
        capacity_bytes=None if size is None else int(size * GB),
        options=json.loads(args.hicache_storage_options or "{}"),
    )

    def opening() -> HiCacheStorage:
        try:
            return open_storage(name, config)
        except ConfigError as error:
            raise _by_flag(error) from error

    return opening


class AttachedStorage:
    """The storage of an engine: the one it begins with, opened before weights are loaded, or what came later.

    It is gone with the runtime. Safe from any thread; each call that opens, empties or closes may wait for the storage.
    """

    def __init__(self, opening: OpenStorage | None, lane: WorkersLane | None) -> None:
        """opening: of the one to begin with. lane: None without tiers."""
        self._opening = opening
        self._lane = lane
        self._lock = threading.Lock()
        self._opened_by: OpenStorage | None = None
        self.storage: HiCacheStorage | None = None  # while it is open

    def open(self) -> None:
        """ConfigError where the storage does not answer."""
        if self._opening is not None and self._lane is not None and self.storage is None:
            self.attach(self._opening)

    def attach(self, opening: OpenStorage) -> None:
        """Open a storage and use it. ConfigError if it does not answer, if there is another, or without tiers."""
        field = "--hicache-storage-backend"
        if self._lane is None:
            raise ConfigError(field=field, value=None, allowed="with --enable-hierarchical-cache")
        with self._lock:
            if self.storage is not None:
                raise ConfigError(field=field, value=type(self.storage).__name__, allowed="one storage at a time")
            self._open(self._lane, opening)

    def attach_again(self) -> None:
        """The lane was closed with the runtime, which is opened again: what was attached then is now.

        Without it, if it does not answer: everything is served, and computed.
        """
        with self._lock:
            opening = self._opened_by
            if self._lane is None or opening is None:
                return
            self.storage = self._opened_by = None
            try:
                self._open(self._lane, opening)
            except ConfigError as error:
                _log.error("storage_not_attached_again", reason=str(error))

    def clear(self, timeout_s: float) -> int:
        """Delete all that the storage has of ours, of whatever identity. -> values. ConfigError where there is none."""
        if self._lane is None:
            raise ConfigError(field="--hicache-storage-backend", value=None, allowed="a storage that can be cleared")
        return self._lane.clear(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Write or drop what is queued, within a bound, and close the storage. Idempotent."""
        with self._lock:
            self.storage = self._opened_by = None
            if self._lane is not None:
                self._lane.detach(CLOSING_S)

    def _open(self, lane: WorkersLane, opening: OpenStorage) -> None:
        storage = opening()
        lane.attach(storage)
        self.storage, self._opened_by = storage, opening


def seed_of(identities: Identities) -> Callable[[Namespace], bytes]:
    """What starts the chain of storage keys: of full pages, by which all others are named as well."""
    assert identities.pages is not None
    return identities.pages.seed


def _by_flag(error: ConfigError) -> ConfigError:
    """The same, with the flag in place of the field's name."""
    fields = {**error.fields, "field": flag_of(error.fields["field"].lstrip("-").replace("-", "_"))}
    return type(error)(**fields)
