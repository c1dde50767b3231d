"""A step's rows, and where their tokens stand: the same for every driver and every attention."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.core.ports import WindowPages
from app.tpu.kv_pool import locate


class WindowTable(NamedTuple):
    """WindowPages, for use inside a program."""

    page_table: jax.Array  # (B, width) int32
    first_pages: jax.Array  # (B,) int32


def window_table(window: WindowPages | None) -> WindowTable | None:
    return None if window is None else WindowTable(window.page_table, window.first_pages)


class DecodeRows(NamedTuple):
    """One token for each of B rows; as in DecodeInputs. Column c of the table holds page index first_pages + c."""

    lengths: jax.Array  # (B,) int32
    page_table: jax.Array  # (B, max_pages) int32
    first_pages: jax.Array | int = 0  # (B,) int32, or 0 for all

    def through(self, window: WindowTable) -> DecodeRows:
        """The same rows as sliding-window layers see them."""
        return self._replace(**window._asdict())


class ExtendRows(NamedTuple):
    """A chunk for each of S rows; as in ExtendInputs. Column c of the table holds page index first_pages + c."""

    chunk_starts: jax.Array  # (S,) int32
    chunk_lengths: jax.Array  # (S,) int32
    prefix_lengths: jax.Array  # (S,) int32
    page_table: jax.Array  # (S, max_pages) int32
    first_pages: jax.Array | int = 0  # (S,) int32, or 0 for all

    def through(self, window: WindowTable) -> ExtendRows:
        """The same rows as sliding-window layers see them."""
        return self._replace(**window._asdict())


class StepTokens(NamedTuple):
    """Where T tokens stand in their rows, (T,) each."""

    positions: jax.Array  # int32
    rows: jax.Array  # int32
    valid: jax.Array  # bool, False for padding


class TokenPlaces(NamedTuple):
    """Where T tokens stand in their rows and in the pool, (T,) each. Padding has a page beyond the pool."""

    positions: jax.Array  # int32
    pages: jax.Array  # int32
    offsets: jax.Array  # int32, within the page
    valid: jax.Array  # bool, False for padding


def decode_tokens(rows: DecodeRows) -> StepTokens:
    return StepTokens(rows.lengths - 1, jnp.arange(rows.lengths.size), rows.lengths > 0)


def extend_tokens(rows: ExtendRows, num_tokens: int) -> StepTokens:
    index = jnp.arange(num_tokens)
    ends = rows.chunk_starts + rows.chunk_lengths
    inside = (index >= rows.chunk_starts[:, None]) & (index < ends[:, None])  # (S, T)
    row_of = inside.argmax(axis=0)
    positions = rows.prefix_lengths[row_of] + index - rows.chunk_starts[row_of]
    return StepTokens(positions, row_of, inside.any(axis=0))


def places(tokens: StepTokens, rows: DecodeRows | ExtendRows, buffer: jax.Array) -> TokenPlaces:
    """`buffer`: any array of the pool that the rows' table is of."""
    page_size = buffer.shape[1]
    first = jnp.broadcast_to(rows.first_pages, rows.page_table.shape[:1])[tokens.rows]
    from_first = tokens.positions - first * page_size
    pages, offsets = locate(rows.page_table, tokens.rows, from_first, tokens.valid, buffer)
    return TokenPlaces(tokens.positions, pages, offsets, tokens.valid)


def decode_places(rows: DecodeRows, buffer: jax.Array) -> TokenPlaces:
    """`buffer`: any array of the pool."""
    return places(decode_tokens(rows), rows, buffer)


def extend_places(rows: ExtendRows, num_tokens: int, buffer: jax.Array) -> TokenPlaces:
    """`buffer`: any array of the pool."""
    return places(extend_tokens(rows, num_tokens), rows, buffer)


def last_tokens(rows: ExtendRows) -> jax.Array:
    """(S,) int32: index of each row's last token among the packed ones."""
    return jnp.maximum(rows.chunk_starts + rows.chunk_lengths - 1, 0)
