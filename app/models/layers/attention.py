"""Attention over the paged pool, on one rank's heads. Keys of the new tokens are in the pool before these run.

Rows go one after another in a loop, not all at once: one row's gathered keys stay in the CPU's cache, and the batched
gather was five times slower at 2048 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.models.steps import ExtendRows
from app.tpu.kv_pool import read_pages

QUERY_BLOCK = 128  # scores of so many queries with so many keys exist at one time: heads * 128 * 256 * 4 bytes,
KEY_TILE = 256  # which stay in the CPU's cache
_MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


class PageReader(NamedTuple):
    """One layer of the pool, as attention reads it."""

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    """(n,) int32 pages -> keys and values of their tokens, (n * page_size, num_kv_heads * head_dim) floats each."""
    page_size: int
    num_kv_heads: int


def separate_arrays(keys: jax.Array, values: jax.Array, head_dim: int) -> PageReader:
    """A reader of a layer that has one array of keys and one of values."""

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return read_pages(keys, pages), read_pages(values, pages)

    return PageReader(read, keys.shape[1], keys.shape[-1] // head_dim)


def decode_attention(queries: jax.Array, layer: PageReader, page_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """One query a row over the row's `lengths` tokens.

    queries: (B, heads, head_dim), scaled; page_table: (B, max_pages) int32; lengths: (B,) int32.
    -> (B, heads * head_dim). Cost: O(B * max_pages * page_size), whatever the lengths.
    """
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads = layer.num_kv_heads
    # Each query is laid out over the width of all KV heads, zero outside its own: two plain matrix products then serve
    # all heads without rearranging the gathered pages.
    own = jnp.repeat(jnp.eye(num_kv_heads, dtype=queries.dtype), num_heads // num_kv_heads, axis=0)[:, :, None]

    def attend(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, pages, length = row
        row_keys, row_values = (tokens.astype(query.dtype) for tokens in layer.read(pages))
        spread = (query[:, None, :] * own).reshape(num_heads, -1)
        scores = jnp.matmul(spread, row_keys.T, preferred_element_type=jnp.float32)
        visible = jnp.arange(scores.shape[-1]) < length
        weights = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1).astype(query.dtype)
        mixed = jnp.matmul(weights, row_values).reshape(num_heads, num_kv_heads, head_dim)
        return (mixed * own).sum(axis=1).reshape(-1)

    return jax.lax.map(attend, (queries, page_table, lengths))


def extend_attention(queries: jax.Array, layer: PageReader, rows: ExtendRows, max_chunk: int) -> jax.Array:
    """Causal attention of packed chunks: query i of a row sees the row's positions up to prefix_lengths + i.

    queries: (T, heads, head_dim), scaled; rows, max_chunk: as in ExtendInputs.
    -> (T, heads * head_dim); zeros where no row's token lies.
    For each row, QUERY_BLOCK queries at a time, over KEY_TILE keys at a time with a running softmax (arXiv:2112.05682):
    memory does not grow with the context, and the cost follows the lengths, not the width of the page table.
    """
    num_tokens, num_heads, head_dim = queries.shape
    page_size, page_table = layer.page_size, rows.page_table
    block = min(max_chunk, QUERY_BLOCK)
    tile_pages = min(max(1, KEY_TILE // page_size), page_table.shape[1])
    tile = tile_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % tile_pages)))
    padded = jnp.pad(queries, ((0, block), (0, 0), (0, 0)))  # a slice of `block` tokens fits from every token on

    def attend_row(row: jax.Array, out: jax.Array) -> jax.Array:
        length = rows.chunk_lengths[row]

        def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
            first = index * block
            start = rows.chunk_starts[row] + first
            offsets = first + jnp.arange(block)
            query = _by_kv_head(jax.lax.dynamic_slice_in_dim(padded, start, block), layer.num_kv_heads)

            def attend_tile(number: jax.Array, state: _Softmax) -> _Softmax:
                pages = jax.lax.dynamic_slice_in_dim(table[row], number * tile_pages, tile_pages)
                positions = number * tile + jnp.arange(tile)
                visible = positions <= (rows.prefix_lengths[row] + offsets)[:, None]
                return _accumulate(state, query, *layer.read(pages), visible)

            seen = rows.prefix_lengths[row] + jnp.minimum(first + block, length)
            state = jax.lax.fori_loop(0, -(-seen // tile), attend_tile, _nothing_seen(query))
            fresh = (state.mixed / state.total).transpose(2, 0, 1, 3).reshape(block, -1).astype(queries.dtype)
            stale = jax.lax.dynamic_slice_in_dim(out, start, block)  # the next row's, where this row's chunk has ended
            mine = (offsets < length)[:, None]
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, fresh, stale), start, axis=0)

        return jax.lax.fori_loop(0, -(-length // block), attend_block, out)

    out = jnp.zeros((num_tokens + block, num_heads * head_dim), queries.dtype)
    return jax.lax.fori_loop(0, page_table.shape[0], attend_row, out)[:num_tokens]


class _Softmax(NamedTuple):
    """A softmax-weighted sum, as far as keys were seen: (kv_heads, group, n, ...) float32."""

    greatest: jax.Array  # (..., 1), of the scores
    total: jax.Array  # (..., 1), of exp(score - greatest)
    mixed: jax.Array  # (..., head_dim), values weighted by exp(score - greatest)


def _nothing_seen(query: jax.Array) -> _Softmax:
    column = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
    return _Softmax(column + _MASKED, column, jnp.zeros(query.shape, jnp.float32))


def _accumulate(state: _Softmax, query: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> _Softmax:
    """query: (kv_heads, group, n, head_dim); keys, values: (t, width); visible: (n, t)."""
    num_kv_heads, group, num_queries, head_dim = query.shape
    keys, values = (
        tokens.astype(query.dtype).reshape(-1, num_kv_heads, head_dim).transpose(1, 0, 2) for tokens in (keys, values)
    )
    stacked = query.reshape(num_kv_heads, group * num_queries, head_dim)
    scores = jnp.einsum("knd,ktd->knt", stacked, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores.reshape(num_kv_heads, group, num_queries, -1), _MASKED)
    greatest = jnp.maximum(state.greatest, scores.max(axis=-1, keepdims=True))
    weights, kept = jnp.exp(scores - greatest), jnp.exp(state.greatest - greatest)
    stacked = weights.reshape(num_kv_heads, group * num_queries, -1).astype(query.dtype)
    mixed = jnp.einsum("knt,ktd->knd", stacked, values, preferred_element_type=jnp.float32).reshape(query.shape)
    return _Softmax(greatest, state.total * kept + weights.sum(axis=-1, keepdims=True), state.mixed * kept + mixed)


def _by_kv_head(queries: jax.Array, num_kv_heads: int) -> jax.Array:
    """(n, heads, head_dim) -> (kv_heads, group, n, head_dim)."""
    num_queries, num_heads, head_dim = queries.shape
    return queries.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(1, 2, 0, 3)
