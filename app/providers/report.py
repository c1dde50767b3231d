"""What an engine is made of, and why: for `tpukv doctor` and /server_info."""

from __future__ import annotations

from typing import Any

from app.config.checks import advice, tier_advice
from app.containers import Container
from app.models.families.table import weight_bytes
from app.providers.device import pool_layout
from app.providers.sizing import pages_of_context, snapshot_interval
from app.providers.tier_report import tier_facts
from app.providers.warmup import level_of_server, reachable_shapes, warmup_facts


def engine_facts(container: Container) -> dict[str, Any]:
    """Plain values for JSON. Builds the device pool if that has not been done."""
    args = container.server_args()
    cache = container.cache_type()
    served = container.model_config()
    spec, attention = container.device_pool().spec, container.attention()
    devices = list(container.mesh().devices.flat)
    dtype = container.dtype()
    return {
        "cache_type": cache.name,
        "cache_type_reason": cache.reason,
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "device_memory_bytes": container.memory_bytes(),
        "tp_size": container.tp_size(),
        "architecture": served.architecture,
        "model_components": sorted(component.value for component in served.components),
        "attention": attention.kind.value,
        "attention_reason": attention.reason,
        "pool_layout": type(pool_layout(attention)).__name__,
        "dtype": dtype,
        "weights_bytes": weight_bytes(served, dtype),
        "step_bytes": container.step_bytes(),
        "context_length": served.context_length,
        "kv_cache_dtype": spec.dtype,
        "page_size": spec.page_size,
        "pool_pages": spec.num_pages,
        "pool_tokens": spec.num_pages * spec.page_size,
        "pool_bytes": (spec.num_pages + 1) * spec.held_bytes,  # with the padding page
        **_window_facts(container),
        **_state_facts(container),
        **tier_facts(args, container.host_size(), container.storage().storage),
        **_compiled(container),
        "warnings": notes(container),
    }


def notes(container: Container) -> list[str]:
    """What works but may surprise in the settings, one sentence each."""
    args, size = container.server_args(), container.host_size()
    pool_tokens = container.pool_size() * args.page_size
    noted = advice(args, container.base_model_config(), container.cache_type().name, pool_tokens)
    if size is not None:
        noted += tier_advice(args, pool_tokens, size.counts.pages * args.page_size)
    return noted


def _window_facts(container: Container) -> dict[str, Any]:
    """Nothing for a model without sliding windows."""
    spec = container.window_spec()
    if spec is None:
        return {}
    return {
        "sliding_window": container.model_config().sliding_window,
        "window_pool_pages": spec.num_pages,
        "window_pool_tokens": spec.num_pages * spec.page_size,
        "window_pool_bytes": (spec.num_pages + 1) * spec.held_bytes,
    }


def _state_facts(container: Container) -> dict[str, Any]:
    """What hits in a model with recurrent layers cost; nothing for a model without."""
    spec = container.state_spec()
    if spec is None:
        return {}
    interval = snapshot_interval(container.server_args(), container.model_config())
    page = container.pool_spec()
    return {
        "recurrent_track_interval": interval,
        "snapshots": spec.num_snapshots,
        "snapshot_bytes": spec.held_bytes,
        "snapshot_is_worth_tokens_of_kv": round(spec.held_bytes * page.page_size / max(page.held_bytes, 1)),
        "state_pool_bytes": spec.num_slots * spec.held_bytes,
    }


def _compiled(container: Container) -> dict[str, list[int] | list[str]]:
    """The sizes that programs are compiled for, and when."""
    args, limits = container.server_args(), container.scheduler_limits()
    max_pages = pages_of_context(container.model_config(), args.page_size)
    shapes = reachable_shapes(args.page_size, max_pages, limits)
    return {
        "buckets_rows": shapes.rows(),
        "buckets_chunk_tokens": shapes.tokens(),
        "buckets_context_tokens": [pages * args.page_size for pages in shapes.pages()],
        **warmup_facts(
            level_of_server(args.warmup, container.platform()), shapes, has_tiers=args.enable_hierarchical_cache
        ),
    }
