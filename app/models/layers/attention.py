"""Attention over the paged pool, on one rank's heads. Keys of the new tokens are in the pool before these run.

Rows go one after another in a loop, not all at once: one row's gathered keys stay in the CPU's cache, and the batched
gather was five times slower at 2048 tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from app.tpu.kv_pool import read_pages

QUERY_BLOCK = 128  # queries whose scores exist at one time: heads * 128 * context * 4 bytes
_MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


def decode_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """One query a row over the row's `lengths` tokens.

    queries: (B, heads, head_dim), scaled; keys, values: one layer's pool arrays; page_table: (B, max_pages) int32;
    lengths: (B,) int32. -> (B, heads * head_dim). Cost: O(B * max_pages * page_size), whatever the lengths.
    """
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads = keys.shape[-1] // head_dim
    # Each query is laid out over the width of all KV heads, zero outside its own: two plain matrix products then serve
    # all heads without rearranging the gathered pages.
    own = jnp.repeat(jnp.eye(num_kv_heads, dtype=queries.dtype), num_heads // num_kv_heads, axis=0)[:, :, None]

    def attend(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, pages, length = row
        row_keys = read_pages(keys, pages).astype(query.dtype)
        row_values = read_pages(values, pages).astype(query.dtype)
        spread = (query[:, None, :] * own).reshape(num_heads, -1)
        scores = jnp.matmul(spread, row_keys.T, preferred_element_type=jnp.float32)
        visible = jnp.arange(scores.shape[-1]) < length
        weights = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1).astype(query.dtype)
        mixed = jnp.matmul(weights, row_values).reshape(num_heads, num_kv_heads, head_dim)
        return (mixed * own).sum(axis=1).reshape(-1)

    return jax.lax.map(attend, (queries, page_table, lengths))


def extend_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    chunk_starts: jax.Array,
    chunk_lengths: jax.Array,
    prefix_lengths: jax.Array,
    max_chunk: int,
) -> jax.Array:
    """Causal attention of packed chunks: query i of a row sees the row's positions up to prefix_lengths + i.

    queries: (T, heads, head_dim), scaled; page_table: (S, max_pages) int32; the rest as in ExtendInputs.
    -> (T, heads * head_dim); zeros where no row's token lies. Loops over rows and QUERY_BLOCK queries at a time.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[-1] // head_dim
    block = min(max_chunk, QUERY_BLOCK)
    padded = jnp.pad(queries, ((0, block), (0, 0), (0, 0)))  # a slice of `block` tokens fits from every token on
    context = jnp.arange(page_table.shape[1] * keys.shape[1])

    def by_head(buffer: jax.Array, row: jax.Array) -> jax.Array:
        read = read_pages(buffer, page_table[row]).astype(queries.dtype)
        return read.reshape(-1, num_kv_heads, head_dim).transpose(1, 0, 2)

    def attend_row(row: jax.Array, out: jax.Array) -> jax.Array:
        row_keys, row_values = by_head(keys, row), by_head(values, row)

        def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
            first = index * block
            start = chunk_starts[row] + first
            offsets = first + jnp.arange(block)
            visible = context <= (prefix_lengths[row] + offsets)[:, None]
            fresh = _grouped(jax.lax.dynamic_slice_in_dim(padded, start, block), row_keys, row_values, visible)
            stale = jax.lax.dynamic_slice_in_dim(out, start, block)  # the next row's, where this row's chunk has ended
            mine = (offsets < chunk_lengths[row])[:, None]
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, fresh, stale), start, axis=0)

        return jax.lax.fori_loop(0, -(-chunk_lengths[row] // block), attend_block, out)

    out = jnp.zeros((num_tokens + block, num_heads * head_dim), queries.dtype)
    return jax.lax.fori_loop(0, page_table.shape[0], attend_row, out)[:num_tokens]


def _grouped(queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """(n, heads, head_dim) queries, (kv_heads, context, head_dim) keys and values, (n, context) -> (n, width)."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_context, _ = keys.shape
    group = num_heads // num_kv_heads
    grouped = queries.reshape(num_queries, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    grouped = grouped.reshape(num_kv_heads, group * num_queries, head_dim)
    scores = jnp.einsum("knd,ktd->knt", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(num_kv_heads, group, num_queries, num_context)
    weights = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1).astype(queries.dtype)
    mixed = jnp.einsum("knt,ktd->knd", weights.reshape(num_kv_heads, group * num_queries, num_context), values)
    mixed = mixed.reshape(num_kv_heads, group, num_queries, head_dim).transpose(2, 0, 1, 3)
    return mixed.reshape(num_queries, num_heads * head_dim)
