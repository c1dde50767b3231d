"""Running what is written for one rank's share on the only rank there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from app.tpu.mesh import make_mesh


def on_one_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled, inside `shard_map` over a mesh of one device."""
    whole = PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=make_mesh(1, "cpu"), in_specs=whole, out_specs=whole, check_vma=False))
