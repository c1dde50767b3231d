"""A compiled program by name: what is called and with which shapes. Compiling it needs no arrays, and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One of the programs that a runtime calls, with the shapes of one call.

    function: the jitted function itself, not a copy of it. arguments: pytrees of ShapeDtypeStruct. statics: keyword
    arguments that are compiled in. donated: those of the arguments that the program must write in place.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    statics: Mapping[str, Any] = field(default_factory=dict)
    donated: tuple[Any, ...] = ()

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """For the devices of `mesh`, whether they are there or not."""
        with jax.set_mesh(mesh):  # Pallas asks it which chip it compiles for
            return self.function.lower(*self.arguments, **self.statics)

    @property
    def donated_bytes(self) -> int:
        """Of the donated arguments, on one device."""
        return sum(_bytes_a_device(array) for array in jax.tree.leaves(self.donated))


def replicated(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array that every device holds whole, as a shape."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def from_host(shape: tuple[int, ...], dtype: Any) -> Any:
    """A numpy argument, as a shape: the program decides where it goes."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _bytes_a_device(array: Any) -> int:
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    size = 1
    for length in shape:
        size *= length
    return size * array.dtype.itemsize
