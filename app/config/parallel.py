"""Which tensor-parallel sizes a model can be cut to. Free of jax: pool arithmetic and start-up checks use it."""

from __future__ import annotations

from app.errors import ConfigError


def padded_kv_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> int:
    """KV heads over all ranks after replication: the smallest count that gives every rank the same whole number.

    With fewer KV heads than ranks each is held by tp_size / num_kv_heads ranks, so the answer is tp_size.
    Raises ConfigError when the query heads or the KV heads cannot be shared out evenly.
    """
    if num_heads % tp_size:
        raise ConfigError(
            field="--tp-size", value=tp_size, allowed=f"the model's {num_heads} attention heads must divide evenly"
        )
    if num_kv_heads % tp_size == 0:
        return num_kv_heads
    if tp_size % num_kv_heads == 0:
        return tp_size
    raise ConfigError(
        field="--tp-size",
        value=tp_size,
        allowed=f"it must divide the model's {num_kv_heads} KV heads or be a multiple of them",
    )
