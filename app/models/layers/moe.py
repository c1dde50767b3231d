"""A mixture of experts as an FFN (arXiv:1701.06538): each token goes through the few experts that a router chooses.

Experts are cut over ranks: a rank holds some of them whole and computes for the tokens that chose these. What comes out
is its share of a sum over ranks, which is the caller's.

A token's experts are summed in the order of its choice, wherever they were computed: the result does not hang on what
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from app.tpu.mesh import TENSOR_AXIS

Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""What the two inner products of an FFN become: gate and up, (..., ffn) each -> (..., ffn)."""

MIN_BLOCK, MAX_BLOCK = 2, 64  # tokens of one expert that CPUs multiply at once; measured for 2 to 512 tokens


class Chosen(NamedTuple):
    """k experts for each of T tokens."""

    experts: jax.Array  # (T, k) int32, over all ranks
    weights: jax.Array  # (T, k) float32


class Router(Protocol):
    """Chooses each token's experts. Hashable."""

    def __call__(self, logits: jax.Array, bias: jax.Array | None) -> Chosen:
        """(T, num_experts) float32; (num_experts,) float32, or None where a model has none."""
        ...


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The most probable experts (qwen3_moe, qwen3_next, gpt_oss). normalised: their weights sum to one."""

    experts_per_token: int
    normalised: bool = True

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> Chosen:
        """The bias is added to the logits."""
        logits = logits if bias is None else logits + bias
        best, experts = jax.lax.top_k(logits, self.experts_per_token)
        total = best if self.normalised else logits
        return Chosen(experts, jnp.exp(best - jax.nn.logsumexp(total, axis=-1, keepdims=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRouter:
    """The best experts out of the best groups of experts (deepseek_v3, arXiv:2412.19437).

    Weights are sigmoids. A bias, which balances the load, counts for the choice but not in the weights.
    """

    experts_per_token: int
    num_groups: int
    groups_per_token: int
    scale: float
    normalised: bool = True  # weights sum to `scale`

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> Chosen:
        """A group counts as much as its best two experts."""
        scores = jax.nn.sigmoid(logits)
        biased = (scores if bias is None else scores + bias).reshape(scores.shape[0], self.num_groups, -1)
        groups = jax.lax.top_k(jax.lax.top_k(biased, 2)[0].sum(axis=-1), self.groups_per_token)[1]
        kept = jax.nn.one_hot(groups, self.num_groups, dtype=bool).any(axis=1)[:, :, None]
        candidates = jnp.where(kept, biased, -jnp.inf).reshape(scores.shape)
        experts = jax.lax.top_k(candidates, self.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalised:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return Chosen(experts, weights * self.scale)


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU, arXiv:2002.05202."""
    return jax.nn.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """SwiGLU of gpt_oss: a steeper sigmoid, inner products held within `limit`, and one added to `up`."""

    limit: float
    steepness: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.steepness * gate)


class ExpertWeights(NamedTuple):
    """This rank's experts. Biases are None where a model has none.

    Matrices are (in, out), unlike others: XLA for TPU would copy all of them turned round in every step.
    """

    gate: jax.Array  # (experts, embed, expert_ffn)
    up: jax.Array  # (experts, embed, expert_ffn)
    down: jax.Array  # (experts, expert_ffn, embed)
    gate_bias: jax.Array | None = None  # (experts, expert_ffn)
    up_bias: jax.Array | None = None  # (experts, expert_ffn)
    down_bias: jax.Array | None = None  # (experts, embed)


