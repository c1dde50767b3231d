"""The composition root: every provider of an engine, by name. The only place where the parts meet.

    container = build_container(ServerArgs(cache_type="radix_cache"))
    cache = container.tree_cache()        # one finished object; loads no weights
    scheduler = container.scheduler()     # opens the runtime: weights, pool
    container.shutdown_resources()        # closes it, for good

To swap a part, override its provider before anything is built: see app/providers/testing.py.
"""

from __future__ import annotations

from dependency_injector import containers, providers

from app.caches.base import BasePrefixCache, CacheDeps
from app.caches.builtin import load_builtin_caches, load_entry_points
from app.caches.registry import CacheTypeRegistry, SealedCacheTypeRegistry, default_registry
from app.config.cache_type import check_combination, resolve_cache_type
from app.config.server_args import ServerArgs
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import ReqToTokenPool
from app.models.checkpoint import Progress
from app.providers import device, free_memory, host_sizing, hybrid, model, sizing, step_memory, tiers
from app.providers.cache_arms import cache_arms
from app.providers.lifecycle import Lifecycle, LocalRuntimeResource
from app.runtime.local import new_identity
from app.runtime.row_sampling import RowSampling
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.finish import FinishRule
from app.scheduling.observer import SchedulerObserver, Unobserved
from app.scheduling.scheduler import Scheduler
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import load_tokenizer
from app.tpu.mesh import make_mesh, tp_rank_of

Once = providers.ThreadSafeSingleton  # every object is built once, and servers ask from several threads


