"""Sizes, from settings, model and memory. Arithmetic only: nothing is allocated, no weight is read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from app.config.checks import check_against_model
from app.config.model_config import ModelConfig
from app.config.parallel import padded_kv_heads
from app.config.server_args import CHUNKING_OFF, ServerArgs
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.scheduling.limits import SchedulerLimits

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# Of what the weights leave: the rest is for compiled programs, activations and whoever else is on the machine.
_POOL_SHARE = 0.5
# More than this many of the longest requests at once gain nothing on a CPU, and touching the memory takes time.
_CPU_FULL_CONTEXTS = 2


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
    return PoolSpec(
        num_pages=1,
        page_size=args.page_size,
        num_layers=model.num_layers,
        num_kv_heads=padded_kv_heads(model.num_heads, model.num_kv_heads, args.tp_size),
        head_dim=model.head_dim,
        dtype=stored,
    )


def pool_pages(args: ServerArgs, model: ModelConfig, page: PoolSpec, memory_bytes: int, dtype: str) -> int:
    """Pages of the pool: as asked, else what memory allows after the weights. ConfigError if that serves no request."""
    left = memory_bytes - model.num_parameters * (4 if dtype == "float32" else 2)
    if args.max_total_tokens is not None:
        pages = args.max_total_tokens // args.page_size
        if (pages + 1) * page.page_bytes > left:
            raise ConfigError(
                field="--max-total-tokens",
                value=args.max_total_tokens,
                allowed=f"at most {max(left // page.page_bytes - 1, 0) * args.page_size}: that many tokens of KV fit "
                "the memory that the weights leave",
            )
        return pages
    pages = min(int(left * _POOL_SHARE) // page.page_bytes, _CPU_FULL_CONTEXTS * model.context_length // args.page_size)
    if pages * args.page_size < model.context_length:
        raise ConfigError(
            field="--context-length",
            value=model.context_length,
            allowed=f"memory holds {max(pages, 0) * args.page_size} tokens of KV beside the weights; ask for less, or "
            "state --max-total-tokens",
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
    )
