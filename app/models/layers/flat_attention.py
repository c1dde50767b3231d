"""What an attention over a flat pool is to the model runner that loops over layers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from app.models.llama import Attend
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces
from app.tpu.kv_pool import write_tokens
from app.tpu.pool_layout import PoolLayout, flat_rows


class FlatKV(NamedTuple):
    """The pool and which layer of it is meant; the pool is carried through the loop and written in place."""

    pool: jax.Array  # this rank's share of FlatKVBuffers.pages
    layer: jax.Array  # () int32


class FlatAttention(Protocol):
    @property
    def layout(self) -> PoolLayout:
        """Of the pool that it serves."""
        ...

    def decode(self, rows: DecodeRows, places: TokenPlaces) -> Attend[FlatKV]:
        """For one program: called on one rank's share."""
        ...

    def extend(self, rows: ExtendRows, places: TokenPlaces, max_chunk: int) -> Attend[FlatKV]:
        """For one program: called on one rank's share."""
        ...


def write_layer(kv: FlatKV, k: jax.Array, v: jax.Array, places: TokenPlaces, pages_a_layer: int) -> FlatKV:
    """Store T tokens' keys and values, (T, kv_heads, head_dim) as stored, in this layer's pages."""
    rows = flat_rows(places.pages, kv.layer, pages_a_layer, kv.pool.shape[0])
    tokens = jnp.stack([k, v], axis=2).reshape(k.shape[0], *kv.pool.shape[2:])
    return kv._replace(pool=write_tokens(kv.pool, rows, places.offsets, tokens))
