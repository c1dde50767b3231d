"""Attention over the paged pool, on one rank's heads. Keys of the new tokens are in the pool before these run.

Rows go one after another in a loop, not all at once: one row's gathered keys stay in the CPU's cache, and the batched
gather was five times slower at 2048 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.models.steps import DecodeRows, ExtendRows
from app.tpu.kv_pool import read_pages

QUERY_BLOCK = 128  # scores of so many queries with so many keys exist at one time: heads * 128 * 256 * 4 bytes,
KEY_TILE = 256  # which stay in the CPU's cache
_MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


class Scores(NamedTuple):
    """What a layer makes of the products of queries and keys, and which of them count. Static: part of the program."""

    scale: float
    soft_cap: float | None = None  # c: scores become c * tanh(score / c)
    window: int | None = None  # W: a query at i sees keys at j with i - W < j <= i

    def of(self, products: jax.Array, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Scores of products (..., n, t) of scaled queries; `queries` (n, 1) or () and `keys` (t,) are positions."""
        capped = products if self.soft_cap is None else self.soft_cap * jnp.tanh(products / self.soft_cap)
        visible = keys <= queries
        if self.window is not None:
            visible &= keys > queries - self.window
        return jnp.where(visible, capped, _MASKED)


class PageReader(NamedTuple):
    """One layer of the pool, as attention reads it."""

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    """(n,) int32 pages -> keys and values of their tokens, (n * page_size, num_kv_heads * head_dim) floats each, with
    a head_dim of `value_dim` for values."""
    page_size: int
    num_kv_heads: int
    value_dim: int


