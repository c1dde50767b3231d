"""A step's rows, and where their tokens stand: the same for every driver and every attention."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.tpu.kv_pool import locate


class DecodeRows(NamedTuple):
    """One token for each of B rows; as in DecodeInputs."""

    lengths: jax.Array  # (B,) int32
    page_table: jax.Array  # (B, max_pages) int32


class ExtendRows(NamedTuple):
    """A chunk for each of S rows; as in ExtendInputs."""

    chunk_starts: jax.Array  # (S,) int32
    chunk_lengths: jax.Array  # (S,) int32
    prefix_lengths: jax.Array  # (S,) int32
    page_table: jax.Array  # (S, max_pages) int32


class TokenPlaces(NamedTuple):
    """Where T tokens stand in their rows and in the pool, (T,) each. Padding has a page beyond the pool."""

    positions: jax.Array  # int32
    pages: jax.Array  # int32
    offsets: jax.Array  # int32, within the page
    valid: jax.Array  # bool, False for padding


def decode_places(rows: DecodeRows, buffer: jax.Array) -> TokenPlaces:
    """`buffer`: any array of the pool."""
    positions, valid = rows.lengths - 1, rows.lengths > 0
    pages, offsets = locate(rows.page_table, jnp.arange(rows.lengths.size), positions, valid, buffer)
    return TokenPlaces(positions, pages, offsets, valid)


def extend_places(rows: ExtendRows, num_tokens: int, buffer: jax.Array) -> TokenPlaces:
    """`buffer`: any array of the pool."""
    index = jnp.arange(num_tokens)
    ends = rows.chunk_starts + rows.chunk_lengths
    inside = (index >= rows.chunk_starts[:, None]) & (index < ends[:, None])  # (S, T)
    valid, row_of = inside.any(axis=0), inside.argmax(axis=0)
    positions = rows.prefix_lengths[row_of] + index - rows.chunk_starts[row_of]
    pages, offsets = locate(rows.page_table, row_of, positions, valid, buffer)
    return TokenPlaces(positions, pages, offsets, valid)


def last_tokens(rows: ExtendRows) -> jax.Array:
    """(S,) int32: index of each row's last token among the packed ones."""
    return jnp.maximum(rows.chunk_starts + rows.chunk_lengths - 1, 0)
