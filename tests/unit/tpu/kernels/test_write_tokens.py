"""Writing tokens: equal to the pool's own `write_tokens`, in any order and number, and without a race."""

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
from app.tpu import kv_pool
from app.tpu.kernels.write_tokens import BLOCK_TOKENS, SLOTS, TokenWrites, plan_token_writes, write_tokens
from tests.support.kernel_cases import page_cases, slow

NUM_PAGES = 30


def random_pool(page_size: int, width: int, dtype: Any) -> jax.Array:
    content = np.random.default_rng(0).integers(0, 100, (NUM_PAGES, page_size, width))
    return jnp.asarray(content, jnp.int32).astype(dtype)


def random_rows(count: int, width: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, width)), jnp.float32)


def plan(pool: jax.Array, pages: jax.Array, offsets: jax.Array) -> TokenWrites:
    num_pages, page_size, width = pool.shape
    return plan_token_writes(pages, offsets, num_pages=num_pages, page_size=page_size, width=width, dtype=pool.dtype)


def planned_and_written(pool: jax.Array, pages: jax.Array, offsets: jax.Array, values: jax.Array) -> jax.Array:
    return write_tokens(pool, plan(pool, pages, offsets), values)


def written(pool: jax.Array, pages: Any, offsets: Any, values: jax.Array) -> np.ndarray:
    pages, offsets = jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32)
    return np.asarray(jax.jit(planned_and_written)(pool, pages, offsets, values))


def one_after_another(pool: jax.Array, pages: Any, offsets: Any, values: jax.Array) -> np.ndarray:
    stored = np.array(pool)
    rows = np.asarray(kv_pool.encode(kv_pool.storable(values, pool.dtype), pool.dtype))
    for page, offset, row in zip(pages, offsets, rows, strict=True):
        if 0 <= page < stored.shape[0] and 0 <= offset < stored.shape[1]:
            stored[page, offset] = row
    return stored


