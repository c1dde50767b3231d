"""How HybridBuffers lie in memory: arrays of their own for every layer, as ArrayPerLayer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import StateArray
from app.core.ports import PoolSpec, StateSpec
from app.tpu.hybrid_buffers import HybridBuffers
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.pool_layout import STORED_AS, ArrayPerLayer, KVBuffers

WHOLE = PartitionSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSpec:
    """The pools of one model; None for a kind of state that none of its layers has.

    full, window: with arrays_per_layer 1 (MLA) a layer has one array of latents, and every rank holds all of it.
    """

    full: PoolSpec | None = None
    window: PoolSpec | None = None
    states: StateSpec | None = None

    def abstract(self, mesh: Mesh) -> HybridBuffers:
        """The arrays as shapes, types and shardings."""
        return HybridBuffers(_kv(self.full, mesh), _kv(self.window, mesh), _states(self.states, mesh))

    def partitions(self, num_state_layers: int) -> HybridBuffers:
        """Of the arrays of any layers of which so many are recurrent, over the mesh's axes, as prefixes."""
        arrays = () if self.states is None else self.states.arrays
        a_layer = tuple(_state_partition(array) for array in arrays)
        full: Any = _kv_partition(self.full)
        window: Any = _kv_partition(self.window)
        return HybridBuffers(full, window, (a_layer,) * num_state_layers)  # type: ignore[arg-type]


def _kv(spec: PoolSpec | None, mesh: Mesh) -> KVBuffers:
    if spec is None:
        return KVBuffers((), ())
    if spec.arrays_per_layer == 2:
        return ArrayPerLayer().abstract(spec, mesh)
    shape = (spec.num_pages + 1, spec.page_size, spec.stored_head_dim)
    latent: Any = jax.ShapeDtypeStruct(shape, STORED_AS[spec.dtype], sharding=NamedSharding(mesh, WHOLE))
    return KVBuffers(keys=(latent,) * spec.num_layers, values=())


def _kv_partition(spec: PoolSpec | None) -> PartitionSpec:
    return WHOLE if spec is None or spec.arrays_per_layer == 1 else ArrayPerLayer.partition


def _states(spec: StateSpec | None, mesh: Mesh) -> tuple[Any, ...]:
    if spec is None:
        return ()

    def abstract(array: StateArray) -> Any:
        sharding = NamedSharding(mesh, _state_partition(array))
        return jax.ShapeDtypeStruct((spec.num_slots, *array.shape), jnp.float32, sharding=sharding)

    return (tuple(abstract(array) for array in spec.arrays),) * spec.num_layers


def _state_partition(array: StateArray) -> PartitionSpec:
    if array.sharded_axis is None:
        return WHOLE
    return PartitionSpec(*(None,) * (1 + array.sharded_axis), TENSOR_AXIS)
