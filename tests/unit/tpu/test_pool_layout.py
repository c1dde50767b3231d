"""Where pages lie in a flat pool."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from app.core.ports import PoolSpec
from app.tpu.kv_pool import MHATokenToKVPool
from app.tpu.mesh import make_mesh
from app.tpu.pool_layout import ArrayPerLayer, FlatByHead, FlatKVBuffers, FlatWide, PoolLayout, flat_rows

SPEC = PoolSpec(
    num_pages=3,
    page_size=2,
    num_layers=2,
    num_kv_heads=2,
    head_dim=3,
    dtype="float32",
    extra_kv_heads=1,
    extra_head_dim=1,
)


def test_a_page_beyond_a_layer_is_beyond_the_pool_and_not_the_next_layers() -> None:
    rows = flat_rows(jnp.array([0, 3, 4, 99]), layer=1, pages_a_layer=4, num_rows=8)

    np.testing.assert_array_equal(rows, [4, 7, 8, 8])


@pytest.mark.parametrize("layout", [FlatWide(), FlatByHead()])
def test_contents_leave_out_the_padding_and_part_keys_from_values(layout: PoolLayout) -> None:
    pool = MHATokenToKVPool(SPEC, make_mesh(1, "cpu"), layout)
    pool.open()
    shape = pool.take().pages.shape
    # Each element tells its layer, page, token, stored head, whether it is a value, and its place in the head.
    meanings = np.arange(2 * 4 * 2 * 3 * 2 * 4, dtype=np.float32).reshape(2, 4, 2, 3, 2, 4)
    pool.put(FlatKVBuffers(jnp.array(meanings.reshape(shape))))

    contents = pool.page_contents(np.array([2, 0], np.int32))

    expected = np.moveaxis(meanings[:, [2, 0], :, :2, :, :3], -2, 0)
    np.testing.assert_array_equal(contents, expected)


@pytest.mark.parametrize("layout", [ArrayPerLayer(), FlatWide(), FlatByHead()])
def test_a_pool_takes_the_memory_that_its_spec_says(layout: PoolLayout) -> None:
    pool = MHATokenToKVPool(SPEC, make_mesh(1, "cpu"), layout)
    pool.open()
    buffers = pool.take()

    arrays = [*buffers.keys, *buffers.values] if layout == ArrayPerLayer() else [buffers.pages]

    assert sum(array.nbytes for array in arrays) == (SPEC.num_pages + 1) * SPEC.page_bytes
