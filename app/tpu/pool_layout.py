"""How the KV pool lies in device memory: the one description that the pool, attention, copies and tests share.

    ArrayPerLayer   an array of keys and one of values a layer, each
                    (num_pages + 1, page_size, kv_heads * head_dim)
    FlatWide        one array for all layers, keys beside values
                    (layers * (num_pages + 1), page_size, kv_heads * 2 * head_dim)
    FlatByHead      the same elements in the same order, each head's key and value a line of its own
                    (layers * (num_pages + 1), page_size, kv_heads * 2, head_dim)

In the flat ones page `p` of layer `l` is row `l * (num_pages + 1) + p`, and a token's elements are key of head 0, value
of head 0, key of head 1, and so on: a rank's share, and one head's, is one contiguous piece. Heads are sharded over the
mesh's "tensor" axis everywhere. Page 0 of a layer is never written.

The CPU backend copies a layer that is sliced out of a bigger array, so there each layer has arrays of its own. TPU
programs loop over layers and carry one array, which costs no copy; docs/decisions has what was compiled to choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.core.ports import PoolSpec
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.page_arrays import FlatPages, PageLayout, StackedPages

# bfloat16 scatters on CPU convert the whole pool there and back, so there the bits are kept in uint16 arrays.
STORED_AS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "bfloat16_bits": jnp.uint16}


class KVBuffers(NamedTuple):
    """ArrayPerLayer's arrays, one a layer: (num_pages + 1, page_size, num_kv_heads * head_dim), in the stored type."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class FlatKVBuffers(NamedTuple):
    """The array of a flat layout, in the stored type."""

    pages: jax.Array


class PoolLayout(Protocol):
    @property
    def partition(self) -> PartitionSpec:
        """Of every array, over the mesh's axes."""
        ...

    def abstract(self, spec: PoolSpec, mesh: Mesh) -> Any:
        """The pool's arrays as shapes, types and shardings, in the structure in which programs take them."""
        ...

    def contents(self, buffers: Any, pages: jax.Array, spec: PoolSpec, num_ranks: int) -> jax.Array:
        """(n,) int32 -> (2, num_layers, n, page_size, num_kv_heads, head_dim): keys, then values, as stored.

        For use inside a program; a copy of n pages. `num_ranks`: the width of the mesh's tensor axis.
        """
        ...

    def page_layout(self, spec: PoolSpec, mesh: Mesh) -> PageLayout:
        """What one page is made of when it leaves the pool, as stored."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayPerLayer:
    partition: ClassVar[PartitionSpec] = PartitionSpec(None, None, TENSOR_AXIS)

    def abstract(self, spec: PoolSpec, mesh: Mesh) -> KVBuffers:
        shape = (spec.num_pages + 1, spec.page_size, spec.stored_kv_heads * spec.stored_head_dim)
        array: Any = _abstract(shape, spec, mesh, self.partition)
        return KVBuffers(keys=(array,) * spec.num_layers, values=(array,) * spec.num_layers)

    def contents(self, buffers: KVBuffers, pages: jax.Array, spec: PoolSpec, num_ranks: int) -> jax.Array:
        read = jnp.stack([jnp.stack([array[pages] for array in arrays]) for arrays in buffers])
        per_rank = (num_ranks, spec.stored_kv_heads // num_ranks, spec.stored_head_dim)
        return _without_padding(read.reshape(*read.shape[:-1], *per_rank), spec)

    def page_layout(self, spec: PoolSpec, mesh: Mesh) -> PageLayout:
        return StackedPages.of(self.abstract(spec, mesh))


@dataclass(frozen=True, slots=True)
class FlatWide:
    partition: ClassVar[PartitionSpec] = PartitionSpec(None, None, TENSOR_AXIS)

    def abstract(self, spec: PoolSpec, mesh: Mesh) -> FlatKVBuffers:
        width = spec.stored_kv_heads * 2 * spec.stored_head_dim
        return FlatKVBuffers(_abstract((*_flat_pages(spec), width), spec, mesh, self.partition))

    def contents(self, buffers: FlatKVBuffers, pages: jax.Array, spec: PoolSpec, num_ranks: int) -> jax.Array:
        return _flat_contents(buffers, pages, spec, num_ranks)

    def page_layout(self, spec: PoolSpec, mesh: Mesh) -> PageLayout:
        return FlatPages(self.abstract(spec, mesh).pages, spec.num_layers)


@dataclass(frozen=True, slots=True)
class FlatByHead:
    partition: ClassVar[PartitionSpec] = PartitionSpec(None, None, TENSOR_AXIS, None)

    def abstract(self, spec: PoolSpec, mesh: Mesh) -> FlatKVBuffers:
        shape = (*_flat_pages(spec), spec.stored_kv_heads * 2, spec.stored_head_dim)
        return FlatKVBuffers(_abstract(shape, spec, mesh, self.partition))

    def contents(self, buffers: FlatKVBuffers, pages: jax.Array, spec: PoolSpec, num_ranks: int) -> jax.Array:
        return _flat_contents(buffers, pages, spec, num_ranks)

    def page_layout(self, spec: PoolSpec, mesh: Mesh) -> PageLayout:
        return FlatPages(self.abstract(spec, mesh).pages, spec.num_layers)


def flat_rows(pages: jax.Array, layer: jax.Array | int, pages_a_layer: int, num_rows: int) -> jax.Array:
    """Rows of a flat pool of `num_rows` rows that hold `pages` of `layer`: int32 of any shape to the same.

    What is not a page of a layer becomes `num_rows`, which a write drops: it would be a page of the next layer.
    """
    return jnp.where(pages < pages_a_layer, layer * pages_a_layer + pages, num_rows)


def _flat_pages(spec: PoolSpec) -> tuple[int, int]:
    return spec.num_layers * (spec.num_pages + 1), spec.page_size


def _abstract(shape: tuple[int, ...], spec: PoolSpec, mesh: Mesh, partition: PartitionSpec) -> Any:
    return jax.ShapeDtypeStruct(shape, STORED_AS[spec.dtype], sharding=NamedSharding(mesh, partition))


def _flat_contents(buffers: FlatKVBuffers, pages: jax.Array, spec: PoolSpec, num_ranks: int) -> jax.Array:
    pages_a_layer = spec.num_pages + 1
    layers = jnp.arange(spec.num_layers, dtype=jnp.int32)[:, None]
    read = buffers.pages[flat_rows(pages[None, :], layers, pages_a_layer, spec.num_layers * pages_a_layer)]
    per_rank = (num_ranks, spec.stored_kv_heads // num_ranks, 2, spec.stored_head_dim)
    parted = read.reshape(*read.shape[:2], spec.page_size, *per_rank)  # (layers, n, page_size, ranks, heads, 2, dim)
    return _without_padding(jnp.moveaxis(parted, -2, 0), spec)


def _without_padding(read: jax.Array, spec: PoolSpec) -> jax.Array:
    """(2, layers, n, page_size, ranks, heads, dim) as stored -> (2, layers, n, page_size, num_kv_heads, head_dim)."""
    kept = read[..., : spec.num_kv_heads // read.shape[-3], : spec.head_dim]
    return kept.reshape(*read.shape[:4], spec.num_kv_heads, spec.head_dim)
