"""Gated delta net (arXiv:2412.06464), a recurrent layer: a matrix for each head, into which tokens write.

For each value head, with a state S (key_dim, value_dim), a decay a and a rate b of each token:

    S <- a S;  S <- S + k (b (v - k^T S))^T;  out = q^T S

Within a block all tokens are computed at once, by a triangular system for what each of them writes (the WY form of
arXiv:2406.06484). Heads are cut over ranks, value heads with the key head that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.config.model_config import GatedDeltaShape
from app.models.layers.linear import linear
from app.models.layers.norms import rms_norm
from app.models.layers.recurrence import ROUNDING, States, convolve, convolve_one, decay_between, over_rows
from app.models.steps import ExtendRows

UNIT_EPS = 1e-6  # queries and keys are made unit vectors


class GatedDeltaWeights(NamedTuple):
    """keys = num_key_heads * key_dim, values = num_value_heads * value_dim, value_heads = num_value_heads."""

    q: jax.Array  # (keys, embed)
    k: jax.Array  # (keys, embed)
    v: jax.Array  # (values, embed)
    z: jax.Array  # (values, embed), gates what comes out
    rate: jax.Array  # (value_heads, embed)
    step: jax.Array  # (value_heads, embed), how far a token decays what was there
    q_conv: jax.Array  # (taps, keys)
    k_conv: jax.Array  # (taps, keys)
    v_conv: jax.Array  # (taps, values)
    step_bias: jax.Array  # (key_heads, value heads of each)
    log_speed: jax.Array  # (key_heads, value heads of each), of the decay
    norm: jax.Array  # (value_dim,)
    out: jax.Array  # (embed, values)


class _Tokens(NamedTuple):
    """T tokens, before the convolutions."""

    q: jax.Array  # (T, keys)
    k: jax.Array  # (T, keys)
    v: jax.Array  # (T, values)
    rate: jax.Array  # (T, value_heads) float32
    log_decay: jax.Array  # (T, value_heads) float32


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One layer, on one rank's share of heads."""

    shape: GatedDeltaShape
    weights: GatedDeltaWeights

    def decode(self, x: jax.Array, states: States) -> tuple[jax.Array, States]:
        """One token for each of B rows: (B, embed), states (B, ...) each -> this rank's share (B, embed), states."""
        tokens, weights = self._tokens(x), self.weights
        q_seen, k_seen, v_seen, matrices = states
        q, q_seen = convolve_one(tokens.q, q_seen, weights.q_conv, None)
        k, k_seen = convolve_one(tokens.k, k_seen, weights.k_conv, None)
        v, v_seen = convolve_one(tokens.v, v_seen, weights.v_conv, None)
        q, k, v = self._heads(q, k, v)
        rate, log_decay = self._by_head(tokens.rate), self._by_head(tokens.log_decay)
        found, matrices = delta_step(q, k, v, rate, jnp.exp(log_decay), self._matrices(matrices))
        states = (q_seen, k_seen, v_seen, matrices.reshape(states[3].shape))
        return self._out(x, found.reshape(x.shape[0], -1)), states

    def extend(self, x: jax.Array, rows: ExtendRows, max_chunk: int, states: States) -> tuple[jax.Array, States]:
        """Packed chunks of S rows: (T, embed), states (S, ...) each -> this rank's share (T, embed), states."""
        found, states = over_rows(self._block, self._tokens(x), states, rows, max_chunk, self.weights.v.shape[0])
        return self._out(x, found), states

    def _tokens(self, x: jax.Array) -> _Tokens:
        weights = self.weights
        bias, log_speed = (values.astype(jnp.float32).reshape(-1) for values in (weights.step_bias, weights.log_speed))
        step = linear(x, weights.step).astype(jnp.float32) + bias
        return _Tokens(
            q=linear(x, weights.q),
            k=linear(x, weights.k),
            v=linear(x, weights.v),
            rate=jax.nn.sigmoid(linear(x, weights.rate).astype(jnp.float32)),
            log_decay=-jnp.exp(log_speed) * jax.nn.softplus(step),
        )

    def _heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """-> unit vectors (n, key_heads, key_dim), queries scaled; (n, key_heads, value heads of each, value_dim)."""
        key_dim, value_dim = self.shape.key_dim, self.shape.value_dim
        q, k = (_unit(vectors.reshape(vectors.shape[0], -1, key_dim)) for vectors in (q, k))
        return q * key_dim**-0.5, k, v.reshape(*k.shape[:2], -1, value_dim)

    def _block(self, tokens: _Tokens, num_valid: jax.Array, states: States) -> tuple[jax.Array, States]:
        weights = self.weights
        q_seen, k_seen, v_seen, matrices = states
        q, q_seen = convolve(tokens.q, q_seen, weights.q_conv, None, num_valid)
        k, k_seen = convolve(tokens.k, k_seen, weights.k_conv, None, num_valid)
        v, v_seen = convolve(tokens.v, v_seen, weights.v_conv, None, num_valid)
        q, k, v = self._heads(q, k, v)
        rate, log_decay = self._by_head(tokens.rate), self._by_head(tokens.log_decay)
        q, k = (vectors.swapaxes(0, 1) for vectors in (q, k))
        v, rate, log_decay = (jnp.moveaxis(values, 0, 2) for values in (v, rate, log_decay))
        found, matrices = delta_block(q, k, v, rate, log_decay, self._matrices(matrices))
        out = jnp.moveaxis(found, 2, 0).reshape(q.shape[1], -1)
        return out, (q_seen, k_seen, v_seen, matrices.reshape(states[3].shape))

    def _by_head(self, of_heads: jax.Array) -> jax.Array:
        """(n, value_heads) -> (n, key_heads, value heads of each)."""
        return of_heads.reshape(of_heads.shape[0], *self.weights.step_bias.shape)

    def _matrices(self, stored: jax.Array) -> jax.Array:
        """(..., value_heads, key_dim, value_dim) -> (..., key_heads, value heads of each, key_dim, value_dim)."""
        return stored.reshape(*stored.shape[:-3], *self.weights.step_bias.shape, *stored.shape[-2:])

    def _out(self, x: jax.Array, found: jax.Array) -> jax.Array:
        """(T, values) float32 -> (T, embed): normed for each head, gated, projected."""
        heads = found.reshape(x.shape[0], -1, self.shape.value_dim)
        normed = rms_norm(heads, self.weights.norm, self.shape.norm_eps).reshape(found.shape)
        gated = normed * jax.nn.silu(linear(x, self.weights.z).astype(jnp.float32))
        return linear(gated.astype(x.dtype), self.weights.out)


def delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, rate: jax.Array, decay: jax.Array, matrices: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of B rows. All float32.

    q, k: (B, key_heads, key_dim); v: (B, key_heads, group, value_dim); rate, decay: (B, key_heads, group);
    matrices: (B, key_heads, group, key_dim, value_dim). -> found as v, matrices.
    Cost: states are read twice and written once.
    """
    both = jnp.stack([k, q], axis=2)[:, :, None]
    both = jnp.broadcast_to(both, (*v.shape[:3], *both.shape[-2:]))
    of_state = jnp.matmul(both, matrices, precision=ROUNDING)
    rate, decay = rate[..., None], decay[..., None]
    written = rate * (v - decay * of_state[..., 0, :])
    found = decay * of_state[..., 1, :] + (q * k).sum(axis=-1)[..., None, None] * written
    return found, decay[..., None] * matrices + k[:, :, None, :, None] * written[..., None, :]


def delta_block(
    q: jax.Array, k: jax.Array, v: jax.Array, rate: jax.Array, log_decay: jax.Array, matrices: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """n tokens of one row at once; a token whose rate and log_decay are 0 leaves the state as it is. All float32.

    q, k: (key_heads, n, key_dim); v: (key_heads, group, n, value_dim); rate, log_decay: (key_heads, group, n);
    matrices: (key_heads, group, key_dim, value_dim). -> found as v, matrices.

    What a token writes depends on what those before it wrote: with D the decays between tokens, u_t what token t
    writes and c_t its decay from the start,

        u_t + b_t sum_{i < t} D_ti (k_t . k_i) u_i = b_t (v_t - c_t S^T k_t)
    """
    num_tokens = q.shape[1]
    decay = decay_between(log_decay)  # (key_heads, group, n, n)
    from_start = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
    both = jnp.concatenate([k, q], axis=1)
    products = jnp.matmul(both, k.swapaxes(1, 2), precision=ROUNDING)[:, None]  # of keys and of queries with keys
    of_state = jnp.matmul(both[:, None], matrices, precision=ROUNDING)
    wanted = rate[..., None] * (v - from_start * of_state[:, :, :num_tokens])
    system = jnp.tril(rate[..., None] * decay * products[:, :, :num_tokens], -1)
    written = jnp.matmul(inverse_of_one_plus(system), wanted, precision=ROUNDING)
    within = jnp.matmul(decay * products[:, :, num_tokens:], written, precision=ROUNDING)
    kept = decay[:, :, -1, :, None] * written
    added = jnp.matmul(k.swapaxes(1, 2)[:, None], kept, precision=ROUNDING)
    found = from_start * of_state[:, :, num_tokens:] + within
    return found, from_start[:, :, -1:] * matrices + added


def inverse_of_one_plus(lower: jax.Array) -> jax.Array:
    """(..., n, n), zero on and above the diagonal, n a power of two -> (1 + lower)^-1.

    Blocks on the diagonal are inverted, twice as large in each round. XLA's triangular solve takes hundreds of times as
    long on CPU.
    """
    size, rest = lower.shape[-1], lower.shape[:-2]
    inverse = jnp.ones((*rest, size, 1, 1), lower.dtype)
    for half in (1 << level for level in range(size.bit_length() - 1)):
        number = size // (2 * half)
        blocks = jnp.diagonal(lower.reshape(*rest, number, 2 * half, number, 2 * half), axis1=-4, axis2=-2)
        below = jnp.moveaxis(blocks, -1, -3)[..., half:, :half]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        across = jnp.matmul(second, jnp.matmul(below, first, precision=ROUNDING), precision=ROUNDING)
        inverse = jnp.block([[first, jnp.zeros_like(across)], [-across, second]])
    return inverse[..., 0, :, :]


def _unit(vectors: jax.Array) -> jax.Array:
    return vectors * jax.lax.rsqrt((vectors * vectors).sum(axis=-1, keepdims=True) + UNIT_EPS)
