"""What some models need beside pages of full attention: window pages, recurrent states. None for all others."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from app.config.model_config import Component, ModelConfig
from app.config.server_args import ServerArgs
from app.core.handles import CacheIdentity
from app.core.ports import PoolSpec, StateSpec, TokenAllocator
from app.core.sliding_window import pages_seen
from app.errors import ConfigError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.state_slots import StateSlots
from app.memory.window_pages import WindowPagePool
from app.providers.sizing import snapshot_interval
from app.runtime.running_states import RunningStates, StateCopier
from app.tpu.hybrid_layout import HybridSpec


def hybrid_spec(spec: PoolSpec, window: PoolSpec | None, states: StateSpec | None) -> HybridSpec:
    """Of the arrays: a kind without a layer has none. `spec`: of full pages."""
    return HybridSpec(full=spec if spec.num_layers else None, window=window, states=states)


def window_page(args: ServerArgs, model: ModelConfig, page: PoolSpec) -> PoolSpec | None:
    """The shape of one window page. `page`: of one full page."""
    if Component.SWA not in model.components:
        return None
    return replace(page, num_layers=len(model.layers_with(Component.SWA)), arrays_per_layer=2)


def one_snapshot(args: ServerArgs, model: ModelConfig) -> StateSpec | None:
    """The shape of a state, as a pool of one snapshot."""
    if Component.RECURRENT not in model.components:
        return None
    return StateSpec(
        num_snapshots=1,
        num_rows=args.max_running_requests,
        num_layers=len(model.layers_with(Component.RECURRENT)),
        arrays=model.recurrent_state,
        num_ranks=args.tp_size,
    )


def bytes_a_page(
    args: ServerArgs, model: ModelConfig, page: PoolSpec, window: PoolSpec | None, state: StateSpec | None
) -> int:
    """Of the device, for each full page that there is: with its share of window pages and of snapshots."""
    needed = page.held_bytes
    if window is not None:
        needed += int(window.held_bytes * args.swa_full_tokens_ratio)
    interval = snapshot_interval(args, model)
    if state is not None and interval is not None:
        needed += state.held_bytes * args.page_size // interval
    return max(needed, 1)


def window_spec(
    args: ServerArgs, model: ModelConfig, page: PoolSpec | None, num_full_pages: int, chunk_tokens: int
) -> PoolSpec | None:
    """The window pool: so many pages as the ratio says, no fewer than one request needs, no more than full ones."""
    if page is None or model.sliding_window is None:
        return None
    # A request's window may lie half in cached pages, which go in whole nodes, and half in its own.
    kept = pages_seen(1, model.sliding_window, args.page_size) + 1
    least = 2 * (kept + -(-chunk_tokens // args.page_size)) + 2
    num_pages = min(max(least, int(num_full_pages * args.swa_full_tokens_ratio)), num_full_pages)
    return replace(page, num_pages=num_pages)


def state_spec(args: ServerArgs, model: ModelConfig, state: StateSpec | None, num_full_pages: int) -> StateSpec | None:
    """The pool of states: as asked, else a snapshot for each stretch of the interval that the pages hold.

    ConfigError for more than could ever be in use.
    """
    interval = snapshot_interval(args, model)
    if state is None or interval is None:
        return None
    num_snapshots = args.max_recurrent_snapshots
    if num_snapshots is None:
        num_snapshots = num_full_pages * args.page_size // interval + args.max_running_requests
    most = num_full_pages + 2 * args.max_running_requests
    if num_snapshots > most:
        raise ConfigError(
            field="--max-recurrent-snapshots",
            value=num_snapshots,
            allowed=f"at most {most}: one for each page of the KV pool, and two for each running request",
        )
    return replace(state, num_snapshots=num_snapshots)


def pool_bytes(spec: PoolSpec, window: PoolSpec | None, states: StateSpec | None) -> int:
    """Of all pools of the device, padding pages and running states too, of all ranks together."""
    total = (spec.num_pages + 1) * spec.held_bytes
    if window is not None:
        total += (window.num_pages + 1) * window.held_bytes
    if states is not None:
        total += states.num_slots * states.held_bytes
    return total


def window_allocator(spec: PoolSpec | None, identity: CacheIdentity) -> PagedTokenToKVPoolAllocator | None:
    return None if spec is None else PagedTokenToKVPoolAllocator(spec.num_pages, spec.page_size, identity)


def state_allocator(spec: StateSpec | None, identity: CacheIdentity) -> PagedTokenToKVPoolAllocator | None:
    """Hands out snapshots 1..num_snapshots as pages of one token."""
    return None if spec is None else PagedTokenToKVPoolAllocator(spec.num_snapshots, 1, identity)


def port_of(allocator: PagedTokenToKVPoolAllocator | None) -> TokenAllocator | None:
    return None if allocator is None else allocator.port


def window_page_pool(
    allocator: PagedTokenToKVPoolAllocator | None, model: ModelConfig, num_rows: int, max_pages: int, mesh: Mesh
) -> WindowPagePool | None:
    if allocator is None or model.sliding_window is None:
        return None
    return WindowPagePool(
        allocator=allocator, window=model.sliding_window, num_rows=num_rows, max_pages=max_pages, mesh=mesh
    )


def state_slots(allocator: PagedTokenToKVPoolAllocator | None) -> StateSlots | None:
    return None if allocator is None else StateSlots(allocator=allocator)


def running_states(spec: StateSpec | None, device_pool: StateCopier) -> RunningStates | None:
    return None if spec is None else RunningStates(spec, device_pool)