def experts_share(x: jax.Array, chosen: Chosen, weights: ExpertWeights, gate: Gate) -> jax.Array:
    """(T, embed) -> (T, embed): for each token, the weighted sum of those of its experts that this rank holds.

    Inside `shard_map`. Tokens are sorted by expert. On CPU the cost is that of the experts chosen, not of all.
    """
    num_tokens, per_token = chosen.experts.shape
    num_experts = weights.gate.shape[0]
    own = chosen.experts.reshape(-1) - jax.lax.axis_index(TENSOR_AXIS) * num_experts
    here = (own >= 0) & (own < num_experts)
    own = jnp.where(here, own, num_experts)  # the others' come last
    order = jnp.argsort(own)
    counts = jnp.bincount(own, length=num_experts)
    sorted_x = x[order // per_token]
    found = jax.lax.platform_dependent(
        sorted_x,
        counts,
        weights,
        cpu=partial(by_blocks, gate=gate, block=_block(num_tokens * per_token, num_experts)),
        default=partial(by_ragged_products, gate=gate),
    )
    back = jnp.argsort(order)
    shares = jnp.where(here, chosen.weights.reshape(-1), 0).astype(x.dtype)[:, None] * found[back]
    return shares.reshape(num_tokens, per_token, -1).sum(axis=1)


def _block(num_pairs: int, num_experts: int) -> int:
    """As many tokens as an expert has on average, rounded up to a power of two, within what is quick."""
    average = -(-num_pairs // num_experts)
    return min(max(1 << (average - 1).bit_length(), MIN_BLOCK), MAX_BLOCK)


def by_blocks(sorted_x: jax.Array, counts: jax.Array, weights: ExpertWeights, *, gate: Gate, block: int) -> jax.Array:
    """Experts one after another, `block` of their tokens at a time. An expert that nobody chose is not read.

    sorted_x: (n, embed), by expert; counts: (experts,) int32, tokens of each. -> (n, embed); zeros beyond all counts.
    """
    num_rows, width = sorted_x.shape
    starts = jnp.cumsum(counts) - counts
    last_blocks = jnp.cumsum(-(-counts // block))  # of each expert, exclusive
    padded = jnp.pad(sorted_x, ((0, block), (0, 0)))

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_blocks, number, side="right")
        first = (number - last_blocks[expert]) * block + -(-counts[expert] // block) * block
        start = starts[expert] + first
        own = jax.tree.map(lambda leaf: leaf[expert], weights)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, block)
        fresh = _expert(rows, own, gate)
        stale = jax.lax.dynamic_slice_in_dim(out, start, block)
        mine = (first + jnp.arange(block) < counts[expert])[:, None]
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, fresh, stale), start, axis=0)

    out = jnp.zeros((num_rows + block, width), sorted_x.dtype)
    return jax.lax.fori_loop(0, last_blocks[-1], step, out)[:num_rows]


def _expert(rows: jax.Array, own: ExpertWeights, gate: Gate) -> jax.Array:
    """(n, embed) through one expert, whose weights have no axis of experts."""

    def product(x: jax.Array, matrix: jax.Array, bias: jax.Array | None) -> jax.Array:
        found = jnp.einsum("ti,io->to", x, matrix)
        return found if bias is None else found + bias

    inner = gate(product(rows, own.gate, own.gate_bias), product(rows, own.up, own.up_bias))
    return product(inner, own.down, own.down_bias)


def by_ragged_products(sorted_x: jax.Array, counts: jax.Array, weights: ExpertWeights, *, gate: Gate) -> jax.Array:
    """The same in three products that know which rows are whose; what TPUs have a kernel for."""
    num_rows = sorted_x.shape[0]
    inside = jnp.arange(num_rows) < counts.sum()
    expert_of = jnp.repeat(jnp.arange(counts.size), counts, total_repeat_length=num_rows)

    def product(x: jax.Array, matrices: jax.Array, bias: jax.Array | None) -> jax.Array:
        found = jax.lax.ragged_dot(x, matrices, counts)
        return found if bias is None else found + bias[expert_of]

    inner = gate(product(sorted_x, weights.gate, weights.gate_bias), product(sorted_x, weights.up, weights.up_bias))
    return jnp.where(inside[:, None], product(inner, weights.down, weights.down_bias), 0)
