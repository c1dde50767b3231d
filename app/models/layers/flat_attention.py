"""What an attention over a flat pool is to the model runner that loops over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from app.models.layers.attention import Scores
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces
from app.tpu.kv_pool import write_tokens
from app.tpu.pool_layout import PoolLayout, flat_rows


class FlatKV(NamedTuple):
    """The pool and which layer of it is meant; the pool is carried through the loop and written in place."""

    pool: jax.Array  # this rank's share of FlatKVBuffers.pages
    layer: jax.Array  # () int32


Attend = Callable[[jax.Array, jax.Array, jax.Array, FlatKV, Scores], tuple[jax.Array, FlatKV]]
"""T tokens' unscaled queries (T, heads, head_dim), keys and values (T, kv_heads, head_dim): stores these and attends.

-> (T, heads * head_dim), the pool with the tokens in it.
"""


class FlatAttention(Protocol):
    @property
    def layout(self) -> PoolLayout:
        """Of the pool that it serves."""
        ...

    def decode(self, rows: DecodeRows, places: TokenPlaces) -> Attend:
        """For one program: called on one rank's share."""
        ...

    def extend(self, rows: ExtendRows, places: TokenPlaces, max_chunk: int) -> Attend:
        """For one program: called on one rank's share."""
        ...

    def told_apart(self, max_chunk: int) -> int:
        """What `extend` makes of it: where this is the same, so is the program."""
        ...


def write_layer(kv: FlatKV, k: jax.Array, v: jax.Array, places: TokenPlaces, pages_a_layer: int) -> FlatKV:
    """Store T tokens' keys and values, (T, kv_heads, head_dim) as stored, in this layer's pages."""
    rows = flat_rows(places.pages, kv.layer, pages_a_layer, kv.pool.shape[0])
    tokens = jnp.stack([k, v], axis=2).reshape(k.shape[0], *kv.pool.shape[2:])
    return kv._replace(pool=write_tokens(kv.pool, rows, places.offsets, tokens))
