"""What weights a model has: each one's name in a checkpoint, its shape, and how ranks share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jax.sharding import PartitionSpec

from app.tpu.mesh import TENSOR_AXIS

LAYER = "model.layers.{layer}"  # what most names begin with
EXPERT = "{expert}"  # in a name: the checkpoint has a tensor for each expert, and the weight is all of them

# Logical axis -> mesh axis; None is held whole by every rank.
MESH_AXES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": TENSOR_AXIS,
        "heads": TENSOR_AXIS,
        "kv_heads": TENSOR_AXIS,
        "ffn": TENSOR_AXIS,
        "experts": TENSOR_AXIS,
        "expert": None,
        "expert_ffn": None,
        "embed": None,
        "head_dim": None,
        "group": None,
        "latent": None,
        "state": None,
        "taps": None,
    }
)


def whole(tensor: np.ndarray) -> np.ndarray:
    return tensor


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Where a weight comes from and how it is cut.

    name: Hugging Face's; {layer} and {expert} stand for their numbers.
    shape: over all ranks, before the padding of "vocab" and the replication of "kv_heads".
    take: the weight as a view of the checkpoint's tensor, which may be a mapped file. Plans that take alike are equal.
    stored_shape: of the checkpoint's tensor, where it is another; of one expert's where there is a tensor for each.
    dtype: in which it is kept; None for the model's.
    """

    name: str
    axes: tuple[str, ...]  # logical, one for each of shape
    shape: tuple[int, ...]
    take: Callable[[np.ndarray], np.ndarray] = whole
    stored_shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of the tensor, or of each expert's tensor, in a checkpoint."""
        if self.stored_shape is not None:
            return self.stored_shape
        return self.shape[1:] if EXPERT in self.name else self.shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def partition(self) -> PartitionSpec:
        return PartitionSpec(*(MESH_AXES[axis] for axis in self.axes))

    @property
    def stacked_partition(self) -> PartitionSpec:
        """Of the weights of several layers in one array: every rank has its share of every layer."""
        return PartitionSpec(None, *self.partition)
