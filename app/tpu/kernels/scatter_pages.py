"""Copying a contiguous array of pages into the pool, for restores and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.errors import ConfigError
from app.tpu.kernels.shapes import check_pool, check_same, check_table

IN_FLIGHT = 8  # copies started before the first is waited for: a page is too short to keep memory busy alone
DROPPED = -1


def scatter_pages(pool: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    """Store values, (n, page_size, width), as pages (n,) int32 of pool, (num_pages, page_size, width), on TPU.

    The same as `pool.at[pages].set(values, mode="drop")`, except that a negative index is dropped too, and that of
    several entries for one page the last is stored. In place when the pool is donated (in a program: not used again);
    else XLA copies it first. Moves at most n pages from HBM to HBM; needs no other memory, whatever the pool's size.

    Raises ConfigError for shapes or types that do not fit together or that the kernel cannot serve (see `shapes`).
    """
    check_same("values.shape", values.shape, "pages and pool", (pages.size, *pool.shape[1:]))
    return scatter_layers(pool, pages, values[None])


def scatter_layers(pool: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
    """The same pages of every layer of a flat pool, in one call: the inverse of `gather_layers`.

    pool: (num_layers * pages_per_layer, page_size, width), layer by layer; pages: (n,) int32, ids within a layer;
    values: (num_layers, n, page_size, width), of the pool's type. Otherwise as `scatter_pages`; an index outside a
    layer is dropped in every layer, and never reaches another.
    """
    check_pool(pool)
    check_table("pages", pages)
    check_same("values.dtype", values.dtype, "the pool", pool.dtype)
    check_same("values.shape[1:]", values.shape[1:], "pages and pool", (pages.size, *pool.shape[1:]))
    num_layers = values.shape[0]
    if num_layers < 1 or pool.shape[0] % num_layers:
        raise ConfigError(
            field="values.shape[0]",
            value=num_layers,
            allowed=f"a divisor of the {pool.shape[0]} pages of the flat pool",
        )
    if values.size == 0:
        return pool

    pages_per_layer = pool.shape[0] // num_layers
    num_copies = num_layers * pages.size
    sources, targets = _distinct_targets(pages, pages_per_layer)
    return pl.pallas_call(
        partial(_copy_pages, pages_per_layer=pages_per_layer),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        input_output_aliases={3: 0},
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * num_copies * pool.nbytes // pool.shape[0]
        ),
        name="scatter_pages",
    )(
        sources,
        targets,
        pltpu.with_memory_space_constraint(values.reshape(num_copies, *pool.shape[1:]), pltpu.HBM),
        pool,
    )


def scatter_each(pools: Sequence[jax.Array], pages: jax.Array, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`scatter_pages` into every array of a pool that keeps layers apart: one call an array."""
    check_same("len(values)", len(values), "pools", len(pools))
    return tuple(scatter_pages(pool, pages, value) for pool, value in zip(pools, values, strict=True))


def _distinct_targets(pages: jax.Array, num_pages: int) -> tuple[jax.Array, jax.Array]:
    """Which entry goes to which page, (n,) int32 each: no page twice, since copies finish in any order."""
    order = jnp.argsort(pages, stable=True).astype(jnp.int32)
    targets = pages[order]
    last = jnp.append(targets[1:] != targets[:-1], True)
    return order, jnp.where(last & (targets >= 0) & (targets < num_pages), targets, DROPPED)


def _copy_pages(
    sources: jax.Ref,
    targets: jax.Ref,
    values: jax.Ref,
    _pool_before: jax.Ref,
    pool: jax.Ref,
    semaphores: jax.Ref,
    *,
    pages_per_layer: int,
) -> None:
    """sources, targets: (n,) in SMEM; values, layer by layer, and pool: in HBM."""
    num_pages, num_copies = sources.shape[0], values.shape[0]

    def target(index: jax.Array) -> jax.Array:
        return targets[jax.lax.rem(index, num_pages)]

    def copy(index: jax.Array) -> Any:
        layer, entry = jax.lax.div(index, num_pages), jax.lax.rem(index, num_pages)
        return pltpu.make_async_copy(
            values.at[layer * num_pages + sources[entry]],
            pool.at[layer * pages_per_layer + targets[entry]],
            semaphores.at[jax.lax.rem(index, IN_FLIGHT)],
        )

    def finish(index: jax.Array) -> None:
        @pl.when(target(index) != DROPPED)
        def _() -> None:
            copy(index).wait()

    @pl.loop(0, num_copies)
    def _(index: jax.Array) -> None:
        @pl.when(index >= IN_FLIGHT)
        def _() -> None:
            finish(index - IN_FLIGHT)

        @pl.when(target(index) != DROPPED)
        def _() -> None:
            copy(index).start()

    pl.loop(max(num_copies - IN_FLIGHT, 0), num_copies)(finish)
