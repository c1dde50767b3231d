"""What recurrent layers share: a walk over packed chunks of rows, causal convolutions, and decays.

A recurrent layer keeps a state for each row, arrays of float32, which is valid for exactly the tokens that it has seen.
It is the same, up to rounding, in whatever chunks these came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from app.models.steps import ExtendRows

BLOCK = 64  # tokens of a row that are computed at once, a power of two; measured on CPU: 32 to 128 are about as quick

# Of what decays are made of. exp(x) makes a relative error out of the absolute one of x, and every token adds its own.
DECAY_DTYPE = "float32"

Inputs = TypeVar("Inputs")
States = tuple[jax.Array, ...]

ROUNDING = jax.lax.Precision.HIGHEST  # products with states are of float32 on TPUs too, where else they are of bfloat16

BlockStep = Callable[[Inputs, jax.Array, States], tuple[jax.Array, States]]
"""Inputs of a block, (n, ...) each and zero for padding; how many of them are tokens, () int32; the row's states
-> (n, width) float32, the states after these tokens."""


def over_rows(
    step: BlockStep[Inputs], inputs: Inputs, states: States, rows: ExtendRows, max_chunk: int, width: int
) -> tuple[jax.Array, States]:
    """Run every row's chunk from the row's state, a block at a time.

    inputs: arrays of T packed tokens, (T, ...) each; states: (S, ...) each; rows, max_chunk: as in ExtendInputs.
    -> (T, width) float32, zero where no row's token lies; the states after each chunk, as they were for empty ones.
    Cost: that of the tokens there are, each chunk rounded up to blocks, one block after another.
    """
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    block = min(1 << (max_chunk - 1).bit_length(), BLOCK)
    padded = jax.tree.map(lambda leaf: _padded(leaf, block), inputs)  # a slice of `block` fits from every token on

    def run_row(row: jax.Array, carried: tuple[jax.Array, States]) -> tuple[jax.Array, States]:
        out, states = carried
        length = rows.chunk_lengths[row]

        def run_block(index: jax.Array, carried: tuple[jax.Array, States]) -> tuple[jax.Array, States]:
            out, own = carried
            start = rows.chunk_starts[row] + index * block
            left = length - index * block
            inside = jnp.arange(block) < left

            def read(leaf: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice_in_dim(leaf, start, block)
                return jnp.where(_as_column(inside, part), part, 0)

            fresh, own = step(jax.tree.map(read, padded), jnp.minimum(left, block), own)
            stale = jax.lax.dynamic_slice_in_dim(out, start, block)
            mine = jnp.where(inside[:, None], fresh, stale)
            return jax.lax.dynamic_update_slice_in_dim(out, mine, start, axis=0), own

        own = tuple(state[row] for state in states)
        out, own = jax.lax.fori_loop(0, -(-length // block), run_block, (out, own))
        return out, tuple(state.at[row].set(after) for state, after in zip(states, own, strict=True))

    out = jnp.zeros((num_tokens + block, width), jnp.float32)
    out, states = jax.lax.fori_loop(0, rows.chunk_lengths.size, run_row, (out, states))
    return out[:num_tokens], states


def convolve(
    x: jax.Array, state: jax.Array, weight: jax.Array, bias: jax.Array | None, num_valid: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Each channel of x by itself, a weighted sum of its last taps, and SiLU of that.

    x: (n, channels); state: (taps - 1, channels), what came before, oldest first; weight: (taps, channels).
    -> (n, channels) float32, the state after the first num_valid of x.
    """
    num_taps = weight.shape[0]
    seen = jnp.concatenate([state, x.astype(jnp.float32)])
    found = sum(seen[tap : tap + x.shape[0]] * weight[tap].astype(jnp.float32) for tap in range(num_taps))
    found = found if bias is None else found + bias.astype(jnp.float32)
    return jax.nn.silu(found), jax.lax.dynamic_slice_in_dim(seen, num_valid, num_taps - 1)


def convolve_one(
    x: jax.Array, states: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The same for one token of each of B rows. x: (B, channels); states: (B, taps - 1, channels)."""
    seen = jnp.concatenate([states, x.astype(jnp.float32)[:, None]], axis=1)
    found = (seen * weight.astype(jnp.float32)).sum(axis=1)
    found = found if bias is None else found + bias.astype(jnp.float32)
    return jax.nn.silu(found), seen[:, 1:]


def decay_between(log_decay: jax.Array) -> jax.Array:
    """(..., n), <= 0, of each token -> (..., n, n): what is left at token t of what token i added; 0 where i > t.

    The sums are of the tokens in between only: differences of sums from the start would be short of digits.
    """
    num_tokens = log_decay.shape[-1]
    later, earlier = jnp.arange(num_tokens)[:, None], jnp.arange(num_tokens)
    sums = jnp.cumsum(jnp.where(later > earlier, log_decay[..., :, None], 0), axis=-2)
    return jnp.where(later >= earlier, jnp.exp(sums), 0)


def _padded(leaf: jax.Array, by: int) -> jax.Array:
    return jnp.pad(leaf, ((0, by), *((0, 0),) * (leaf.ndim - 1)))


def _as_column(inside: jax.Array, like: jax.Array) -> jax.Array:
    return inside.reshape(-1, *(1,) * (like.ndim - 1))
