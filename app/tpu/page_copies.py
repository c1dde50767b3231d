"""Copying whole pages out of a flat pool and back into it, all layers at once, on TPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from app.core.ports import PoolSpec
from app.tpu.kernels.gather_pages import gather_layers
from app.tpu.kernels.scatter_pages import scatter_layers
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.pool_layout import FlatKVBuffers, PoolLayout
from app.tpu.program import Program, from_host


class PageCopies:
    """The two programs of one pool.

    backup(buffers, pages) -> contents               pages: (n,) int32, an id beyond the pool reads the padding page
    restore(buffers, pages, contents) -> buffers     buffers are donated; an id beyond the pool is dropped
    contents: (num_layers, n, page_size * lines, width), each rank's share of the page as the pool stores it.
    """

    def __init__(self, spec: PoolSpec, mesh: Mesh, layout: PoolLayout) -> None:
        self._spec = spec
        on_ranks = partial(jax.shard_map, mesh=mesh, check_vma=False)
        pool, contents, pages = layout.partition, _CONTENTS, PartitionSpec()
        self.backup = jax.jit(on_ranks(self._backup, in_specs=(pool, pages), out_specs=contents))
        restore = on_ranks(_restore, in_specs=(pool, pages, contents), out_specs=pool)
        self.restore = jax.jit(restore, donate_argnums=0)

    def programs(self, buffers: FlatKVBuffers, num_pages: int) -> list[Program]:
        """buffers: the pool's arrays as shapes; num_pages: that one copy moves."""
        pages: Any = from_host((num_pages,), "int32")
        contents = jax.eval_shape(self.backup, buffers, pages)
        return [
            Program(name="backup", function=self.backup, arguments=(buffers, pages)),
            Program(name="restore", function=self.restore, arguments=(buffers, pages, contents), donated=(buffers,)),
        ]

    def _backup(self, buffers: FlatKVBuffers, pages: jax.Array) -> jax.Array:
        return gather_layers(_lines(buffers.pages), pages, self._spec.num_layers)


_CONTENTS = PartitionSpec(None, None, None, TENSOR_AXIS)


def _restore(buffers: FlatKVBuffers, pages: jax.Array, contents: jax.Array) -> FlatKVBuffers:
    pool = scatter_layers(_lines(buffers.pages), pages, contents)
    return FlatKVBuffers(pool.reshape(buffers.pages.shape))


def _lines(pool: jax.Array) -> jax.Array:
    """One rank's share with every page as lines of one width, which is how the kernels see a page."""
    return pool.reshape(pool.shape[0], -1, pool.shape[-1])
