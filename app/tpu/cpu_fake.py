"""Fakes of the device side for tests and dry runs on CPU: small, fast, and unforgiving.

`FakeDevicePool` makes misuse of lent arrays visible on every backend. `FakeModelRunner` is a model whose every output
depends on the contents of every page that it reads, so that one wrong page, position or stale slot changes the text.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.config.model_config import Component, ModelConfig, StateArray
from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec
from app.tpu.kv_pool import MHATokenToKVPool, locate
from app.tpu.lent_arrays import LentArrays
from app.tpu.mesh import make_mesh
from app.tpu.pool_layout import KVBuffers

POISON = 12289  # exact in every stored type; finite, because a masked NaN would still spread
LOGIT_SCALE = 16.0  # logits lie in [0, 16)


def fake_model_config(
    *, vocab_size: int = 257, context_length: int = 2048, window: int | None = None, recurrent: bool = False
) -> ModelConfig:
    """The smallest model there is: its pool has one layer of one head with one element, two numbers a token.

    window: of a second layer, over as little; recurrent: whether a third keeps a state.
    """
    components = {Component.FULL}
    if window is not None:
        components.add(Component.SWA)
    if recurrent:
        components.add(Component.RECURRENT)
    kinds = tuple(frozenset({component}) for component in Component if component in components)
    return ModelConfig(
        architecture="fake",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_layers=len(kinds),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        context_length=context_length,
        sliding_window=window,
        components=frozenset(components),
        layer_components=kinds,
        recurrent_state=(StateArray(shape=(3,)),) if recurrent else (),
    )


class DonationEnforced(LentArrays):
    """Arrays that `take` lent are dead once `put` replaced them, on every backend."""

    _lent: Any = None

    def take(self) -> Any:
        self._lent = super().take()
        return self._lent

    def put(self, buffers: Any) -> None:
        super().put(buffers)
        kept = {id(array) for array in jax.tree.leaves(buffers)}
        for array in jax.tree.leaves(self._lent):
            if id(array) not in kept and not array.is_deleted():
                array.delete()
        self._lent = None

    def reset(self) -> None:
        self._lent = None
        super().reset()


class FakeDevicePool(DonationEnforced, MHATokenToKVPool):
    """The real pool, with donation enforced."""

    def __init__(self, spec: PoolSpec, mesh: Mesh | None = None) -> None:
        super().__init__(spec, mesh or make_mesh(1, "cpu"))

    def poison(self, pages: np.ndarray) -> None:
        """Fill pages, (n,) int32, with POISON: whoever reads them before writing them shows it."""
        self.put(poisoned(self.take(), pages))


@jax.jit
def poisoned(arrays: Any, index: np.ndarray) -> Any:
    """The pytree with POISON at `index`, (n,) int32, of each array's first axis."""
    return jax.tree.map(lambda array: array.at[index].set(POISON), arrays)


class FakeModelRunner:
    """A ModelRunner whose logits are a hash of what it reads from the pool.

    Position i of a row stores c[i] = c[i - 1] + mix(token[i], i), modulo 2**32: c[i] stands for the whole prefix up to
    i. A step reads c[start - 1] through the page table, writes the chunk's, then reads all positions back; logits are a
    hash of sum(mix(c[i], i)). The lower half of c lies in the first layer's keys, the upper in the last layer's values
    (16 bits are exact in float32 and uint16 pools), so both must survive a copy for the text to.

    Needs no weights. Works on any pool of those two types; other arrays are handed through untouched.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def load(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to drop."""

    def decode(self, buffers: KVBuffers, inputs: DecodeInputs) -> tuple[KVBuffers, jax.Array]:
        return self.extend(buffers, decode_as_extend(inputs))

    def extend(self, buffers: KVBuffers, inputs: ExtendInputs) -> tuple[KVBuffers, jax.Array]:
        low, high, logits = _hash_step(
            buffers.keys[0],
            buffers.values[-1],
            inputs.token_ids,
            inputs.chunk_starts,
            inputs.chunk_lengths,
            inputs.prefix_lengths,
            inputs.page_table,
            vocab_size=self._vocab_size,
        )
        buffers = KVBuffers(keys=(low, *buffers.keys[1:]), values=(*buffers.values[:-1], high))
        return buffers, logits


