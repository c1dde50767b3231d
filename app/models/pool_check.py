"""Refusing a pool that was made for another model."""

from __future__ import annotations

from app.core.ports import PoolSpec
from app.errors import ConfigError


def check_pool(field: str, spec: PoolSpec, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
    """num_kv_heads: over all ranks. Raises ConfigError naming `field`."""
    needed = (num_layers, num_kv_heads, head_dim)
    if needed != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
        raise ConfigError(field=field, value=spec, allowed=f"the model needs layers, KV heads and head_dim of {needed}")
