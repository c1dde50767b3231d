"""Attention over a flat pool in plain XLA, row by row, for shapes that the kernel does not serve."""

from __future__ import annotations

import jax

from app.core.ports import PoolSpec
from app.models.layers.attention import PageReader, Scores, decode_attention, extend_attention
from app.models.layers.flat_attention import Attend, FlatKV, write_layer
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces
from app.tpu.kv_pool import read_pages
from app.tpu.pool_layout import FlatWide, flat_rows


class GatherAttention:
    """A FlatAttention over FlatWide. Gathers whole page tables of one row at a time: memory of one row's context."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self.layout = FlatWide()

    def decode(self, rows: DecodeRows, places: TokenPlaces) -> Attend:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: FlatKV, scores: Scores) -> tuple[jax.Array, FlatKV]:
            kv = write_layer(kv, k, v, places, self._pages_a_layer)
            return decode_attention(q, self._reader(kv), rows, scores), kv

        return attend

    def extend(self, rows: ExtendRows, places: TokenPlaces, max_chunk: int) -> Attend:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: FlatKV, scores: Scores) -> tuple[jax.Array, FlatKV]:
            kv = write_layer(kv, k, v, places, self._pages_a_layer)
            return extend_attention(q, self._reader(kv), rows, max_chunk, scores), kv

        return attend

    def told_apart(self, max_chunk: int) -> int:
        return max_chunk

    @property
    def _pages_a_layer(self) -> int:
        return self._spec.num_pages + 1

    def _reader(self, kv: FlatKV) -> PageReader:
        head_dim = self._spec.head_dim
        num_kv_heads = kv.pool.shape[-1] // (2 * head_dim)

        def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = flat_rows(pages, kv.layer, self._pages_a_layer, kv.pool.shape[0])
            tokens = read_pages(kv.pool, rows).reshape(-1, num_kv_heads, 2, head_dim)
            width = (tokens.shape[0], num_kv_heads * head_dim)
            return tokens[:, :, 0].reshape(width), tokens[:, :, 1].reshape(width)

        return PageReader(read, self._spec.page_size, num_kv_heads, head_dim)
