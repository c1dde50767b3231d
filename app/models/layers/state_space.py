"""Mamba-2 (arXiv:2405.21060), a recurrent layer: each head fades its matrix and adds to it.

For each head, with a state S (head_dim, state_dim), a time step d and a speed A < 0; in and read are shared by the
heads of a group:

    S <- exp(d A) S + d x in^T;  out = S read + D x

Within a block all tokens are computed at once, as attention with decays for a mask. Heads are cut over ranks; in and
read, which are small, every rank has whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.config.model_config import StateSpaceShape
from app.models.layers.linear import linear, summed
from app.models.layers.recurrence import ROUNDING, States, convolve, convolve_one, decay_between, over_rows
from app.models.steps import ExtendRows
from app.tpu.mesh import TENSOR_AXIS


class StateSpaceWeights(NamedTuple):
    """inner = num_heads * head_dim, shared = num_groups * state_dim. None where a model has none."""

    gate: jax.Array  # (inner, embed)
    x: jax.Array  # (inner, embed)
    into: jax.Array  # (shared, embed)
    read: jax.Array  # (shared, embed)
    step: jax.Array  # (heads, embed)
    x_conv: jax.Array  # (taps, inner)
    into_conv: jax.Array  # (taps, shared)
    read_conv: jax.Array  # (taps, shared)
    step_bias: jax.Array  # (heads,)
    log_speed: jax.Array  # (heads,)
    skip: jax.Array  # (heads,), D
    out: jax.Array  # (embed, inner)
    x_conv_bias: jax.Array | None = None  # (inner,)
    into_conv_bias: jax.Array | None = None  # (shared,)
    read_conv_bias: jax.Array | None = None  # (shared,)
    norm: jax.Array | None = None  # (inner,), over each group of heads


class _Tokens(NamedTuple):
    """T tokens, before the convolutions."""

    x: jax.Array  # (T, inner)
    into: jax.Array  # (T, shared)
    read: jax.Array  # (T, shared)
    step: jax.Array  # (T, heads) float32


@dataclass(frozen=True, slots=True)
class StateSpace:
    """One layer, on one rank's share of heads."""

    shape: StateSpaceShape
    weights: StateSpaceWeights

    def decode(self, x: jax.Array, states: States) -> tuple[jax.Array, States]:
        """One token for each of B rows: (B, embed), states (B, ...) each -> this rank's share (B, embed), states."""
        tokens, weights = self._tokens(x), self.weights
        x_seen, into_seen, read_seen, matrices = states
        inner, x_seen = convolve_one(tokens.x, x_seen, weights.x_conv, weights.x_conv_bias)
        into, into_seen = convolve_one(tokens.into, into_seen, weights.into_conv, weights.into_conv_bias)
        read, read_seen = convolve_one(tokens.read, read_seen, weights.read_conv, weights.read_conv_bias)
        inner = inner.reshape(x.shape[0], -1, self.shape.head_dim)
        into, read = (self._of_heads(self._groups(shared), axis=1) for shared in (into, read))  # (B, heads, state_dim)
        decay = jnp.exp(tokens.step * self._speed)[..., None]
        stepped = tokens.step[..., None] * inner
        of_state = jnp.matmul(matrices, read[..., None], precision=ROUNDING)[..., 0]
        found = decay * of_state + (into * read).sum(axis=-1, keepdims=True) * stepped + self._skip * inner
        matrices = decay[..., None] * matrices + stepped[..., None] * into[:, :, None, :]
        return self._out(x, found.reshape(x.shape[0], -1)), (x_seen, into_seen, read_seen, matrices)

    def extend(self, x: jax.Array, rows: ExtendRows, max_chunk: int, states: States) -> tuple[jax.Array, States]:
        """Packed chunks of S rows: (T, embed), states (S, ...) each -> this rank's share (T, embed), states."""
        found, states = over_rows(self._block, self._tokens(x), states, rows, max_chunk, self.weights.x.shape[0])
        return self._out(x, found), states

    def _tokens(self, x: jax.Array) -> _Tokens:
        weights, shape, scales = self.weights, self.shape, self.shape.scales
        step = (linear(x, weights.step) * scales.step).astype(jnp.float32)
        step = jax.nn.softplus(step + weights.step_bias.astype(jnp.float32))
        return _Tokens(
            x=linear(x, weights.x) * scales.x,
            into=linear(x, weights.into) * scales.into,
            read=linear(x, weights.read) * scales.read,
            step=jnp.clip(step, shape.least_step, shape.greatest_step),
        )

    def _block(self, tokens: _Tokens, num_valid: jax.Array, states: States) -> tuple[jax.Array, States]:
        weights = self.weights
        x_seen, into_seen, read_seen, matrices = states
        inner, x_seen = convolve(tokens.x, x_seen, weights.x_conv, weights.x_conv_bias, num_valid)
        into, into_seen = convolve(tokens.into, into_seen, weights.into_conv, weights.into_conv_bias, num_valid)
        read, read_seen = convolve(tokens.read, read_seen, weights.read_conv, weights.read_conv_bias, num_valid)
        inner = inner.reshape(inner.shape[0], -1, self.shape.head_dim)
        found, matrices = self._scan(inner, self._groups(into), self._groups(read), tokens.step, matrices)
        return found.reshape(inner.shape[0], -1), (x_seen, into_seen, read_seen, matrices)

    def _scan(
        self, x: jax.Array, into: jax.Array, read: jax.Array, step: jax.Array, matrices: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """n tokens of one row at once; a token whose step is 0 leaves the state as it is.

        x: (n, heads, head_dim); into, read: (n, groups, state_dim); step: (n, heads);
        matrices: (heads, head_dim, state_dim). All float32. -> (n, heads, head_dim), matrices.
        """
        log_decay = step * self._speed
        decay = decay_between(log_decay.T)  # (heads, n, n)
        from_start = jnp.exp(jnp.cumsum(log_decay, axis=0))
        stepped = step[..., None] * x
        products = jnp.einsum("tgs,igs->gti", read, into, precision=ROUNDING)
        within = decay * self._of_heads(products, axis=0)
        into, read = (self._of_heads(shared, axis=1) for shared in (into, read))  # (n, heads, state_dim)
        of_state = jnp.einsum("ths,hds->thd", read, matrices, precision=ROUNDING)
        found = from_start[..., None] * of_state + jnp.einsum("hti,ihd->thd", within, stepped, precision=ROUNDING)
        kept = decay[:, -1, :].T[..., None] * stepped
        added = jnp.einsum("ihd,ihs->hds", kept, into, precision=ROUNDING)
        return found + self._skip * x, from_start[-1, :, None, None] * matrices + added

    def _out(self, x: jax.Array, found: jax.Array) -> jax.Array:
        """(T, inner) float32 -> (T, embed): gated, normed if the model has a norm, projected."""
        weights, scales = self.weights, self.shape.scales
        gate = jax.nn.silu((linear(x, weights.gate) * scales.gate).astype(jnp.float32))
        if weights.norm is None:
            gated = found * gate
        elif self.shape.gate_after_norm:
            gated = self._normed(found, weights.norm) * gate
        else:
            gated = self._normed(found * gate, weights.norm)
        return linear(gated.astype(x.dtype), weights.out) * scales.out

    def _normed(self, values: jax.Array, weight: jax.Array) -> jax.Array:
        """Over the channels of each group of heads, also where a group's heads are on several ranks."""
        shape = self.shape
        heads = values.reshape(values.shape[0], -1, shape.head_dim)
        in_group = jax.nn.one_hot(self._group_of_head, shape.num_groups, dtype=jnp.float32)
        squares = summed((heads * heads).sum(axis=-1) @ in_group)  # (T, groups)
        mean = squares / (shape.num_heads // shape.num_groups * shape.head_dim)
        scale = self._of_heads(jax.lax.rsqrt(mean + shape.norm_eps), axis=1)[..., None]
        return (heads * scale).reshape(values.shape) * weight.astype(jnp.float32)

    def _groups(self, shared: jax.Array) -> jax.Array:
        return shared.reshape(shared.shape[0], -1, self.shape.state_dim)

    def _of_heads(self, of_groups: jax.Array, axis: int) -> jax.Array:
        """What groups have, for each of this rank's heads."""
        return jnp.take(of_groups, self._group_of_head, axis=axis)

    @property
    def _group_of_head(self) -> jax.Array:
        """(this rank's heads,) int32."""
        num_own = self.weights.skip.shape[0]
        first = jax.lax.axis_index(TENSOR_AXIS) * num_own
        return (first + jnp.arange(num_own)) // (self.shape.num_heads // self.shape.num_groups)

    @property
    def _speed(self) -> jax.Array:
        return -jnp.exp(self.weights.log_speed.astype(jnp.float32))

    @property
    def _skip(self) -> jax.Array:
        return self.weights.skip.astype(jnp.float32)[:, None]
