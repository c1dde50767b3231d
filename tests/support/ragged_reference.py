"""What ragged paged attention is documented to compute, densely and slowly, with plain jax.numpy.

Rows that belong to no sequence come out as NaN, so that a caller who uses them shows it; the kernel leaves them as they
were in memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def ragged_reference(
    queries: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    **block_sizes: Any,
) -> jax.Array:
    """queries (T, heads, dim); kv_pages (pages, page_size, 2 * kv_heads, dim), each head's key before its value."""
    check_block_sizes(queries, page_indices, **block_sizes)
    num_tokens, num_heads, dim = queries.shape
    num_kv_heads = kv_pages.shape[2] // 2
    token = jnp.arange(num_tokens)
    counts = jnp.arange(kv_lens.size) < num_seqs[0]
    owns = (token >= cu_q_lens[:-1, None]) & (token < cu_q_lens[1:, None]) & counts[:, None]  # (S, T)
    sequence, owned = owns.argmax(axis=0), owns.any(axis=0)

    kv = kv_pages[page_indices[sequence]].reshape(num_tokens, -1, num_kv_heads, 2, dim).astype(jnp.float32)
    by_kv_head = queries.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, dim).astype(jnp.float32)
    scores = jnp.einsum("tkgd,tckd->tkgc", by_kv_head, kv[:, :, :, 0]) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # A query is so many tokens before the end of its sequence as there are queries of the sequence behind it.
    position = kv_lens[sequence] - (cu_q_lens[1:][sequence] - token)
    visible = jnp.arange(kv.shape[1]) <= position[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("tkgc,tckd->tkgd", weights, kv[:, :, :, 1]).reshape(queries.shape)
    return jnp.where(owned[:, None, None], mixed, jnp.nan).astype(queries.dtype)


def check_block_sizes(
    queries: jax.Array, page_indices: jax.Array, *, num_kv_pages_per_block: int, num_queries_per_block: int
) -> None:
    assert 0 < num_kv_pages_per_block <= page_indices.shape[1]
    assert 0 < num_queries_per_block <= queries.shape[0]
