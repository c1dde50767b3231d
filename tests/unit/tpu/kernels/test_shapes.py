"""Shapes that would compile to copies of the whole pool are refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from app.errors import ConfigError
from app.tpu.kernels.shapes import MAX_TABLE_ENTRIES, MAX_WIDTH
from app.tpu.kernels.write_tokens import plan_token_writes, write_tokens

ONE = jnp.array([1], jnp.int32)
REFUSED = [
    ((4, 8, 192), jnp.float32, r"width=192 is not allowed: a multiple of 128"),
    ((4, 8, 64), jnp.bfloat16, r"width=64 is not allowed"),
    ((4, 8, 0), jnp.float32, r"width=0 is not allowed"),
    ((4, 8, MAX_WIDTH + 128), jnp.float32, rf"width={MAX_WIDTH + 128} is not allowed: a multiple of 128 up to"),
    ((4, 12, 128), jnp.float32, r"page_size=12 is not allowed: a multiple of 8"),
    ((4, 1, 128), jnp.bfloat16, r"page_size=1 is not allowed"),
    ((4, 0, 128), jnp.bfloat16, r"page_size=0 is not allowed"),
    ((4, 8, 128), jnp.complex64, r"pool\.dtype='complex64' is not allowed: a type of 1, 2 or 4 bytes"),
]


@pytest.mark.parametrize(("shape", "dtype", "message"), REFUSED)
def test_a_pool_that_could_not_be_used_in_place_is_refused(shape: tuple[int, ...], dtype: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_token_writes(ONE, ONE, num_pages=shape[0], page_size=shape[1], width=shape[2], dtype=dtype)


def test_a_pool_of_four_axes_is_refused() -> None:
    pool = jax.ShapeDtypeStruct((4, 16, 8, 128), jnp.float32)
    writes = plan_token_writes(ONE, ONE, num_pages=4, page_size=16, width=1024, dtype=jnp.dtype("float32"))

    with pytest.raises(ConfigError, match=r"pool\.shape=\(4, 16, 8, 128\) is not allowed: three axes"):
        jax.eval_shape(write_tokens, pool, writes, jax.ShapeDtypeStruct((1, 1024), jnp.float32))


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (jnp.zeros(3, jnp.uint32), r"pages='uint32\[3\]' is not allowed: one axis of int32"),
        (jnp.zeros((1, 3), jnp.int32), r"pages='int32\[1, 3\]' is not allowed: one axis of int32"),
        (jnp.zeros(MAX_TABLE_ENTRIES + 1, jnp.int32), r"pages\.size=16385 is not allowed: at most 16384: split"),
    ],
)
def test_a_table_that_the_kernels_cannot_hold_is_refused(pages: jax.Array, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_token_writes(pages, pages, num_pages=4, page_size=8, width=128, dtype=jnp.dtype("float32"))
