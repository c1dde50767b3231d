"""Checks of the settings against the model. Pure: they run before a pool, a mesh or a weight exists."""

from __future__ import annotations

from app.config.cache_type import CHUNK_CACHE
from app.config.model_config import ModelConfig
from app.config.parallel import padded_kv_heads
from app.config.server_args import ServerArgs
from app.errors import ConfigError


def check_against_model(args: ServerArgs, model: ModelConfig) -> None:
    """Raise ConfigError for the first setting that this model cannot be served with."""
    if args.context_length is not None and args.context_length > model.context_length:
        raise ConfigError(
            field="--context-length",
            value=args.context_length,
            allowed=f"2 to {model.context_length}, the most that this model was made for",
        )
    padded_kv_heads(model.num_heads, model.num_kv_heads, args.tp_size)


def advice(args: ServerArgs, model: ModelConfig, cache_type: str, pool_tokens: int) -> list[str]:
    """What works but may surprise, one sentence each, in a fixed order."""
    context_length = args.context_length or model.context_length
    situations = (
        (
            args.disaggregation_mode != "null",
            f"--disaggregation-mode {args.disaggregation_mode}: there is no handoff yet, "
            "so this node serves whole requests itself",
        ),
        (
            pool_tokens < context_length,
            f"the pool holds {pool_tokens} tokens and the context is {context_length}: longer requests are refused",
        ),
        (
            args.schedule_policy == "lpm" and cache_type == CHUNK_CACHE,
            f"--schedule-policy lpm has no effect with {CHUNK_CACHE}, which keeps no prefix",
        ),
        (args.check_invariants, "--check-invariants makes every step slower"),
        (args.disable_overlap, "--disable-overlap makes every step wait for the one before"),
    )
    return [text for applies, text in situations if applies]


def tier_advice(args: ServerArgs, device_tokens: int, host_tokens: int) -> list[str]:
    """The same about the tiers. device_tokens, host_tokens: what the pools hold."""
    if args.hicache_host_mode != "cache" or host_tokens > device_tokens:
        return []
    return [
        f"the host pool holds {host_tokens} tokens and the KV pool {device_tokens}: once both are full, every page on "
        "the host may be on the device too; a larger --hicache-ratio or --hicache-size adds to what is kept"
    ]


def restore_advice(restored_rate: float, prefill_rate: float) -> list[str]:
    """The same about measured rates, both in tokens a second."""
    if restored_rate >= prefill_rate:
        return []
    return [
        f"{restored_rate:,.0f} tokens a second come back from the host and {prefill_rate:,.0f} are computed: "
        "computing is quicker, and nothing will be restored"
    ]
