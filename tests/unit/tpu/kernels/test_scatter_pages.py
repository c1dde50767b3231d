"""Scattering pages: equal to storing one after another, the rest of the pool untouched, and without a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import ConfigError
from app.tpu.kernels.gather_pages import gather_layers
from app.tpu.kernels.scatter_pages import IN_FLIGHT, scatter_each, scatter_layers, scatter_pages
from tests.support.kernel_cases import page_cases

NUM_PAGES = 12
scatter = jax.jit(scatter_pages)
scatter_into_layers = jax.jit(scatter_layers)


def random_pages(num_pages: int, page_size: int, width: int, dtype: Any, seed: int = 0) -> jax.Array:
    content = np.random.default_rng(seed).integers(0, 200, (num_pages, page_size, width))
    return jnp.asarray(content, jnp.int32).astype(dtype)


def reference(pool: Any, pages: Any, values: Any) -> np.ndarray:
    stored = np.array(pool)
    for page, value in zip(np.asarray(pages), np.asarray(values), strict=True):
        if 0 <= page < len(stored):
            stored[page] = value
    return stored


@pytest.mark.parametrize(("page_size", "width", "dtype"), page_cases())
def test_pages_are_stored_where_they_belong_and_nowhere_else(page_size: int, width: int, dtype: Any) -> None:
    pool = random_pages(NUM_PAGES, page_size, width, dtype)
    pages = jnp.array([3, 0, 11, 7, 5, 1, 9, 10, 2], jnp.int32)
    values = random_pages(pages.size, page_size, width, dtype, seed=1)

    stored = scatter(pool, pages, values)

    assert stored.dtype == pool.dtype
    np.testing.assert_array_equal(stored, reference(pool, pages, values))


@pytest.mark.parametrize("count", [1, IN_FLIGHT - 1, IN_FLIGHT, IN_FLIGHT + 1])
def test_any_number_of_pages_is_stored(count: int) -> None:
    pool = random_pages(NUM_PAGES, 8, 128, jnp.float32)
    pages = jnp.arange(count, dtype=jnp.int32)[::-1] + 1
    values = random_pages(count, 8, 128, jnp.float32, seed=1)

    np.testing.assert_array_equal(scatter(pool, pages, values), reference(pool, pages, values))


def test_no_pages_leave_the_pool_as_it_is() -> None:
    pool = random_pages(NUM_PAGES, 8, 128, jnp.float32)

    stored = scatter(pool, jnp.zeros(0, jnp.int32), jnp.zeros((0, 8, 128)))

    np.testing.assert_array_equal(stored, pool)


def test_of_several_entries_for_a_page_the_last_is_stored() -> None:
    pool = random_pages(NUM_PAGES, 8, 128, jnp.float32)
    pages = jnp.array([4, 4, 2, 4, 2, 6], jnp.int32)
    values = random_pages(pages.size, 8, 128, jnp.float32, seed=1)

    stored = np.asarray(scatter(pool, pages, values))

    np.testing.assert_array_equal(stored[[4, 2, 6]], np.asarray(values)[[3, 4, 5]])
    np.testing.assert_array_equal(stored, reference(pool, pages, values))


def test_an_index_outside_a_layer_is_dropped_and_reaches_no_other_layer() -> None:
    pool = random_pages(NUM_PAGES, 8, 128, jnp.float32)  # two layers of 6 pages
    pages = jnp.array([6, -1, 7, 2**31 - 1, -(2**31)], jnp.int32)
    values = jnp.ones((2, pages.size, 8, 128))

    np.testing.assert_array_equal(scatter_into_layers(pool, pages, values), pool)


def test_one_call_stores_into_every_layer_of_a_flat_pool() -> None:
    pool = random_pages(15, 16, 256, jnp.bfloat16)
    pages = jnp.array([4, 1, 2, 9, 1], jnp.int32)
    values = random_pages(15, 16, 256, jnp.bfloat16, seed=1).reshape(3, 5, 16, 256)

    stored = scatter_into_layers(pool, pages, values)

    layers = np.asarray(pool).reshape(3, 5, 16, 256)
    expected = [reference(layer, pages, value) for layer, value in zip(layers, values, strict=True)]
    np.testing.assert_array_equal(np.asarray(stored).reshape(3, 5, 16, 256), expected)


def test_arrays_of_separate_layers_are_stored_into_alike() -> None:
    pools = [random_pages(NUM_PAGES, 8, 128, jnp.float32, seed) for seed in range(3)]
    pages = jnp.array([4, 1], jnp.int32)
    values = [random_pages(2, 8, 128, jnp.float32, seed) for seed in range(5, 8)]

    stored = jax.jit(scatter_each)(pools, pages, values)

    expected = [reference(pool, pages, value) for pool, value in zip(pools, values, strict=True)]
    np.testing.assert_array_equal(stored, expected)


def test_what_was_gathered_is_restored_elsewhere() -> None:
    pool = random_pages(NUM_PAGES, 8, 128, jnp.uint16)
    old, new = jnp.array([1, 2, 3], jnp.int32), jnp.array([5, 3, 4], jnp.int32)

    @jax.jit
    def moved(pool: jax.Array) -> jax.Array:
        return gather_layers(scatter_layers(jnp.zeros_like(pool), new, gather_layers(pool, old, 2)), new, 2)

    expected = np.asarray(pool).reshape(2, 6, 8, 128)[:, old]
    np.testing.assert_array_equal(moved(pool), expected)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-2, 8), min_size=9, max_size=9))
def test_scattering_equals_storing_one_after_another_whatever_the_pages(pages: list[int]) -> None:
    pool = random_pages(NUM_PAGES, 8, 128, jnp.uint16)
    values = random_pages(18, 8, 128, jnp.uint16, seed=1).reshape(2, 9, 8, 128)

    stored = scatter_into_layers(pool, jnp.array(pages, jnp.int32), values)

    layers = np.asarray(pool).reshape(2, 6, 8, 128)
    expected = [reference(layer, pages, value) for layer, value in zip(layers, values, strict=True)]
    np.testing.assert_array_equal(np.asarray(stored).reshape(2, 6, 8, 128), expected)


REPEATED = jnp.array([3, 0, 5, 4, 4, 5, 3, 1, 1, 2, 2], jnp.int32)


def test_scattering_has_no_race_even_with_a_page_given_twice(races: Callable[..., bool]) -> None:
    values = random_pages(22, 8, 128, jnp.float32).reshape(2, 11, 8, 128)

    assert not races(scatter_layers, random_pages(NUM_PAGES, 8, 128, jnp.float32), REPEATED, values)


def test_two_copies_to_one_page_would_be_reported_as_a_race(
    races: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_given(pages: jax.Array, num_pages: int) -> tuple[jax.Array, jax.Array]:
        return jnp.arange(pages.size, dtype=jnp.int32), pages

    monkeypatch.setattr("app.tpu.kernels.scatter_pages._distinct_targets", as_given)
    values = random_pages(22, 8, 128, jnp.float32).reshape(2, 11, 8, 128)

    assert races(scatter_layers, random_pages(NUM_PAGES, 8, 128, jnp.float32), REPEATED, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (jnp.zeros((2, 8, 128)), r"values\.shape=\(2, 8, 128\) is not allowed: \(1, 8, 128\), as of pages and pool"),
        (jnp.zeros((1, 8, 256)), r"values\.shape=\(1, 8, 256\)"),
        (jnp.zeros((1, 8, 128), jnp.bfloat16), r"values\.dtype=dtype\(bfloat16\) is not allowed: dtype\('float32'\)"),
    ],
)
def test_values_that_are_not_pages_of_the_pool_are_refused(values: jax.Array, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scatter_pages(random_pages(NUM_PAGES, 8, 128, jnp.float32), jnp.array([1], jnp.int32), values)


def test_values_of_another_number_of_layers_are_refused() -> None:
    pool, pages = random_pages(NUM_PAGES, 8, 128, jnp.float32), jnp.array([1], jnp.int32)

    with pytest.raises(ConfigError, match=r"values\.shape\[0\]=5 is not allowed: a divisor of the 12 pages"):
        scatter_layers(pool, pages, jnp.zeros((5, 1, 8, 128)))
    with pytest.raises(ConfigError, match=r"len\(values\)=1 is not allowed: 2, as of pools"):
        scatter_each([pool, pool], pages, [jnp.zeros((1, 8, 128))])
