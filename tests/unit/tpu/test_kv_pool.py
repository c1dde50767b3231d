"""The paged pool: lending, donation, storage types."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from app.core.ports import PoolSpec
from app.errors import OwnershipError, RuntimeClosedError
from app.tpu.kv_pool import MHATokenToKVPool, decode, encode, locate, read_pages, write_tokens
from app.tpu.mesh import make_mesh
from app.tpu.pool_layout import KVBuffers


def open_pool(dtype: str = "float32", num_pages: int = 9) -> MHATokenToKVPool:
    spec = PoolSpec(num_pages=num_pages, page_size=4, num_layers=2, num_kv_heads=2, head_dim=3, dtype=dtype)
    pool = MHATokenToKVPool(spec, make_mesh(1, "cpu"))
    pool.open()
    return pool


@partial(jax.jit, donate_argnums=0)
def store(buffers: KVBuffers, pages: jax.Array, offsets: jax.Array, values: jax.Array) -> KVBuffers:
    return jax.tree.map(lambda array: write_tokens(array, pages, offsets, values), buffers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16_bits"])
def test_writes_happen_in_place_and_old_arrays_die(dtype: str) -> None:
    pool = open_pool(dtype)
    taken = pool.take()
    places = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(taken)]

    pool.put(store(taken, jnp.array([3, 9]), jnp.array([1, 0]), jnp.ones((2, 6))))

    held = pool.take()
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(held)] == places
    assert all(array.is_deleted() for array in jax.tree.leaves(taken))
    pool.put(held)
    assert not pool.lost()


def test_contents_are_where_they_were_written_and_nowhere_else() -> None:
    pool = open_pool()
    values = np.arange(12, dtype=np.float32).reshape(2, 6)
    pool.put(store(pool.take(), jnp.array([3, 9]), jnp.array([1, 0]), jnp.array(values)))

    contents = pool.page_contents(np.array([9, 3, 1], np.int32))

    expected = np.zeros((2, 2, 3, 4, 2, 3), np.float32)
    expected[:, :, 0, 0] = values[1].reshape(2, 3)
    expected[:, :, 1, 1] = values[0].reshape(2, 3)
    np.testing.assert_array_equal(contents, expected)


def test_reading_contents_does_not_cost_the_next_write_its_place() -> None:
    pool = open_pool()
    pool.page_contents(np.array([1, 2], np.int32))
    taken = pool.take()
    place = taken.keys[0].unsafe_buffer_pointer()

    written = store(taken, jnp.array([1, 2]), jnp.array([0, 0]), jnp.ones((2, 6)))

    assert written.keys[0].unsafe_buffer_pointer() == place


def test_padding_and_numbers_that_are_not_finite_leave_no_trace() -> None:
    pool = open_pool()
    buffer = pool.take().keys[0]
    table = jnp.array([[5, 6], [0, 0]])
    pages, offsets = locate(table, jnp.array([0, 1]), jnp.array([6, -1]), jnp.array([True, False]), buffer)
    values = jnp.stack([jnp.array([1, jnp.nan, 2, jnp.inf, 3, -jnp.inf]), jnp.ones(6)])

    written = np.array(write_tokens(buffer, pages, offsets, values))

    assert (pages.tolist(), offsets.tolist()) == ([6, 10], [2, 0])
    assert written[6, 2].tolist() == [1, 0, 2, 0, 3, 0]
    written[6, 2] = 0
    assert not written.any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint16, jnp.float8_e4m3fn, jnp.float32])
@pytest.mark.parametrize("computed", [jnp.float32, jnp.bfloat16])
def test_numbers_too_large_for_the_stored_type_become_its_largest(dtype: Any, computed: Any) -> None:
    """Rounded to the nearest they would be infinite, which attention turns into NaN."""
    largest = np.float32(jnp.finfo(computed).max)
    values = jnp.array([[largest, -largest, 3.0], [-1.5, 0.0, 2.0]], jnp.float32).astype(computed)

    written = np.asarray(
        decode(write_tokens(jnp.zeros((2, 2, 3), dtype), jnp.array([1, 1]), jnp.array([0, 1]), values)), np.float32
    )

    stored_largest = jnp.finfo(jnp.bfloat16 if dtype == jnp.uint16 else dtype).max
    expected = min(largest, np.float32(stored_largest))
    np.testing.assert_array_equal(written[1], [[expected, -expected, 3.0], [-1.5, 0.0, 2.0]])


def test_half_width_bits_are_those_of_bfloat16() -> None:
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32) * 1e3
    values[0, :4] = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]  # the last two lie midway between neighbours

    stored = jax.jit(lambda x: encode(x, jnp.dtype("uint16")))(values)

    expected = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(stored, expected.view(np.uint16))
    np.testing.assert_array_equal(jax.jit(decode)(stored), expected.astype(np.float32))


def test_pages_are_read_in_the_order_of_the_row() -> None:
    buffer = jnp.arange(4 * 2 * 3, dtype=jnp.float32).reshape(4, 2, 3)

    read = read_pages(buffer, jnp.array([3, 1]))

    np.testing.assert_array_equal(read, np.concatenate([np.array(buffer)[3], np.array(buffer)[1]]))


def test_arrays_are_lent_once_at_a_time() -> None:
    pool = open_pool()
    taken = pool.take()

    assert pool.lost()
    with pytest.raises(OwnershipError, match="taken already"):
        pool.take()
    with pytest.raises(OwnershipError, match="taken already"):
        pool.page_contents(np.array([1], np.int32))
    pool.put(taken)
    with pytest.raises(OwnershipError, match="without a take"):
        pool.put(taken)
    assert not pool.lost()


def test_reset_replaces_lost_arrays_with_empty_ones() -> None:
    pool = open_pool()
    taken = pool.take()
    store(taken, jnp.array([1, 2]), jnp.array([0, 0]), jnp.ones((2, 6)))
    pool.put(taken)
    assert pool.lost()

    pool.reset()

    assert not pool.lost()
    assert not pool.page_contents(np.arange(10, dtype=np.int32)).any()


def test_a_closed_pool_refuses_and_opens_empty_again() -> None:
    pool = open_pool()
    pool.put(store(pool.take(), jnp.array([1, 2]), jnp.array([0, 0]), jnp.ones((2, 6))))
    pool.close()
    pool.close()

    with pytest.raises(RuntimeClosedError):
        pool.take()
    assert not pool.lost()
    pool.open()
    assert not pool.page_contents(np.array([1, 2], np.int32)).any()


@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2), ("bfloat16_bits", 2)])
def test_arrays_take_the_bytes_that_the_spec_says(dtype: str, element_bytes: int) -> None:
    pool = open_pool(dtype)

    arrays = jax.tree.leaves(pool.take())

    assert {array.dtype.itemsize for array in arrays} == {element_bytes}
    assert sum(array.nbytes for array in arrays) == (pool.spec.num_pages + 1) * pool.spec.page_bytes
