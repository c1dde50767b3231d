"""Writing a step's tokens into the pool: the kernel and the tables it runs by.

Rows of a page lie in tiles of 8, the smallest pieces that DMA can move. So a token's row goes in by reading its tile,
changing the row and writing the tile back. Tokens of one tile are put in together, and a tile whose every row is new is
not read. Many tiles are under way at once, which is safe because within a block of tokens
no tile comes twice, and one block's writes have finished when the next block starts:

    tile g + AHEAD   being read from HBM
    tile g           its rows changed in VMEM
    tile g - 1 ..    being written back; tile g + AHEAD takes the place of tile g + AHEAD - SLOTS

Which token goes into which tile is the same for keys and values and for every layer, so `plan_token_writes` finds it
out once a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.errors import ConfigError
from app.tpu.kernels.shapes import TILE_ROWS, check_page, check_pool, check_same, check_table
from app.tpu.kv_pool import encode, storable

SLOTS = 8  # tiles in VMEM
AHEAD = 4  # tiles whose reading starts before their turn; the other slots are being written back
BLOCK_BYTES = 2 * 2**20  # of tokens' rows in VMEM; twice as much is used, for the next block arrives meanwhile
BLOCK_TOKENS = 256

_NOWHERE = jnp.iinfo(jnp.int32).max  # the place of a token that is dropped: after every other when sorted


class TokenWrites(NamedTuple):
    """Where a step's tokens go, sorted by place within each block of tokens. int32 arrays on the device.

    places: (num_blocks, block) page * page_size + offset, ascending; those that are dropped at the end.
    tokens: (num_blocks, block) the token of each place, counted within the block.
    starts: (num_blocks, block + 1) index in `places` of the first token of each tile; then the number of tokens kept.
    whole: (num_blocks, block) 1 for a tile whose every row is written.
    num_tiles: (num_blocks,)
    """

    places: jax.Array
    tokens: jax.Array
    starts: jax.Array
    whole: jax.Array
    num_tiles: jax.Array


def plan_token_writes(
    pages: jax.Array, offsets: jax.Array, *, num_pages: int, page_size: int, width: int, dtype: jnp.dtype
) -> TokenWrites:
    """The tables by which `write_tokens` stores n tokens: pages, offsets (n,) int32, in any order.

    num_pages, page_size, width, dtype: of one layer's array as `write_tokens` will see it (inside shard_map: on one
    device). Pages outside 0..num_pages - 1 and offsets outside the page are dropped. Of tokens with the same place the
    last is kept. Sorts blocks of up to 256 tokens; touches nothing of the pool's size.

    Raises ConfigError for shapes or types that the kernel cannot serve (see `shapes`).
    """
    check_page(page_size=page_size, width=width, dtype=dtype)
    check_table("pages", pages)
    check_table("offsets", offsets)
    check_same("offsets.shape", offsets.shape, "pages", pages.shape)
    if not 1 <= num_pages <= _NOWHERE // page_size:
        raise ConfigError(field="num_pages", value=num_pages, allowed=f"1 to {_NOWHERE // page_size}")
    block = block_tokens(pages.size, width)
    num_blocks = pl.cdiv(pages.size, block)

    inside = (pages >= 0) & (pages < num_pages) & (offsets >= 0) & (offsets < page_size)
    places = jnp.where(inside, pages * page_size + offsets, _NOWHERE)
    places = jnp.pad(places, (0, num_blocks * block - places.size), constant_values=_NOWHERE)
    places = places.reshape(num_blocks, block)
    tokens = jnp.argsort(places, axis=1, stable=True).astype(jnp.int32)
    places = jnp.take_along_axis(places, tokens, axis=1)

    kept = places != _NOWHERE
    num_kept = kept.sum(axis=1, dtype=jnp.int32, keepdims=True)
    tiles = places // TILE_ROWS
    first_of_tile = kept & _differs_from_last(tiles)
    starts = jnp.sort(jnp.where(first_of_tile, jnp.arange(block, dtype=jnp.int32), num_kept), axis=1)
    starts = jnp.concatenate([starts, num_kept], axis=1)

    # Tokens of one place count once: a tile is whole when it has as many places as rows.
    distinct = jnp.cumsum(kept & _differs_from_last(places), axis=1, dtype=jnp.int32)
    distinct = jnp.take_along_axis(jnp.pad(distinct, ((0, 0), (1, 0))), starts, axis=1)
    whole = distinct[:, 1:] - distinct[:, :-1] == TILE_ROWS
    return TokenWrites(
        places=places,
        tokens=tokens,
        starts=starts,
        whole=whole.astype(jnp.int32),
        num_tiles=first_of_tile.sum(axis=1, dtype=jnp.int32),
    )


def write_tokens(pool: jax.Array, writes: TokenWrites, values: jax.Array, first_page: jax.Array | int = 0) -> jax.Array:
    """Store one layer's keys or values of n tokens, as `app.tpu.kv_pool.write_tokens` does, on TPU.

    pool: (num_pages, page_size, width), in its stored type; writes: planned for these n tokens and this page_size,
    width and type; values: (n, width) as floats, made `storable`; first_page: int32, where the layer's pages begin in a
    flat pool. In place when the pool is donated (in a program: not used again); else XLA copies it
    first. Moves up to two tiles a token, one each way, and less where tokens share tiles; needs memory for 4 bytes an
    element of `values`, whatever the pool's size.

    Raises ConfigError for shapes or types that do not fit together or that the kernel cannot serve (see `shapes`).
    """
    check_pool(pool)
    width = pool.shape[2]
    if values.ndim != 2:
        raise ConfigError(field="values.shape", value=values.shape, allowed="two axes: num_tokens, width")
    check_same("values.shape[1]", values.shape[1], "the pool", width)
    num_tokens = values.shape[0]
    num_blocks, block = writes.places.shape
    check_same("writes.places.shape", (num_blocks, block), "values", planned_shape(num_tokens, width))
    if num_tokens == 0:
        return pool

    return pl.pallas_call(
        partial(_write_block, block=block),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((block, width), lambda index, *_: (index, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((SLOTS, TILE_ROWS, width), pool.dtype),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SemaphoreType.DMA((SLOTS,)),
            ],
        ),
        input_output_aliases={7: 0},
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=num_tokens * width * (2 * TILE_ROWS * pool.dtype.itemsize + 4),
        ),
        name="write_tokens",
    )(
        jnp.asarray(first_page, jnp.int32).reshape(1),
        *(table.reshape(-1) for table in writes),
        _as_words(values, pool.dtype),
        pool,
    )


def block_tokens(num_tokens: int, width: int) -> int:
    """Tokens whose rows lie in VMEM together: as many as BLOCK_BYTES allow in steps of 8, at most 256."""
    fitting = max(BLOCK_BYTES // (width * 4) // 8 * 8, 8)
    return max(min(BLOCK_TOKENS, fitting, num_tokens), 1)


def planned_shape(num_tokens: int, width: int) -> tuple[int, int]:
    """(num_blocks, block) of the tables for so many tokens."""
    block = block_tokens(num_tokens, width)
    return pl.cdiv(num_tokens, block), block


def _differs_from_last(sorted_rows: jax.Array) -> jax.Array:
    """Where a row's entry is not that before it; True for the first."""
    return jnp.pad(sorted_rows[:, 1:] != sorted_rows[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def _as_words(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What the pool stores for `values`, each element in the low bits of a uint32: a row of those can be picked out of
    a tile by index, one of shorter elements cannot."""
    stored = encode(storable(values, dtype), dtype)
    bits = jax.lax.bitcast_convert_type(stored, jnp.dtype(f"uint{8 * dtype.itemsize}"))
    return bits.astype(jnp.uint32)


def _write_block(
    first_page: jax.Ref,
    places: jax.Ref,
    tokens: jax.Ref,
    starts: jax.Ref,
    whole: jax.Ref,
    num_tiles: jax.Ref,
    values: jax.Ref,
    _pool_before: jax.Ref,
    pool: jax.Ref,
    tiles: jax.Ref,
    read_done: jax.Ref,
    write_done: jax.Ref,
    *,
    block: int,
) -> None:
    """One block of tokens. The tables lie flat in SMEM, values, (block, width) uint32, and tiles in VMEM."""
    page_size = pool.shape[1]
    block_index = pl.program_id(0)
    base, starts_base, count = block_index * block, block_index * (block + 1), num_tiles[block_index]

    def tile_in_pool(index: jax.Array) -> Any:
        place = places[base + starts[starts_base + index]]
        page, offset = jax.lax.div(place, page_size), jax.lax.rem(place, page_size)
        row = pl.multiple_of(jax.lax.div(offset, TILE_ROWS) * TILE_ROWS, TILE_ROWS)
        return pool.at[first_page[0] + page, pl.ds(row, TILE_ROWS)]

    def reading(index: jax.Array) -> Any:
        slot = jax.lax.rem(index, SLOTS)
        return pltpu.make_async_copy(tile_in_pool(index), tiles.at[slot], read_done.at[slot])

    def writing(index: jax.Array) -> Any:
        slot = jax.lax.rem(index, SLOTS)
        return pltpu.make_async_copy(tiles.at[slot], tile_in_pool(index), write_done.at[slot])

    def change_rows(index: jax.Array) -> None:
        def put_row(entry: jax.Array, words: jax.Array) -> jax.Array:
            row = jax.lax.rem(places[base + entry], TILE_ROWS)
            new = values[pl.ds(tokens[base + entry], 1)]
            return _with_row(words, row, new)

        slot = jax.lax.rem(index, SLOTS)
        words = pltpu.bitcast(tiles[slot], jnp.uint32)
        words = jax.lax.fori_loop(starts[starts_base + index], starts[starts_base + index + 1], put_row, words)
        tiles[slot] = pltpu.bitcast(words, tiles.dtype)

    @pl.loop(0, count + AHEAD)
    def _(step: jax.Array) -> None:
        @pl.when(step < count)
        def _() -> None:
            @pl.when(step >= SLOTS)
            def _() -> None:
                writing(step - SLOTS).wait()

            @pl.when(whole[base + step] == 0)
            def _() -> None:
                reading(step).start()

        index = step - AHEAD

        @pl.when(index >= 0)
        def _() -> None:
            @pl.when(whole[base + index] == 0)
            def _() -> None:
                reading(index).wait()

            change_rows(index)
            writing(index).start()

    @pl.loop(jnp.maximum(count - SLOTS, 0), count)
    def _(index: jax.Array) -> None:
        writing(index).wait()


def _with_row(words: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
    """A tile as uint32, (TILE_ROWS / k, width) where k rows share a word, with `row` replaced by new, (1, width)."""
    rows_per_word = TILE_ROWS // words.shape[0]
    bits = 32 // rows_per_word
    shift = (jax.lax.rem(row, rows_per_word) * bits).astype(jnp.uint32)
    kept = ~(jnp.uint32(2**bits - 1) << shift)
    changed = (words & kept) | (new << shift)
    word = jax.lax.div(row, rows_per_word)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) == word, changed, words)