@pytest.fixture
def blocks_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few tokens are several blocks, and tiles are shared between blocks."""
    monkeypatch.setattr("app.tpu.kernels.write_tokens.BLOCK_TOKENS", 8)


@pytest.mark.parametrize(("page_size", "width", "dtype"), page_cases())
def test_a_chunk_and_scattered_tokens_are_stored_as_the_pool_stores_them(
    page_size: int, width: int, dtype: Any
) -> None:
    # Given a run of 21 tokens from the middle of a tile on, over pages that are not neighbours, and a few elsewhere.
    run = np.arange(3, 24)
    pages = np.concatenate([np.array([9, 4, 6, 2])[run // page_size], [1, 12, 30, 5, 31]])
    offsets = np.concatenate([run % page_size, [0, page_size - 1, 3, 2, 0]])
    pool, values = random_pool(page_size, width, dtype), random_rows(pages.size, width)

    stored = written(pool, pages, offsets, values)

    assert stored.dtype == pool.dtype
    np.testing.assert_array_equal(stored, kv_pool.write_tokens(pool, pages, offsets, values))
    assert np.unique(np.argwhere(stored != np.asarray(pool))[:, :2], axis=0).shape == (pages.size - 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, SLOTS, SLOTS + 1, 3 * SLOTS + 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decoded_tokens_alone_in_their_pages_are_stored(count: int, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    pages, offsets = rng.permutation(np.arange(1, NUM_PAGES))[:count], rng.integers(0, 16, count)
    pool, values = random_pool(16, 128, dtype), random_rows(count, 128)

    np.testing.assert_array_equal(
        written(pool, pages, offsets, values), one_after_another(pool, pages, offsets, values)
    )


@pytest.mark.parametrize("dtype", [slow(jnp.float32), slow(jnp.uint16), jnp.float8_e4m3fn])
@pytest.mark.usefixtures("blocks_of_8")
def test_tiles_that_several_blocks_write_keep_what_each_wrote(dtype: Any) -> None:
    # Every block of 8 tokens writes one row of tile 0 of page 3, and rows of others.
    pages = np.array([3, 5, 6, 7, 8, 9, 10, 11] * 3 + [3])
    offsets = np.array([0] * 8 + [1] * 8 + [7] * 8 + [5])
    pool, values = random_pool(8, 128, dtype), random_rows(25, 128)

    np.testing.assert_array_equal(
        written(pool, pages, offsets, values), one_after_another(pool, pages, offsets, values)
    )


@pytest.mark.slow
def test_more_tokens_than_a_block_are_stored() -> None:
    count = BLOCK_TOKENS + 5
    places = np.random.default_rng(3).permutation(NUM_PAGES * 16)[:count]
    pool, values = random_pool(16, 128, jnp.bfloat16), random_rows(count, 128)

    stored = written(pool, places // 16, places % 16, values)

    np.testing.assert_array_equal(stored, one_after_another(pool, places // 16, places % 16, values))


@pytest.mark.usefixtures("blocks_of_8")
def test_of_several_tokens_for_one_place_the_last_is_stored() -> None:
    pages = np.array([3, 3, 4, 3, 4, 4, 3, 3, 5, 3, 4])
    offsets = np.array([1, 1, 2, 1, 2, 3, 0, 1, 1, 1, 2])
    pool, values = random_pool(8, 128, jnp.bfloat16), random_rows(11, 128)

    stored = written(pool, pages, offsets, values)

    np.testing.assert_array_equal(stored[3, 1], kv_pool.encode(values[9], pool.dtype))
    np.testing.assert_array_equal(stored, one_after_another(pool, pages, offsets, values))


def test_places_outside_the_pool_or_the_page_are_dropped() -> None:
    pages, offsets = np.array([NUM_PAGES, -1, 2**31 - 1, 4, 4, 5]), np.array([0, 0, 7, 8, -1, 6])
    pool, values = random_pool(8, 128, jnp.float32), random_rows(6, 128)

    stored = written(pool, pages, offsets, values)

    expected = np.array(pool)
    expected[5, 6] = values[5]
    np.testing.assert_array_equal(stored, expected)


def test_when_every_token_is_dropped_the_pool_stays() -> None:
    pool = random_pool(8, 128, jnp.float32)

    stored = written(pool, np.full(9, NUM_PAGES), np.arange(9), random_rows(9, 128))

    np.testing.assert_array_equal(stored, pool)


def test_no_tokens_leave_the_pool_as_it_is() -> None:
    pool = random_pool(8, 128, jnp.float32)

    np.testing.assert_array_equal(written(pool, np.zeros(0), np.zeros(0), jnp.zeros((0, 128))), pool)


@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16, slow(jnp.uint16)])
def test_numbers_that_cannot_be_stored_become_zero_or_the_largest(dtype: Any) -> None:
    largest = jnp.finfo(jnp.float32).max  # beyond bfloat16's
    values = random_rows(2, 128).at[0, :5].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf, largest, -largest]))
    pool = random_pool(8, 128, dtype)

    stored = written(pool, [3, 4], [1, 7], values)

    assert stored[3, 1, :3].tolist() == [0, 0, 0]
    assert np.isfinite(np.asarray(kv_pool.decode(jnp.asarray(stored[3, 1])), np.float32)).all()
    np.testing.assert_array_equal(stored, kv_pool.write_tokens(pool, jnp.array([3, 4]), jnp.array([1, 7]), values))


def test_one_plan_serves_every_layer_of_a_flat_pool() -> None:
    pool = random_pool(8, 128, jnp.bfloat16)  # three layers of 10 pages
    pages, offsets = jnp.array([3, 9, 10, 0, 3], jnp.int32), jnp.array([1, 7, 0, 2, 0], jnp.int32)
    values = random_rows(15, 128).reshape(3, 5, 128)

    @jax.jit
    def in_a_loop(pool: jax.Array) -> jax.Array:
        writes = plan_token_writes(pages, offsets, num_pages=10, page_size=8, width=128, dtype=pool.dtype)
        return jax.lax.fori_loop(0, 3, lambda layer, pool: write_tokens(pool, writes, values[layer], layer * 10), pool)

    stored = in_a_loop(pool)

    layers = pool.reshape(3, 10, 8, 128)
    expected = [kv_pool.write_tokens(layers[layer], pages, offsets, values[layer]) for layer in range(3)]
    np.testing.assert_array_equal(np.asarray(stored).reshape(3, 10, 8, 128), expected)


def test_only_a_tile_with_a_token_for_each_of_its_rows_is_planned_as_whole() -> None:
    pool = random_pool(16, 128, jnp.float32)
    pages = jnp.array([4] * 8 + [5] * 8 + [6] * 7, jnp.int32)
    offsets = jnp.array([*range(8, 16), 0, 1, 2, 3, 4, 5, 6, 6, *range(7)], jnp.int32)

    writes = plan(pool, pages, offsets)

    assert writes.num_tiles.tolist() == [3]
    assert writes.whole[0, :3].tolist() == [1, 0, 0]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-1, 1, 2, 3, 4, NUM_PAGES]), st.integers(-1, 16)), min_size=21, max_size=21))
def test_writing_equals_storing_one_after_another_whatever_the_places(places: list[tuple[int, int]]) -> None:
    pages, offsets = np.array(places).T
    pool, values = random_pool(16, 128, jnp.bfloat16), random_rows(21, 128)

    stored = written(pool, pages, offsets, values)

    np.testing.assert_array_equal(stored, one_after_another(pool, pages, offsets, values))


MANY_TILES = (jnp.array([*range(1, 13), 1, 2, 3], jnp.int32), jnp.array([0] * 12 + [7, 0, 2], jnp.int32))


@pytest.mark.usefixtures("blocks_of_8")
def test_writing_has_no_race_even_between_blocks(races: Callable[..., bool]) -> None:
    assert not races(planned_and_written, random_pool(8, 128, jnp.bfloat16), *MANY_TILES, random_rows(15, 128))


def test_a_tile_that_is_read_again_before_it_was_written_would_be_reported_as_a_race(
    races: Callable[..., bool],
) -> None:
    # Given a plan that takes the 6 tokens of one tile for 6 tiles.
    pool, values = random_pool(8, 128, jnp.bfloat16), random_rows(6, 128)
    right = plan(pool, jnp.full(6, 3, jnp.int32), jnp.arange(6, dtype=jnp.int32))
    wrong = right._replace(starts=jnp.arange(7, dtype=jnp.int32)[None], num_tiles=jnp.array([6], jnp.int32))

    assert not races(write_tokens, pool, right, values)
    assert races(write_tokens, pool, wrong, values)


def test_values_that_do_not_fit_the_plan_or_the_pool_are_refused() -> None:
    pool, two = random_pool(8, 128, jnp.float32), jnp.array([1, 2], jnp.int32)
    writes = plan(pool, two, two)

    with pytest.raises(ConfigError, match=r"writes\.places\.shape=\(1, 2\) is not allowed: \(1, 3\), as of values"):
        write_tokens(pool, writes, random_rows(3, 128))
    with pytest.raises(ConfigError, match=r"values\.shape\[1\]=256 is not allowed: 128, as of the pool"):
        write_tokens(pool, writes, random_rows(2, 256))
    with pytest.raises(ConfigError, match=r"values\.shape=\(128,\) is not allowed: two axes"):
        write_tokens(pool, writes, jnp.zeros(128))
    with pytest.raises(ConfigError, match=r"offsets\.shape=\(1,\) is not allowed: \(2,\), as of pages"):
        plan(pool, two, two[:1])
    with pytest.raises(ConfigError, match=r"num_pages=0 is not allowed: 1 to"):
        plan_token_writes(two, two, num_pages=0, page_size=8, width=128, dtype=pool.dtype)
