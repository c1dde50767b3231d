"""What shapes the kernels of this package can serve. Only shapes and types are looked at: that costs a program nothing.

The kernels compile for TPU only; on other backends the functions of `app.tpu.kv_pool` say the same in plain JAX.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from app.errors import ConfigError

LANES = 128  # elements of the last axis that lie together in a TPU's memory, whatever their type
TILE_ROWS = 8  # rows of a page that do, whatever their type: the least that DMA can move
MAX_WIDTH = 32768  # the tiles that are under way and the rows of 8 tokens then still fit in 16 MiB of VMEM
MAX_TABLE_ENTRIES = 16384  # the tables lie in scalar memory whole, at most five of them, 4 bytes an entry


def check_pool(pool: jax.Array) -> None:
    """Raise ConfigError unless a kernel can copy pieces of `pool`, (num_pages, page_size, width), in place.

    Other shapes would compile too, but XLA lays them out otherwise than a kernel needs, and copies the whole pool
    before and after each call.
    """
    if pool.ndim != 3:
        raise ConfigError(field="pool.shape", value=pool.shape, allowed="three axes: num_pages, page_size, width")
    check_page(page_size=pool.shape[1], width=pool.shape[2], dtype=pool.dtype)


def check_page(*, page_size: int, width: int, dtype: jnp.dtype) -> None:
    """Raise ConfigError unless the kernels can serve pages of (page_size, width) elements of `dtype`."""
    if jnp.dtype(dtype).itemsize not in (1, 2, 4):
        raise ConfigError(field="pool.dtype", value=str(jnp.dtype(dtype)), allowed="a type of 1, 2 or 4 bytes")
    if not LANES <= width <= MAX_WIDTH or width % LANES:
        raise ConfigError(
            field="width",
            value=width,
            allowed=f"a multiple of {LANES} up to {MAX_WIDTH} on each device (num_kv_heads * head_dim / tp)",
        )
    if page_size < TILE_ROWS or page_size % TILE_ROWS:
        raise ConfigError(field="page_size", value=page_size, allowed=f"a multiple of {TILE_ROWS}")


def check_table(name: str, table: jax.Array) -> None:
    """Raise ConfigError unless `table` is (n,) int32 with no more entries than scalar memory holds."""
    if table.ndim != 1 or table.dtype != jnp.int32:
        raise ConfigError(field=name, value=f"{table.dtype}{list(table.shape)}", allowed="one axis of int32")
    if table.size > MAX_TABLE_ENTRIES:
        raise ConfigError(
            field=f"{name}.size", value=table.size, allowed=f"at most {MAX_TABLE_ENTRIES}: split the call"
        )


def check_same(name: str, value: object, other: str, expected: object) -> None:
    """Raise ConfigError unless `value`, called `name`, is what `other` says it must be."""
    if value != expected:
        raise ConfigError(field=name, value=value, allowed=f"{expected!r}, as of {other}")
