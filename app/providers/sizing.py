"""Sizes, from settings, model and memory. Arithmetic only: nothing is allocated, no weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from app.config.checks import check_against_model
from app.config.model_config import Component, ModelConfig
from app.config.parallel import padded_kv_heads
from app.config.server_args import CHUNKING_OFF, ServerArgs
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.models.families.table import weight_bytes
from app.models.layers.attention_choice import AttentionChoice, AttentionKind, choose_attention
from app.providers.tier_demand import NO_DEMAND, TierDemand, refused_beside_pool
from app.scheduling.limits import SchedulerLimits

LATENT_TILE = 128
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRoom:
    """How much of a platform's memory a pool takes that nobody gave a size."""

    mem_fraction: float  # for weights, pool and a step; the rest is for compiled programs and whoever else is there
    full_contexts: int | None = None  # so many of the longest requests at most, if nobody gave a fraction


_ROOM = {
    # More of the longest requests at once gain nothing on a CPU, and touching the memory takes time.
    "cpu": PoolRoom(mem_fraction=0.7, full_contexts=2),
    # tests/tpu compiles the step programs of real models beside a pool of this size.
    "tpu": PoolRoom(mem_fraction=0.9),
}


def pool_room(platform: str) -> PoolRoom:
    return _ROOM[platform]


