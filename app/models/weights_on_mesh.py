"""Bringing weights from their source to the devices: replicated, padded and cut as their axes ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import ModelConfig
from app.config.parallel import padded_kv_heads
from app.errors import ConfigError
from app.models.decoder import Decoder
from app.models.weight_plan import EXPERT, MESH_AXES, TensorPlan
from app.models.weight_shares import padded_rows, replicated_head_rows, share
from app.tpu.mesh import TENSOR_AXIS


class WeightsSource(Protocol):
    def tensor(self, name: str) -> np.ndarray:
        """The weight of that Hugging Face name, (out, in) for matrices, any float type. Raises KeyError."""
        ...


class WeightShapes:
    """How the weights of one model lie on one mesh."""

    def __init__(self, config: ModelConfig, decoder: Decoder, mesh: Mesh, dtype: np.dtype) -> None:
        """Raises ConfigError when the mesh cannot share out the model."""
        self._mesh = mesh
        self._dtype = dtype
        self._num_ranks = mesh.shape[TENSOR_AXIS]
        self.num_kv_heads = padded_kv_heads(config.num_heads, config.num_kv_heads, self._num_ranks)
        """Over all ranks, after replication."""
        self._own_kv_heads = config.num_kv_heads
        for plan, _ in decoder.plans():
            self._check_cuts(plan)

    def abstract(self, plan: TensorPlan) -> Any:
        """The weight's shape, type and sharding."""
        return self._abstract(plan, self._shape(plan), plan.partition)

    def abstract_stack(self, plan: TensorPlan, num_layers: int) -> Any:
        """The same for that weight of every layer in one array, layers first."""
        return self._abstract(plan, (num_layers, *self._shape(plan)), plan.stacked_partition)

    def place(self, source: WeightsSource, plan: TensorPlan, layer: int | None = None) -> jax.Array:
        """One weight on the mesh. The source's array is copied, not kept; each process reads its own shards of it."""
        abstract = self.abstract(plan)
        return jax.make_array_from_callback(
            abstract.shape, abstract.sharding, lambda index: self._shard(source, plan, layer, index)
        )

    def place_stack(self, source: WeightsSource, plan: TensorPlan, num_layers: int) -> jax.Array:
        """That weight of every layer on the mesh, layers first. Holds one device's share in host memory meanwhile."""
        abstract = self.abstract_stack(plan, num_layers)

        def shard(index: Any) -> np.ndarray:
            layers = range(num_layers)[index[0]]
            return np.stack([self._shard(source, plan, layer, index[1:]) for layer in layers])

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, shard)

    def _abstract(self, plan: TensorPlan, shape: tuple[int, ...], partition: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, self._type(plan), sharding=NamedSharding(self._mesh, partition))

    def _type(self, plan: TensorPlan) -> np.dtype:
        return self._dtype if plan.dtype is None else np.dtype(plan.dtype)

    def _shape(self, plan: TensorPlan) -> tuple[int, ...]:
        sizes = {"vocab": self._whole_shares, "kv_heads": self._replicated}
        return tuple(
            sizes[axis](size) if axis in sizes else size for axis, size in zip(plan.axes, plan.shape, strict=True)
        )

    def _whole_shares(self, size: int) -> int:
        return -(-size // self._num_ranks) * self._num_ranks

    def _replicated(self, size: int) -> int:
        return size * self.num_kv_heads // self._own_kv_heads

    def _check_cuts(self, plan: TensorPlan) -> None:
        for axis, size, stored in zip(plan.axes, plan.shape, self._shape(plan), strict=True):
            if MESH_AXES[axis] is not None and stored % self._num_ranks:
                allowed = f"{size}, the {axis} axis of {plan.name}, must divide evenly"
                raise ConfigError(field="--tp-size", value=self._num_ranks, allowed=allowed)

    def _shard(self, source: WeightsSource, plan: TensorPlan, layer: int | None, index: Any) -> np.ndarray:
        """What one device holds of a weight: index has a slice for each of its axes."""
        if EXPERT not in plan.name:
            return self._share(plan, plan.take(source.tensor(plan.name.format(layer=layer))), index)
        one = replace(plan, axes=plan.axes[1:], shape=plan.shape[1:])
        experts = range(plan.shape[0])[index[0]]
        tensors = (plan.take(source.tensor(plan.name.format(layer=layer, expert=expert))) for expert in experts)
        return np.stack([self._share(one, tensor, index[1:]) for tensor in tensors])

    def _share(self, plan: TensorPlan, tensor: np.ndarray, index: Any) -> np.ndarray:
        rows = padded_rows(len(tensor), self._shape(plan)[0] if plan.axes[0] == "vocab" else len(tensor))
        if plan.axes[0] == "kv_heads":
            copies = self.num_kv_heads // self._own_kv_heads
            rows = replicated_head_rows(len(tensor), len(tensor) // self._own_kv_heads, copies)
        return share(tensor, rows, index, self._type(plan))
