"""Copying pages out of the pool into one contiguous array, for backups and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.errors import ConfigError
from app.tpu.kernels.shapes import check_pool, check_table

IN_FLIGHT = 8  # copies started before the first is waited for: a page is too short to keep memory busy alone


def gather_pages(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """(num_pages, page_size, width), pages (n,) int32 -> (n, page_size, width): `pool[pages]`, on TPU.

    Pages may repeat. An index outside the pool reads page 0, the padding page. The pool is only read and the result is
    a new array. Moves n pages from HBM to HBM without touching VMEM; needs no other memory, whatever the pool's size.

    Raises ConfigError for a shape or type that the kernel cannot serve (see `shapes`).
    """
    return gather_layers(pool, pages, 1).reshape(-1, *pool.shape[1:])


def gather_layers(pool: jax.Array, pages: jax.Array, num_layers: int) -> jax.Array:
    """The same pages of every layer of a flat pool, in one call.

    pool: (num_layers * pages_per_layer, page_size, width), layer by layer; pages: (n,) int32, ids within a layer
    -> (num_layers, n, page_size, width). A pool with keys and values apart has twice as many layers here. Otherwise as
    `gather_pages`; an index outside a layer reads page 0 of that layer, never a page of another.
    """
    check_pool(pool)
    check_table("pages", pages)
    if num_layers < 1 or pool.shape[0] % num_layers:
        raise ConfigError(
            field="num_layers", value=num_layers, allowed=f"a divisor of the {pool.shape[0]} pages of the flat pool"
        )
    pages_per_layer = pool.shape[0] // num_layers
    num_copies = num_layers * pages.size
    page_shape = pool.shape[1:]
    if num_copies == 0:
        return jnp.zeros((num_layers, 0, *page_shape), pool.dtype)

    gathered = pl.pallas_call(
        partial(_copy_pages, pages_per_layer=pages_per_layer),
        out_shape=jax.ShapeDtypeStruct((num_copies, *page_shape), pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * num_copies * pool.nbytes // pool.shape[0]
        ),
        name="gather_pages",
    )(
        jnp.where((pages >= 0) & (pages < pages_per_layer), pages, 0),
        pltpu.with_memory_space_constraint(pool, pltpu.HBM),
    )
    return gathered.reshape(num_layers, pages.size, *page_shape)


def gather_each(pools: Sequence[jax.Array], pages: jax.Array) -> tuple[jax.Array, ...]:
    """`gather_pages` of every array of a pool that keeps layers apart: one call an array."""
    return tuple(gather_pages(pool, pages) for pool in pools)


def _copy_pages(pages: jax.Ref, pool: jax.Ref, gathered: jax.Ref, semaphores: jax.Ref, *, pages_per_layer: int) -> None:
    """pages: (n,) in SMEM, all within a layer; pool, gathered: in HBM, gathered layer by layer."""
    num_pages, num_copies = pages.shape[0], gathered.shape[0]

    def copy(index: jax.Array) -> Any:
        layer, entry = jax.lax.div(index, num_pages), jax.lax.rem(index, num_pages)
        source = pool.at[layer * pages_per_layer + pages[entry]]
        return pltpu.make_async_copy(source, gathered.at[index], semaphores.at[jax.lax.rem(index, IN_FLIGHT)])

    @pl.loop(0, num_copies)
    def _(index: jax.Array) -> None:
        @pl.when(index >= IN_FLIGHT)
        def _() -> None:
            copy(index - IN_FLIGHT).wait()

        copy(index).start()

    @pl.loop(max(num_copies - IN_FLIGHT, 0), num_copies)
    def _(index: jax.Array) -> None:
        copy(index).wait()