@jax.jit
def _decode_rows(lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.arange(lengths.size), (lengths > 0).astype(jnp.int32), jnp.maximum(lengths - 1, 0)


def decode_as_extend(inputs: DecodeInputs) -> ExtendInputs:
    """A decode step is an extend step with chunks of one token."""
    starts, lengths, prefixes = _decode_rows(inputs.lengths)
    return ExtendInputs(
        token_ids=inputs.token_ids,
        chunk_starts=starts,
        chunk_lengths=lengths,
        prefix_lengths=prefixes,
        page_table=inputs.page_table,
        max_chunk=1,
        window=inputs.window,
        state_slots=inputs.state_slots,
    )


@partial(jax.jit, donate_argnums=(0, 1), static_argnames="vocab_size")
def _hash_step(
    low: jax.Array,
    high: jax.Array,
    token_ids: jax.Array,
    chunk_starts: jax.Array,
    chunk_lengths: jax.Array,
    prefix_lengths: jax.Array,
    page_table: jax.Array,
    *,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write before reading: the prefix's last content is carried in by position, not gathered from the old array."""
    chunk = place_chunk(token_ids, chunk_starts, chunk_lengths, prefix_lengths)
    last = jnp.maximum(prefix_lengths - 1, 0)
    before = read_contents(low, high, page_table, jnp.arange(chunk_starts.size)[:, None], last[:, None])[:, 0]
    contents = chunk.extend(jnp.where(prefix_lengths > 0, before, 0))
    low, high = write_contents(low, high, *locate(page_table, chunk.rows, chunk.positions, chunk.valid, low), contents)
    everywhere = jnp.arange(page_table.shape[1] * low.shape[1])
    read = read_contents(low, high, page_table, jnp.arange(chunk_starts.size)[:, None], everywhere[None, :])
    lengths = jnp.where(chunk_lengths > 0, prefix_lengths + chunk_lengths, 0)
    state = jnp.where(everywhere < lengths[:, None], mix(read, everywhere), 0).sum(axis=1, dtype=jnp.uint32)
    return low, high, hash_logits(state, vocab_size)


class PlacedChunk(NamedTuple):
    """The packed tokens of a step, (T,) each: whose they are and where they stand in their row."""

    starts: jax.Array  # (S,) int32, of each row's chunk
    valid: jax.Array  # bool
    rows: jax.Array
    positions: jax.Array
    steps: jax.Array  # uint32, what each token adds to its row's content

    def extend(self, before: jax.Array) -> jax.Array:
        """(S,) uint32, each row's content so far -> (T,) uint32: its content after each token of the chunk."""
        running = jnp.cumsum(self.steps) - self.steps  # a sum that starts anew with each row
        return (before - running[self.starts])[self.rows] + running + self.steps


def place_chunk(
    token_ids: jax.Array, chunk_starts: jax.Array, chunk_lengths: jax.Array, prefix_lengths: jax.Array
) -> PlacedChunk:
    index = jnp.arange(token_ids.size)
    inside = (index >= chunk_starts[:, None]) & (index < (chunk_starts + chunk_lengths)[:, None])  # (S, T)
    valid, rows = inside.any(axis=0), inside.argmax(axis=0)
    positions = prefix_lengths[rows] + index - chunk_starts[rows]
    return PlacedChunk(chunk_starts, valid, rows, positions, jnp.where(valid, mix(token_ids, positions), 0))


def write_contents(
    low: jax.Array, high: jax.Array, pages: jax.Array, offsets: jax.Array, contents: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Store (T,) uint32: the lower half in one array, the upper in the other."""
    low = low.at[pages, offsets].set(_halved(contents & 0xFFFF, low), mode="drop")
    return low, high.at[pages, offsets].set(_halved(contents >> 16, high), mode="drop")


def read_contents(
    low: jax.Array, high: jax.Array, page_table: jax.Array, rows: jax.Array, positions: jax.Array
) -> jax.Array:
    """uint32 contents at these positions of these rows; the two are broadcast against one another."""
    pages, offsets = page_table[rows, positions // low.shape[1]], positions % low.shape[1]
    return low[pages, offsets, 0].astype(jnp.uint32) | (high[pages, offsets, 0].astype(jnp.uint32) << 16)


def hash_logits(state: jax.Array, vocab_size: int) -> jax.Array:
    """(S,) uint32 -> (S, vocab_size) float32 in [0, LOGIT_SCALE)."""
    bits = mix(state[:, None], jnp.arange(vocab_size)) >> 8
    return bits.astype(jnp.float32) * (LOGIT_SCALE / 2**24)


def mix(value: jax.Array, position: jax.Array) -> jax.Array:
    """A uint32 in which every bit of both hangs together: MurmurHash3's finaliser."""
    mixed = value.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def _halved(half: jax.Array, buffer: jax.Array) -> jax.Array:
    return jnp.broadcast_to(half.astype(buffer.dtype)[:, None], (half.size, buffer.shape[-1]))
