"""Bringing weights from their source to the devices: replicated, padded and cut as their axes ask."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import Component, ModelConfig
from app.config.parallel import padded_kv_heads
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.models.llama import TensorPlan, partition
from app.models.weight_shares import padded_rows, replicated_head_rows, share
from app.tpu.mesh import TENSOR_AXIS


class WeightsSource(Protocol):
    def tensor(self, name: str) -> np.ndarray:
        """The weight of that Hugging Face name, (out, in) for matrices, any float type. Raises KeyError."""
        ...


class WeightShapes:
    """How the weights of one model lie on one mesh."""

    def __init__(self, config: ModelConfig, mesh: Mesh, num_kv_heads: int, dtype: np.dtype) -> None:
        """num_kv_heads: over all ranks, after replication; see `kv_heads_on_mesh`."""
        self._config = config
        self._mesh = mesh
        self._num_kv_heads = num_kv_heads
        self._dtype = dtype
        num_ranks = mesh.shape[TENSOR_AXIS]
        self._sizes = {
            "vocab": -(-config.vocab_size // num_ranks) * num_ranks,
            "heads": config.num_heads * config.head_dim,
            "kv_heads": num_kv_heads * config.head_dim,
            "ffn": config.intermediate_size,
            "embed": config.hidden_size,
            "head_dim": config.head_dim,
        }

    def abstract(self, plan: TensorPlan) -> Any:
        """The weight's shape, type and sharding."""
        shape = tuple(self._sizes[axis] for axis in plan.axes)
        return jax.ShapeDtypeStruct(shape, self._dtype, sharding=NamedSharding(self._mesh, partition(plan.axes)))

    def abstract_stack(self, plan: TensorPlan) -> Any:
        """The same for that weight of every layer in one array, layers first."""
        one = self.abstract(plan)
        sharding = NamedSharding(self._mesh, stacked_partition(plan.axes))
        return jax.ShapeDtypeStruct((self._config.num_layers, *one.shape), one.dtype, sharding=sharding)

    def place(self, source: WeightsSource, plan: TensorPlan, layer: int | None = None) -> jax.Array:
        """One weight on the mesh. The source's array is copied, not kept; each process reads its own shards of it."""
        abstract = self.abstract(plan)
        return jax.make_array_from_callback(
            abstract.shape, abstract.sharding, lambda index: self._shard(source, plan, layer, index)
        )

    def place_stack(self, source: WeightsSource, plan: TensorPlan) -> jax.Array:
        """That weight of every layer on the mesh, layers first. Holds one device's share in host memory meanwhile."""
        abstract = self.abstract_stack(plan)

        def shard(index: Any) -> np.ndarray:
            layers = range(self._config.num_layers)[index[0]]
            return np.stack([self._shard(source, plan, layer, index[1:]) for layer in layers])

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, shard)

    def _shard(self, source: WeightsSource, plan: TensorPlan, layer: int | None, index: Any) -> np.ndarray:
        """What one device holds of a weight: index has a slice for each of its axes."""
        tensor = source.tensor(plan.name.format(layer))
        rows = padded_rows(len(tensor), self._sizes["vocab"] if plan.axes[0] == "vocab" else len(tensor))
        if plan.axes[0] == "kv_heads":
            copies = self._num_kv_heads // self._config.num_kv_heads
            rows = replicated_head_rows(len(tensor), self._config.head_dim, copies)
        return share(tensor, rows, index, self._dtype)


def stacked_partition(axes: tuple[str, ...]) -> PartitionSpec:
    """Of a weight of every layer in one array: every rank has its share of every layer."""
    return PartitionSpec(None, *partition(axes))


def kv_heads_on_mesh(config: ModelConfig, tp_size: int, spec: PoolSpec) -> int:
    """-> KV heads over all ranks. ConfigError when the mesh cannot share out the model or the pool is not its pool."""
    if Component.SWA in config.components:
        raise ConfigError(field="model", value=config.architecture, allowed="sliding windows are not supported yet")
    num_kv_heads = padded_kv_heads(config.num_heads, config.num_kv_heads, tp_size)
    if config.intermediate_size % tp_size:
        allowed = f"the model's intermediate size {config.intermediate_size} must divide evenly"
        raise ConfigError(field="--tp-size", value=tp_size, allowed=allowed)
    shape = (config.num_layers, num_kv_heads, config.head_dim)
    if shape != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
        allowed = f"the model needs layers, KV heads and head_dim of {shape}"
        raise ConfigError(field="pool_spec", value=spec, allowed=allowed)
    return num_kv_heads