class Container(containers.DeclarativeContainer):
    """A table, not a class: methods would vanish from its instances. Build it with `build_container`."""

    server_args = providers.Dependency(instance_of=ServerArgs)
    registry = providers.Dependency(instance_of=SealedCacheTypeRegistry)
    progress: providers.Provider[Progress | None] = providers.Object(None)
    lifecycle = Once(Lifecycle)

    # What is served
    checkpoint = Once(model.open_model, server_args.provided.model_path, progress)
    base_model_config = Once(lambda checkpoint: checkpoint.model_config, checkpoint)
    model_config = Once(sizing.served_model, server_args, base_model_config)
    cache_type = Once(resolve_cache_type, server_args, model_config, registry.provided.components_by_type.call())
    tokenizer = Once(load_tokenizer, checkpoint.provided.folder)
    detokenizer = Once(IncrementalDetokenizer, tokenizer)

    # Where it runs
    page_size = server_args.provided.page_size
    platform = Once(model.resolve_platform, server_args.provided.device)
    tp_size = server_args.provided.tp_size
    mesh = Once(make_mesh, tp_size, platform, server_args.provided.nnodes)
    tp_rank = Once(tp_rank_of, mesh)  # of this process's first device on the mesh's tensor axis

    # Memory
    dtype = Once(sizing.computation_dtype, server_args, platform)
    pool_dtype = Once(sizing.pool_dtype, server_args, platform, dtype)
    attention = Once(sizing.attention_choice, server_args, model_config, platform, pool_dtype, dtype)
    page_spec = Once(sizing.as_stored, Once(sizing.page_spec, server_args, model_config, pool_dtype), attention)
    window_page = Once(hybrid.window_page, server_args, model_config, page_spec)
    one_snapshot = Once(hybrid.one_snapshot, server_args, model_config)
    bytes_a_page = Once(hybrid.bytes_a_page, server_args, model_config, page_spec, window_page, one_snapshot)
    memory_bytes = Once(model.memory_bytes, platform, tp_size)
    pool_room = Once(sizing.pool_room, platform)
    scheduler_limits = Once(sizing.scheduler_limits, server_args, model_config)
    chunk_tokens = scheduler_limits.provided.chunk_tokens
    step_bytes = Once(step_memory.step_bytes, server_args, model_config, scheduler_limits, dtype)
    one_of_each = Once(host_sizing.Specs, page_spec, window_page, one_snapshot)
    demand = Once(host_sizing.tier_demand, server_args, model_config, platform, attention, one_of_each, chunk_tokens)
    pool_size = Once(
        sizing.pool_pages, server_args, model_config, bytes_a_page, memory_bytes, dtype, pool_room, step_bytes, demand
    )
    pool_spec = Once(sizing.with_pages, page_spec, pool_size)
    window_spec = Once(hybrid.window_spec, server_args, model_config, window_page, pool_size, chunk_tokens)
    state_spec = Once(hybrid.state_spec, server_args, model_config, one_snapshot, pool_size)
    hybrid_spec = Once(hybrid.hybrid_spec, pool_spec, window_spec, state_spec)
    specs = Once(host_sizing.Specs, pool_spec, window_spec, state_spec)
    host_size = Once(host_sizing.host_size_here, server_args, model_config, platform, specs, demand)
    device_pool = Once(device.device_pool, pool_spec, hybrid_spec, mesh, attention, model_config)
    free_bytes = Once(free_memory.free_memory, mesh)  # a function: what is free when it is called
    room_check = Once(
        free_memory.RoomCheck,
        args=server_args,
        specs=specs,
        bytes_a_page=bytes_a_page,
        step_bytes=step_bytes,
        mem_fraction=Once(sizing.mem_fraction, server_args, pool_room),
        free_bytes=free_bytes,
        demand=demand,
        host_size=host_size,
    )
    identity = Once(new_identity)
    token_allocator = Once(PagedTokenToKVPoolAllocator, pool_size, page_size, identity)
    window_allocator = Once(hybrid.window_allocator, window_spec, identity)
    state_allocator = Once(hybrid.state_allocator, state_spec, identity)
    num_rows = server_args.provided.max_running_requests
    max_pages = Once(sizing.pages_of_context, model_config, page_size)
    req_to_token_pool = Once(ReqToTokenPool, num_rows=num_rows, max_pages=max_pages, mesh=mesh)
    window_pages = Once(hybrid.window_page_pool, window_allocator, model_config, num_rows, max_pages, mesh)

    # Below the device pool; nothing but None without --enable-hierarchical-cache
    page_carriers = Once(device.page_carriers, pool_spec, hybrid_spec, mesh, attention, model_config)
    host_pool = Once(tiers.host_pool, host_size, page_size, Once(new_identity), page_carriers.provider)
    storage_ids = Once(tiers.identities, checkpoint.provided.digest, model_config, dtype, specs, tp_size, page_carriers)
    storage_lane = Once(tiers.storage_lane, host_size, storage_ids.provider, page_carriers.provider)
    storage_opener = Once(tiers.storage_opener, server_args)
    storage = Once(tiers.AttachedStorage, storage_opener, storage_lane)
    tier_mover = Once(tiers.mover, host_size, host_pool, page_carriers.provider, device_pool, storage_lane, storage)
    host_events: providers.Provider[object] = providers.Object(None)
    storage_events: providers.Provider[object] = providers.Object(None)
    host_tier = Once(tiers.parts, server_args, host_size, host_pool, storage_ids.provider, host_events, storage_events)

    # The device side
    model_runner = Once(
        device.model_runner,
        config=model_config,
        weights_source=checkpoint,
        mesh=mesh,
        pool_spec=pool_spec,
        hybrid_spec=hybrid_spec,
        attention=attention,
        dtype=dtype,
        progress=progress,
    )
    row_sampling = Once(RowSampling, num_rows=num_rows, vocab_size=model_config.provided.vocab_size, mesh=mesh)
    runtime = providers.Resource(
        LocalRuntimeResource,
        lifecycle,
        allocator=token_allocator,
        rows=req_to_token_pool,
        sampling=row_sampling,
        device_pool=device_pool,
        model_runner=model_runner,
        window=window_pages,
        states=Once(hybrid.state_slots, state_allocator),
        running_states=Once(hybrid.running_states, state_spec, device_pool),
        check_room=room_check,
        tiers=tier_mover,
        storage=storage,
    )

    # The control side
    events: providers.Provider[object] = providers.Object(None)
    eviction_observer: providers.Provider[object] = providers.Object(None)
    cache_deps = Once(
        CacheDeps,
        token_allocator=token_allocator.provided.port,
        device_pool=device_pool,
        components=model_config.provided.components,
        sliding_window=model_config.provided.sliding_window,
        window_allocator=Once(hybrid.port_of, window_allocator),
        state_allocator=Once(hybrid.port_of, state_allocator),
        page_size=page_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        eviction_policy=server_args.provided.eviction_policy,
        events=events,
        eviction_observer=eviction_observer,
        host_tier=Once(tiers.if_enabled, server_args, host_tier.provider),
    )
    tree_cache: providers.Selector[BasePrefixCache] = providers.Selector(cache_type.provided.name)
    scheduler_adapter = Once(SchedulerAdapter, tree_cache, num_rows)
    finish_rule = Once(FinishRule, eos_token_ids=tokenizer.provided.eos_token_ids, detokenizer=detokenizer)
    observer: providers.Provider[SchedulerObserver] = Once(Unobserved)
    scheduler = Once(
        Scheduler,
        adapter=scheduler_adapter,
        runtime=runtime,
        finish_rule=finish_rule,
        limits=scheduler_limits,
        observer=observer,
    )


def build_container(
    server_args: ServerArgs,
    registry: CacheTypeRegistry = default_registry,
    progress: Progress | None = None,
) -> Container:
    """An engine's container, with nothing built yet. Settings that exclude one another are refused here: ConfigError.

    registry: where cache types are registered; a copy is sealed, so that later registrations serve later containers.
    progress: told what is being loaded, and the fraction done.
    """
    load_builtin_caches()
    load_entry_points(wanted=server_args.cache_type)
    sealed = registry.seal()
    check_combination(server_args, sealed.names())
    tiers.check_backend(server_args)
    container = Container(server_args=server_args, registry=providers.Object(sealed))
    container.progress.override(providers.Object(progress))
    container.tree_cache.set_providers(**cache_arms(sealed, container.cache_deps))
    return container