def separate_arrays(keys: jax.Array, values: jax.Array, head_dim: int) -> PageReader:
    """A reader of a layer that has one array of keys and one of values."""

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return read_pages(keys, pages), read_pages(values, pages)

    return PageReader(read, keys.shape[1], keys.shape[-1] // head_dim, head_dim)


def latent_array(latents: jax.Array, value_dim: int) -> PageReader:
    """A reader of a layer that has one latent for all heads: each is a key, and its beginning is the value."""

    def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = read_pages(latents, pages)
        return keys, keys[:, :value_dim]

    return PageReader(read, latents.shape[1], 1, value_dim)


def decode_attention(
    queries: jax.Array, layer: PageReader, rows: DecodeRows, scores: Scores, sinks: jax.Array | None = None
) -> jax.Array:
    """One query a row over the row's tokens, its own the last.

    queries: (B, heads, head_dim), unscaled; sinks: (heads,), scores that take weight and bring no value.
    -> (B, heads * value_dim). Cost: O(B * width of the page table * page_size), whatever the lengths.
    """
    num_heads = queries.shape[1]
    num_kv_heads = layer.num_kv_heads
    # Each query is laid out over the width of all KV heads, zero outside its own: two plain matrix products then serve
    # all heads without rearranging the gathered pages.
    own = jnp.repeat(jnp.eye(num_kv_heads, dtype=queries.dtype), num_heads // num_kv_heads, axis=0)[:, :, None]

    def attend(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, pages, length, first_page = row
        row_keys, row_values = (tokens.astype(query.dtype) for tokens in layer.read(pages))
        spread = (query[:, None, :] * own).reshape(num_heads, -1)
        products = jnp.matmul(spread, row_keys.T, preferred_element_type=jnp.float32)
        positions = first_page * layer.page_size + jnp.arange(products.shape[-1])
        weights = _softmax(scores.of(products, length - 1, positions), sinks).astype(query.dtype)
        mixed = jnp.matmul(weights, row_values).reshape(num_heads, num_kv_heads, layer.value_dim)
        return (mixed * own).sum(axis=1).reshape(-1)

    first_pages = jnp.broadcast_to(rows.first_pages, rows.lengths.shape)
    return jax.lax.map(attend, (queries * scores.scale, rows.page_table, rows.lengths, first_pages))


def extend_attention(
    queries: jax.Array,
    layer: PageReader,
    rows: ExtendRows,
    max_chunk: int,
    scores: Scores,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of packed chunks: query i of a row sees the row's positions up to prefix_lengths + i.

    queries: (T, heads, head_dim), unscaled; rows, max_chunk: as in ExtendInputs; sinks: as in decode_attention.
    -> (T, heads * value_dim); zeros where no row's token lies.
    For each row, QUERY_BLOCK queries at a time, over KEY_TILE keys at a time with a running softmax (arXiv:2112.05682):
    memory does not grow with the context, and the cost follows the lengths, with a window the window's, not the width
    of the page table.
    """
    num_tokens, num_heads, _ = queries.shape
    page_size, page_table = layer.page_size, rows.page_table
    block = min(max_chunk, QUERY_BLOCK)
    tile_pages = min(max(1, KEY_TILE // page_size), page_table.shape[1])
    tile = tile_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % tile_pages)))
    table_starts = jnp.broadcast_to(rows.first_pages, page_table.shape[:1]) * page_size
    # A slice of `block` tokens fits from every token on.
    padded = jnp.pad(queries * scores.scale, ((0, block), (0, 0), (0, 0)))

    def attend_row(row: jax.Array, out: jax.Array) -> jax.Array:
        length, table_start = rows.chunk_lengths[row], table_starts[row]

        def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
            first = index * block
            start = rows.chunk_starts[row] + first
            offsets = first + jnp.arange(block)
            query = _by_kv_head(jax.lax.dynamic_slice_in_dim(padded, start, block), layer.num_kv_heads)
            positions = rows.prefix_lengths[row] + offsets

            def attend_tile(number: jax.Array, state: _Softmax) -> _Softmax:
                pages = jax.lax.dynamic_slice_in_dim(table[row], number * tile_pages, tile_pages)
                of_keys = table_start + number * tile + jnp.arange(tile)
                return _accumulate(state, query, layer, pages, scores, positions[:, None], of_keys)

            seen = rows.prefix_lengths[row] + jnp.minimum(first + block, length) - table_start
            first_tile = _first_tile(positions[0] - table_start, scores.window, tile)
            state = _nothing_seen(query, layer.value_dim, sinks)
            state = jax.lax.fori_loop(first_tile, -(-seen // tile), attend_tile, state)
            fresh = (state.mixed / state.total).transpose(2, 0, 1, 3).reshape(block, -1).astype(queries.dtype)
            stale = jax.lax.dynamic_slice_in_dim(out, start, block)  # the next row's, where this row's chunk has ended
            mine = (offsets < length)[:, None]
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, fresh, stale), start, axis=0)

        return jax.lax.fori_loop(0, -(-length // block), attend_block, out)

    out = jnp.zeros((num_tokens + block, num_heads * layer.value_dim), queries.dtype)
    return jax.lax.fori_loop(0, page_table.shape[0], attend_row, out)[:num_tokens]


def _first_tile(position: jax.Array, window: int | None, tile: int) -> jax.Array | int:
    """The tile of the first key that a query sees; position: counted from the table's first key."""
    return 0 if window is None else jnp.maximum(position - window + 1, 0) // tile


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """(heads, t) float32 -> weights of the t keys; with sinks they sum to less than one."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    with_sink = jnp.concatenate([scores, sinks.astype(jnp.float32)[:, None]], axis=-1)
    return jax.nn.softmax(with_sink, axis=-1)[:, :-1]


class _Softmax(NamedTuple):
    """A softmax-weighted sum, as far as keys were seen: (kv_heads, group, n, ...) float32."""

    greatest: jax.Array  # (..., 1), of the scores
    total: jax.Array  # (..., 1), of exp(score - greatest)
    mixed: jax.Array  # (..., value_dim), values weighted by exp(score - greatest)


def _nothing_seen(query: jax.Array, value_dim: int, sinks: jax.Array | None) -> _Softmax:
    column = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
    mixed = jnp.zeros((*query.shape[:-1], value_dim), jnp.float32)
    if sinks is None:
        return _Softmax(column + _MASKED, column, mixed)
    by_kv_head = sinks.astype(jnp.float32).reshape(*query.shape[:2], 1, 1)
    return _Softmax(column + by_kv_head, column + 1, mixed)  # a score seen already, whose value is zero


def _accumulate(
    state: _Softmax,
    query: jax.Array,
    layer: PageReader,
    pages: jax.Array,
    scores: Scores,
    of_queries: jax.Array,
    of_keys: jax.Array,
) -> _Softmax:
    """query: (kv_heads, group, n, head_dim); pages: of t tokens; of_queries (n, 1), of_keys (t,): positions."""
    num_kv_heads, group, num_queries, head_dim = query.shape
    keys, values = (
        tokens.astype(query.dtype).reshape(tokens.shape[0], num_kv_heads, -1).transpose(1, 0, 2)
        for tokens in layer.read(pages)
    )
    stacked = query.reshape(num_kv_heads, group * num_queries, head_dim)
    products = jnp.einsum("knd,ktd->knt", stacked, keys, preferred_element_type=jnp.float32)
    found = scores.of(products.reshape(num_kv_heads, group, num_queries, -1), of_queries, of_keys)
    greatest = jnp.maximum(state.greatest, found.max(axis=-1, keepdims=True))
    weights, kept = jnp.exp(found - greatest), jnp.exp(state.greatest - greatest)
    stacked = weights.reshape(num_kv_heads, group * num_queries, -1).astype(query.dtype)
    mixed = jnp.einsum("knt,ktd->knd", stacked, values, preferred_element_type=jnp.float32)
    mixed = state.mixed * kept + mixed.reshape(state.mixed.shape)
    return _Softmax(greatest, state.total * kept + weights.sum(axis=-1, keepdims=True), mixed)


def _by_kv_head(queries: jax.Array, num_kv_heads: int) -> jax.Array:
    """(n, heads, head_dim) -> (kv_heads, group, n, head_dim)."""
    num_queries, num_heads, head_dim = queries.shape
    return queries.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(1, 2, 0, 3)
