"""The paged KV pool on the device. How its arrays lie in memory is its layout's business: app/tpu/pool_layout.py.

Page 0 is read for what a page table leaves empty, and nothing is ever written to it: writes of padding rows carry an
index beyond the last page and are dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.core.ports import PoolSpec
from app.tpu.lent_arrays import LentArrays
from app.tpu.mesh import TENSOR_AXIS, num_nodes_of
from app.tpu.pool_layout import ArrayPerLayer, PoolLayout


class MHATokenToKVPool(LentArrays):
    """Owner of the KV arrays of a model whose every layer has full attention.

    Memory: (num_pages + 1) * page_bytes over all ranks.
    """

    def __init__(self, spec: PoolSpec, mesh: Mesh, layout: PoolLayout | None = None) -> None:
        """layout: ArrayPerLayer unless stated; the model runner must be made for the same."""
        super().__init__()
        self._spec = spec
        self._mesh = mesh
        self._layout = layout or ArrayPerLayer()

    @property
    def spec(self) -> PoolSpec:
        return self._spec

    @property
    def num_nodes(self) -> int:
        """Processes that hold a share of the arrays."""
        return num_nodes_of(self._mesh)

    def abstract_buffers(self) -> Any:
        return self._layout.abstract(self._spec, self._mesh)

    def page_contents(self, pages: np.ndarray) -> np.ndarray:
        """(n,) int32 -> (2, num_layers, n, page_size, num_kv_heads, head_dim): keys, then values, as stored.

        A copy, for tests and integrity checks. Waits for the device. Raises OwnershipError while the arrays are lent.
        """
        buffers = self.take()
        self.put(buffers)
        padded = np.zeros(1 << max(pages.size - 1, 0).bit_length(), np.int32)  # few compiled variants
        padded[: pages.size] = pages
        num_ranks = self._mesh.shape[TENSOR_AXIS]
        read = _contents(buffers, padded, layout=self._layout, spec=self._spec, num_ranks=num_ranks)
        return np.array(read)[:, :, : pages.size]


def encode(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float values as a pool of element type `dtype` stores them. uint16 holds bfloat16 bits, rounded to nearest even.

    For use inside a program, on the tokens to be written.
    """
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(dtype)


def decode(stored: jax.Array) -> jax.Array:
    """What `encode` stored, as float values: float32 for a float32 or uint16 pool, else the pool's own type."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return stored


def storable(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Values that stay finite when a pool of element type `dtype` stores them.

    0 for what is not finite: attention multiplies masked values by 0, so a NaN left in a page would spread to whoever
    gets the page next. The largest number of that sign for what is finite and would be rounded to infinity.
    """
    stored = jnp.bfloat16 if dtype == jnp.uint16 else dtype
    largest = min(float(jnp.finfo(stored).max), float(jnp.finfo(values.dtype).max))
    # Chosen rather than clipped: XLA's minimum and maximum make zeros of the smallest numbers on CPU.
    bounded = jnp.where(jnp.abs(values) > largest, jnp.copysign(largest, values), values)
    return jnp.where(jnp.isfinite(values), bounded, 0)


def write_tokens(buffer: jax.Array, pages: jax.Array, offsets: jax.Array, values: jax.Array) -> jax.Array:
    """Store one layer's keys or values of n >= 2 tokens: pages, offsets (n,) int32; values (n, ...) as floats.

    In place when `buffer` is donated and nothing in the same program read it before. Page indexes beyond the pool are
    dropped. With exactly one token XLA's CPU backend copies the pool: pad to two. Values become `storable`.
    """
    return buffer.at[pages, offsets].set(encode(storable(values, buffer.dtype), buffer.dtype), mode="drop")


def read_pages(buffer: jax.Array, pages: jax.Array) -> jax.Array:
    """One layer's keys or values of a row: pages (n,) int32 -> (n * page_size, width) floats in token order."""
    return decode(buffer[pages].reshape(-1, buffer.shape[-1]))


def locate(
    page_table: jax.Array, rows: jax.Array, positions: jax.Array, valid: jax.Array, buffer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where n tokens lie in the pool: page ids and offsets, (n,) int32 each, as `write_tokens` wants them.

    page_table: (num_rows, max_pages) int32; rows, positions: (n,) int32, the row and the position of each token;
    valid: (n,) bool, False sends the write beyond the pool, where it is dropped; buffer: any array of the pool.
    """
    num_pages, page_size = buffer.shape[:2]
    positions = jnp.maximum(positions, 0)
    pages = page_table[rows, positions // page_size]
    return jnp.where(valid, pages, num_pages), positions % page_size


@partial(jax.jit, static_argnames=("layout", "spec", "num_ranks"))
def _contents(buffers: Any, pages: jax.Array, *, layout: PoolLayout, spec: PoolSpec, num_ranks: int) -> jax.Array:
    return layout.contents(buffers, pages, spec, num_ranks)