def served_model(args: ServerArgs, model: ModelConfig) -> ModelConfig:
    """The model with the context length that is served: asked for, else the model's, else what the pool holds.

    Raises ConfigError for settings that this model cannot be served with.
    """
    check_against_model(args, model)
    limit = args.context_length or model.context_length
    if args.max_total_tokens is not None:
        limit = min(limit, args.max_total_tokens // args.page_size * args.page_size)
    return replace(model, context_length=limit)


def computation_dtype(args: ServerArgs, platform: str) -> str:
    """ "float32" or "bfloat16", of weights and activations."""
    if args.dtype != "auto":
        return args.dtype
    return "float32" if platform == "cpu" else "bfloat16"


def pool_dtype(args: ServerArgs, platform: str, computed: str) -> str:
    """How the pool stores elements. On CPU bfloat16 is kept as bits: XLA's bfloat16 scatters there copy the pool."""
    wanted = computed if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    return "bfloat16_bits" if wanted == "bfloat16" and platform == "cpu" else wanted


def page_spec(args: ServerArgs, model: ModelConfig, stored: str) -> PoolSpec:
    """The shape of one page, as a pool of one page."""
    heads = 1 if model.latent_kv else padded_kv_heads(model.num_heads, model.num_kv_heads, args.tp_size)
    return PoolSpec(
        num_pages=1,
        page_size=args.page_size,
        num_layers=len(model.layers_with(Component.FULL)),
        num_kv_heads=heads,
        head_dim=model.head_dim,
        dtype=stored,
        arrays_per_layer=1 if model.latent_kv else 2,
        num_ranks=args.tp_size,
    )


def attention_choice(
    args: ServerArgs, model: ModelConfig, platform: str, stored: str, computed: str
) -> AttentionChoice:
    """stored, computed: types of the pool's elements and of activations."""
    if model.is_hybrid:
        # Rows of a latent that fill no whole tiles make TPU programs copy the pool.
        padding = -model.head_dim % LATENT_TILE if model.latent_kv and platform == "tpu" else 0
        reason = "layers that differ have arrays of their own"
        return AttentionChoice(kind=AttentionKind.ROWS, reason=reason, extra_head_dim=padding)
    return choose_attention(
        platform=platform,
        num_kv_heads=padded_kv_heads(model.num_heads, model.num_kv_heads, args.tp_size),
        head_dim=model.head_dim,
        tp_size=args.tp_size,
        pool_dtype=stored,
        dtype=computed,
    )


def as_stored(page: PoolSpec, attention: AttentionChoice) -> PoolSpec:
    """The page with the padding that the attention asks for."""
    return replace(page, extra_kv_heads=attention.extra_kv_heads, extra_head_dim=attention.extra_head_dim)


def mem_fraction(args: ServerArgs, room: PoolRoom) -> float:
    """The part of the memory that weights, pool and a step may take: as asked, else the platform's.

    All of it for a pool whose size was asked for.
    """
    if args.mem_fraction_static is not None:
        return args.mem_fraction_static
    return room.mem_fraction if args.max_total_tokens is None else 1.0


def pool_pages(
    args: ServerArgs,
    model: ModelConfig,
    bytes_a_page: int,
    memory_bytes: int,
    dtype: str,
    room: PoolRoom,
    step_bytes: int,
    demand: TierDemand = NO_DEMAND,
) -> int:
    """Pages of the pool: as asked, else what memory allows beside weights, a step and the tiers. ConfigError if that
    serves no request.

    bytes_a_page, memory_bytes, step_bytes: over all ranks; a page with all that it needs beside it.
    """
    usable = int(memory_bytes * mem_fraction(args, room)) - weight_bytes(model, dtype) - step_bytes
    fitting = NO_DEMAND.fitting_pages(usable, bytes_a_page)
    if args.max_total_tokens is not None:
        pages = args.max_total_tokens // args.page_size
        if pages <= fitting and pages > demand.fitting_pages(usable, bytes_a_page):
            raise refused_beside_pool(args, usable, (pages + 1) * bytes_a_page, demand)
        if pages > fitting:
            raise ConfigError(
                field="--max-total-tokens",
                value=args.max_total_tokens,
                allowed=f"at most {fitting * args.page_size}: that many tokens of KV fit the memory that weights and "
                "a step leave",
            )
        return pages
    pages = demand.fitting_pages(usable, bytes_a_page)
    if room.full_contexts is not None and args.mem_fraction_static is None:
        pages = min(pages, room.full_contexts * model.context_length // args.page_size)
    if pages * args.page_size < model.context_length:
        least = pages_of_context(model, args.page_size)
        if least <= fitting:
            raise refused_beside_pool(args, usable, (least + 1) * bytes_a_page, demand)
        raise ConfigError(
            field="--context-length",
            value=model.context_length,
            allowed=f"memory holds {pages * args.page_size} tokens of KV beside weights and a step; ask for less, or "
            "state --max-total-tokens or --mem-fraction-static",
        )
    return pages


def with_pages(page: PoolSpec, num_pages: int) -> PoolSpec:
    """The pool's shape: `num_pages` such pages."""
    return replace(page, num_pages=num_pages)


def pages_of_context(model: ModelConfig, page_size: int) -> int:
    """Pages of the longest request."""
    return -(-model.context_length // page_size)


def host_memory_bytes() -> int:
    """What this process may use: the machine's memory or its cgroup's limit, whichever is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            continue  # no such cgroup version here, or "max"
    return min(limits)


def snapshot_interval(args: ServerArgs, model: ModelConfig) -> int | None:
    """Tokens between snapshots of recurrent states, whole pages; None for a model without recurrent layers."""
    if Component.RECURRENT not in model.components:
        return None
    return -(-args.recurrent_track_interval // args.page_size) * args.page_size


def scheduler_limits(args: ServerArgs, model: ModelConfig) -> SchedulerLimits:
    whole_prompts = args.chunked_prefill_size == CHUNKING_OFF
    return SchedulerLimits(
        max_running_requests=args.max_running_requests,
        context_length=model.context_length,
        chunk_tokens=model.context_length if whole_prompts else args.chunked_prefill_size,
        vocab_size=model.vocab_size,
        schedule_policy=args.schedule_policy,
        random_seed=args.random_seed,
        overlap=not args.disable_overlap,
        check_invariants=args.check_invariants,
        snapshot_interval=snapshot_interval(args, model),
    )
