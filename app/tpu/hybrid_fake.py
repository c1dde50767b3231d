"""The fake of a model with sliding windows and recurrent states, and of its pool.

It answers as FakeModelRunner does as long as everything that it reads is right, so that one cold twin serves every kind
of model: what window pages and states hold is compared with what the full pages say, and any difference is added to
the hash.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec
from app.tpu.cpu_fake import (
    DonationEnforced,
    PlacedChunk,
    decode_as_extend,
    hash_logits,
    mix,
    place_chunk,
    poisoned,
    read_contents,
    write_contents,
)
from app.tpu.hybrid_buffers import HybridBuffers, LayerStates
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.hybrid_pool import HybridKVPool
from app.tpu.kv_pool import locate
from app.tpu.mesh import make_mesh
from app.tpu.pool_layout import KVBuffers


class FakeHybridPool(DonationEnforced, HybridKVPool):
    """The real pool, with donation enforced."""

    def __init__(self, spec: PoolSpec, hybrid_spec: HybridSpec, mesh: Mesh | None = None) -> None:
        super().__init__(spec, hybrid_spec, mesh or make_mesh(1, "cpu"))

    def poison(self, pages: np.ndarray) -> None:
        """Fill full pages, (n,) int32, with POISON: whoever reads them before writing them shows it."""
        buffers: HybridBuffers = self.take()
        self.put(buffers._replace(full=poisoned(buffers.full, pages)))

    def poison_window(self, pages: np.ndarray) -> None:
        """The same for window pages."""
        buffers: HybridBuffers = self.take()
        self.put(buffers._replace(window=poisoned(buffers.window, pages)))

    def poison_states(self, slots: np.ndarray) -> None:
        """The same for slots of states."""
        buffers: HybridBuffers = self.take()
        self.put(buffers._replace(states=poisoned(buffers.states, slots)))


class HybridFakeRunner:
    """A ModelRunner for FakeHybridPool, of `fake_model_config(window=..., recurrent=...)`.

    Window pages hold the content after each token, as full pages do; each query reads those of its window. A state
    holds the content after its last token, in two halves, and how many tokens it has seen; it is carried on from what
    it was, so that a wrong one stays wrong.
    """

    def __init__(self, vocab_size: int, window: int | None) -> None:
        self._vocab_size = vocab_size
        self._window = window

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def load(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to drop."""

    def decode(self, buffers: HybridBuffers, inputs: DecodeInputs) -> tuple[HybridBuffers, jax.Array]:
        return self.extend(buffers, decode_as_extend(inputs))

    def extend(self, buffers: HybridBuffers, inputs: ExtendInputs) -> tuple[HybridBuffers, jax.Array]:
        rows = (inputs.chunk_starts, inputs.chunk_lengths, inputs.prefix_lengths, inputs.page_table)
        window = () if inputs.window is None else (inputs.window.page_table, inputs.window.first_pages)
        states = () if inputs.state_slots is None else (inputs.state_slots,)
        return _hash_step(
            buffers, inputs.token_ids, rows, window, states, window=self._window, vocab_size=self._vocab_size
        )


@partial(jax.jit, donate_argnums=0, static_argnames=("window", "vocab_size"))
def _hash_step(
    buffers: HybridBuffers,
    token_ids: jax.Array,
    extends: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    window_pages: tuple[jax.Array, ...],  # page table and first pages, or nothing
    state_slots: tuple[jax.Array, ...],  # one array, or nothing
    *,
    window: int | None,
    vocab_size: int,
) -> tuple[HybridBuffers, jax.Array]:
    starts, lengths, prefixes, page_table = extends
    chunk = place_chunk(token_ids, starts, lengths, prefixes)
    rows = jnp.arange(starts.size)[:, None]
    low, high = buffers.full.keys[0], buffers.full.values[0]
    before = read_contents(low, high, page_table, rows, jnp.maximum(prefixes - 1, 0)[:, None])[:, 0]
    before = jnp.where(prefixes > 0, before, 0)
    contents = chunk.extend(before)
    low, high = write_contents(low, high, *locate(page_table, chunk.rows, chunk.positions, chunk.valid, low), contents)

    ends = jnp.where(lengths > 0, prefixes + lengths, 0)
    everywhere = jnp.arange(page_table.shape[1] * low.shape[1])[None, :]
    read = read_contents(low, high, page_table, rows, everywhere)
    total = jnp.where(everywhere < ends[:, None], mix(read, everywhere), 0).sum(axis=1, dtype=jnp.uint32)

    window_buffers, states = buffers.window, buffers.states
    if window is not None:
        window_buffers, stored, positions = _window(window_buffers, chunk, contents, *window_pages)
        # Everything that any query of the chunk sees.
        seen = (positions > prefixes[:, None] - window) & (positions < ends[:, None])
        wanted = read_contents(low, high, page_table, rows, jnp.minimum(positions, everywhere.size - 1))
        total += _difference(jnp.where(seen, stored, 0), jnp.where(seen, wanted, 0), positions)
    for slots in state_slots:
        grown = jnp.where(lengths > 0, contents[jnp.maximum(starts + lengths - 1, 0)] - before, 0)
        states, old = _carried(states, slots, grown, lengths)
        seen = jnp.where(lengths > 0, old, 0)
        total += _difference(seen, jnp.where(lengths > 0, before + mix(prefixes, jnp.int32(1)), 0), rows[:, 0])
    return HybridBuffers(KVBuffers((low,), (high,)), window_buffers, states), hash_logits(total, vocab_size)


def _window(
    buffers: KVBuffers, chunk: PlacedChunk, contents: jax.Array, table: jax.Array, first_pages: jax.Array
) -> tuple[KVBuffers, jax.Array, jax.Array]:
    """-> the written arrays; what they hold at each position that the table covers, and the positions, (S, n)."""
    low, high = buffers.keys[0], buffers.values[0]
    firsts = first_pages * low.shape[1]
    local = chunk.positions - firsts[chunk.rows]
    low, high = write_contents(low, high, *locate(table, chunk.rows, local, chunk.valid, low), contents)
    offsets = jnp.arange(table.shape[1] * low.shape[1])[None, :]
    stored = read_contents(low, high, table, jnp.arange(table.shape[0])[:, None], offsets)
    return KVBuffers((low,), (high,)), stored, firsts[:, None] + offsets


def _carried(
    states: tuple[LayerStates, ...], slots: jax.Array, grown: jax.Array, lengths: jax.Array
) -> tuple[tuple[LayerStates, ...], jax.Array]:
    """-> the states after the step, and a hash of what each row's was before, (S,) uint32."""
    (held,) = states[0]
    old = held[slots].astype(jnp.uint32)
    content = (old[:, 0] | (old[:, 1] << 16)) + grown
    count = old[:, 2] + lengths.astype(jnp.uint32)
    new = jnp.stack([content & 0xFFFF, content >> 16, count], axis=1).astype(held.dtype)
    return ((held.at[slots].set(new, mode="drop"),),), content - grown + mix(old[:, 2], jnp.int32(1))


def _difference(stored: jax.Array, wanted: jax.Array, positions: jax.Array) -> jax.Array:
    """uint32 (S,) or (S, n) each -> (S,): 0 where both are equal."""
    difference = mix(stored, positions) - mix(wanted, positions)
    return difference.reshape(difference.shape[0], -1).sum(axis=1, dtype=jnp.uint32)
