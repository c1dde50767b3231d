"""Gathering pages: equal to indexing, for any pages, and without a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.errors import ConfigError
from app.tpu.kernels.gather_pages import IN_FLIGHT, gather_each, gather_layers, gather_pages
from tests.support.kernel_cases import page_cases

NUM_PAGES = 12
gather = jax.jit(gather_pages)
gather_two_layers = jax.jit(lambda pool, pages: gather_layers(pool, pages, 2))


def random_pool(page_size: int, width: int, dtype: Any, num_pages: int = NUM_PAGES) -> jax.Array:
    content = np.random.default_rng(0).integers(0, 200, (num_pages, page_size, width))
    return jnp.asarray(content, jnp.int32).astype(dtype)


def reference(pool: jax.Array, pages: Any) -> np.ndarray:
    pages = np.asarray(pages)
    return np.asarray(pool)[np.where((pages >= 0) & (pages < len(pool)), pages, 0)]


@pytest.mark.parametrize(("page_size", "width", "dtype"), page_cases())
def test_gathered_pages_are_those_of_the_pool(page_size: int, width: int, dtype: Any) -> None:
    pool = random_pool(page_size, width, dtype)
    pages = jnp.array([3, 0, 11, 7, 7, 5, 3, 1, 9, 10, 2], jnp.int32)  # more than are in flight, and some twice

    gathered = gather(pool, pages)

    assert gathered.dtype == pool.dtype
    np.testing.assert_array_equal(gathered, reference(pool, pages))


@pytest.mark.parametrize("count", [1, IN_FLIGHT - 1, IN_FLIGHT, IN_FLIGHT + 1])
def test_any_number_of_pages_is_gathered(count: int) -> None:
    pool = random_pool(8, 128, jnp.float32)
    pages = jnp.arange(count, dtype=jnp.int32) + 1

    np.testing.assert_array_equal(gather(pool, pages), reference(pool, pages))


def test_no_pages_give_an_empty_array() -> None:
    nothing = jnp.zeros(0, jnp.int32)

    assert gather(random_pool(8, 128, jnp.float32), nothing).shape == (0, 8, 128)
    assert gather_two_layers(random_pool(8, 128, jnp.float32), nothing).shape == (2, 0, 8, 128)


def test_an_index_outside_a_layer_reads_that_layers_page_0() -> None:
    pool = random_pool(8, 128, jnp.float32)  # two layers of 6 pages
    pages = jnp.array([6, -1, 5, 100, 2**31 - 1, -(2**31)], jnp.int32)

    gathered = gather_two_layers(pool, pages)

    np.testing.assert_array_equal(gathered[0], np.asarray(pool)[[0, 0, 5, 0, 0, 0]])
    np.testing.assert_array_equal(gathered[1], np.asarray(pool)[[6, 6, 11, 6, 6, 6]])


def test_one_call_gathers_every_layer_of_a_flat_pool() -> None:
    pool = random_pool(16, 256, jnp.bfloat16, num_pages=15)
    layers = pool.reshape(3, 5, 16, 256)
    pages = jnp.array([4, 1, 1, 2], jnp.int32)

    gathered = jax.jit(lambda pool, pages: gather_layers(pool, pages, 3))(pool, pages)

    np.testing.assert_array_equal(gathered, np.asarray(layers)[:, pages])


def test_arrays_of_separate_layers_are_gathered_alike() -> None:
    pools = [random_pool(8, 128, jnp.float32) + layer for layer in range(3)]
    pages = jnp.array([4, 1], jnp.int32)

    gathered = jax.jit(gather_each)(pools, pages)

    np.testing.assert_array_equal(gathered, [reference(pool, pages) for pool in pools])


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-2, 8), min_size=9, max_size=9))
def test_gathering_equals_indexing_whatever_the_pages(pages: list[int]) -> None:
    pool = random_pool(8, 128, jnp.uint16)

    gathered = gather_two_layers(pool, jnp.array(pages, jnp.int32))

    expected = [reference(layer, pages) for layer in np.asarray(pool).reshape(2, 6, 8, 128)]
    np.testing.assert_array_equal(gathered, expected)


def test_gathering_has_no_race(races: Callable[..., bool]) -> None:
    pages = jnp.array([3, 0, 5, 4, 4, 5, 3, 1, 1, 2, 2], jnp.int32)

    assert not races(lambda pool, pages: gather_layers(pool, pages, 2), random_pool(8, 128, jnp.float32), pages)


@pytest.mark.parametrize("waits", [False, True])
def test_a_page_that_is_overwritten_while_it_is_gathered_is_reported(races: Callable[..., bool], waits: bool) -> None:
    def overwritten(pool: jax.Array, pages: jax.Array) -> Any:
        """`pages` are copied out, and page 0 over each of them, before or after those copies are done."""

        def kernel(pages: Any, _: Any, pool: Any, gathered: Any, semaphores: Any) -> None:
            def read(index: jax.Array) -> Any:
                return pltpu.make_async_copy(pool.at[pages[index]], gathered.at[index], semaphores.at[index])

            def write(index: jax.Array) -> Any:
                free = semaphores.at[index + pages.shape[0]]
                return pltpu.make_async_copy(pool.at[index - index], pool.at[pages[index]], free)

            each = pl.loop(0, pages.shape[0])
            each(lambda index: read(index).start())
            if waits:
                each(lambda index: read(index).wait())
            each(lambda index: write(index).start())
            each(lambda index: write(index).wait())
            if not waits:
                each(lambda index: read(index).wait())

        in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.pallas_call(
            kernel,
            out_shape=[pool, jax.ShapeDtypeStruct((pages.size, *pool.shape[1:]), pool.dtype)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(),
                in_specs=[in_hbm],
                out_specs=[in_hbm, in_hbm],
                scratch_shapes=[pltpu.SemaphoreType.DMA((2 * pages.size,))],
            ),
            input_output_aliases={1: 0},
        )(pages, pool)

    assert races(overwritten, random_pool(8, 128, jnp.float32), jnp.array([3, 4, 7, 1], jnp.int32)) is not waits


def test_a_flat_pool_of_another_number_of_layers_is_refused() -> None:
    pool, pages = random_pool(8, 128, jnp.float32), jnp.array([1], jnp.int32)

    with pytest.raises(ConfigError, match=r"num_layers=5 is not allowed: a divisor of the 12 pages"):
        gather_layers(pool, pages, 5)
    with pytest.raises(ConfigError, match=r"num_layers=0"):
        gather_layers(pool, pages, 0)
