"""JAX's ragged paged attention, a Pallas kernel for TPU, over a flat pool.

The kernel reads pages of `FlatByHead` where they lie: to it all layers' pages are one array, and a layer is an offset
of the page indices. Its contract, as this file keeps it: sequence i has the queries cu_q_lens[i] to cu_q_lens[i + 1],
which are the last ones of its kv_lens[i] tokens; only the first num_seqs sequences count, and none of them is empty;
query head h reads KV head h // (heads / kv_heads); rows that belong to no sequence come out as anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.core.ports import PoolSpec
from app.models.layers.attention import Scores
from app.models.layers.flat_attention import Attend, FlatKV, write_layer
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces
from app.tpu.pool_layout import FlatByHead, flat_rows

# One step of the kernel's inner loop reads this many tokens of KV, in at most so many pages, for so many queries: with
# the 16 KV heads of the widest head split that is 4 MiB of VMEM for the pages, twice, and less for the queries.
KV_TOKENS_A_STEP = 512
KV_PAGES_A_STEP = 16  # each page is a copy of its own and has its address in a scalar register, of which there are 32
QUERIES_A_STEP = 32

Kernel = Callable[..., jax.Array]
"""As jax.experimental.pallas.ops.tpu.ragged_paged_attention.ragged_paged_attention."""


class RaggedRows(NamedTuple):
    """The sequences of one call, as the kernel wants them; page indices are of layer 0."""

    kv_lens: jax.Array  # (S,) int32
    pages: jax.Array  # (S, max_pages) int32
    cu_q_lens: jax.Array  # (S + 1,) int32
    num_seqs: jax.Array  # (1,) int32


def ragged_decode(rows: DecodeRows) -> RaggedRows:
    """Every row is a sequence with one query. A padding row reads one token, of the padding page or another's."""
    count = rows.lengths.size
    return RaggedRows(
        kv_lens=jnp.maximum(rows.lengths, 1),
        pages=rows.page_table,
        cu_q_lens=jnp.arange(count + 1, dtype=jnp.int32),
        num_seqs=jnp.full((1,), count, jnp.int32),
    )


def ragged_extend(rows: ExtendRows) -> RaggedRows:
    """Padding rows come last, as the dispatcher packs them: they are beyond num_seqs."""
    ends = jnp.cumsum(rows.chunk_lengths, dtype=jnp.int32)
    return RaggedRows(
        kv_lens=rows.prefix_lengths + rows.chunk_lengths,
        pages=rows.page_table,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        num_seqs=(rows.chunk_lengths > 0).sum(dtype=jnp.int32).reshape(1),
    )


class RaggedAttention:
    """A FlatAttention over FlatByHead. The pool may store more heads and longer ones than there are: zeros."""

    def __init__(self, spec: PoolSpec, num_ranks: int, kernel: Kernel) -> None:
        self._spec = spec
        self._kernel = kernel
        self._extra_heads = spec.extra_kv_heads // num_ranks
        self.layout = FlatByHead()

    def decode(self, rows: DecodeRows, places: TokenPlaces) -> Attend:
        return self._attend(ragged_decode(rows), places)

    def extend(self, rows: ExtendRows, places: TokenPlaces, max_chunk: int) -> Attend:
        return self._attend(ragged_extend(rows), places)

    def told_apart(self, max_chunk: int) -> int:
        return 1  # the kernel takes the same number of queries at a time whatever the chunks

    def _attend(self, rows: RaggedRows, places: TokenPlaces) -> Attend:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: FlatKV, scores: Scores) -> tuple[jax.Array, FlatKV]:
            kv = write_layer(kv, self._padded(k), self._padded(v), places, self._pages_a_layer)
            return self._run(q, k.shape[1], kv, rows, places.valid, scores), kv

        return attend

    @property
    def _pages_a_layer(self) -> int:
        return self._spec.num_pages + 1

    def _run(
        self, q: jax.Array, num_kv_heads: int, kv: FlatKV, rows: RaggedRows, valid: jax.Array, scores: Scores
    ) -> jax.Array:
        num_tokens, num_heads, head_dim = q.shape
        by_kv_head = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        padded = self._padded(by_kv_head)
        stored_dim = padded.shape[-1]
        attended = self._kernel(
            padded.reshape(num_tokens, -1, stored_dim),
            kv.pool,
            rows.kv_lens,
            flat_rows(rows.pages, kv.layer, self._pages_a_layer, kv.pool.shape[0]),
            rows.cu_q_lens,
            rows.num_seqs,
            sm_scale=scores.scale,
            soft_cap=scores.soft_cap,
            num_kv_pages_per_block=self._pages_a_step(rows.pages.shape[1]),
            num_queries_per_block=min(QUERIES_A_STEP, num_tokens),
        )
        kept = attended.reshape(padded.shape)[:, :num_kv_heads, :, :head_dim].reshape(num_tokens, -1)
        return jnp.where(valid[:, None], kept, 0)

    def _pages_a_step(self, max_pages: int) -> int:
        return max(1, min(KV_TOKENS_A_STEP // self._spec.page_size, KV_PAGES_A_STEP, max_pages))

    def _padded(self, heads: jax.Array) -> jax.Array:
        """(T, kv_heads, ..., head_dim) -> as many KV heads, as long, as the pool stores."""
        unpadded = ((0, 0),) * (heads.ndim - 3)
        return jnp.pad(heads, ((0, 0), (0, self._extra_heads), *unpadded, (0, self._spec.extra_head_dim)))
