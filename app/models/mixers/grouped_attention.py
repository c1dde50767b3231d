"""Multi-head and grouped-query attention (arXiv:2305.13245) with rotary positions, full or over a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import jax

from app.config.model_config import Component
from app.models.decoder import Kept, Leaf, Step
from app.models.layers.attention import Scores
from app.models.layers.linear import linear, once
from app.models.layers.norms import RmsNorm
from app.models.layers.rope import Rope, rotate
from app.models.weight_plan import TensorPlan


class AttentionWeights(NamedTuple, Generic[Leaf]):
    """heads = num_heads * head_dim, kv_heads = num_kv_heads * head_dim. None where a model has none."""

    q: Leaf  # (heads, embed)
    k: Leaf  # (kv_heads, embed)
    v: Leaf  # (kv_heads, embed)
    o: Leaf  # (embed, heads)
    q_bias: Leaf | None = None  # (heads,)
    k_bias: Leaf | None = None  # (kv_heads,)
    v_bias: Leaf | None = None  # (kv_heads,)
    o_bias: Leaf | None = None  # (embed,)
    q_norm: Leaf | None = None  # (head_dim,)
    k_norm: Leaf | None = None  # (head_dim,)
    sinks: Leaf | None = None  # (num_heads,)
    gate: Leaf | None = None  # (heads, embed), of what was attended


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """A Mixer. head_norm: of query and key heads, where there are weights for it."""

    head_dim: int
    rope: Rope
    scores: Scores
    head_norm: RmsNorm
    out_scale: float = 1.0
    plans: AttentionWeights[TensorPlan]

    @property
    def component(self) -> Component:
        return Component.FULL if self.scores.window is None else Component.SWA

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,)

    def mix(self, weights: AttentionWeights[jax.Array], x: jax.Array, kept: Kept, step: Step) -> tuple[jax.Array, Kept]:
        q = self._heads(x, weights.q, weights.q_bias, weights.q_norm)
        k = self._heads(x, weights.k, weights.k_bias, weights.k_norm)
        v = self._heads(x, weights.v, weights.v_bias, None)
        turns = step.turns(self.rope)
        attended, kept = step.attend(rotate(q, *turns), rotate(k, *turns), v, kept, self.scores, weights.sinks)
        if weights.gate is not None:
            attended = attended * jax.nn.sigmoid(linear(x, weights.gate))
        out = linear(attended, weights.o, None if weights.o_bias is None else once(weights.o_bias))
        return out * self.out_scale, kept

    def _heads(self, x: jax.Array, matrix: jax.Array, bias: jax.Array | None, norm: jax.Array | None) -> jax.Array:
        projected = linear(x, matrix, bias).reshape(x.shape[0], -1, self.head_dim)
        return projected if norm is None else self.head_norm(projected, norm)
