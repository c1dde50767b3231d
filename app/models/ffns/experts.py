"""A mixture of experts in the place of an FFN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from app.models.decoder import Leaf
from app.models.layers.linear import product
from app.models.layers.moe import Gate, SoftmaxRouter, experts_share


class ExpertFfnWeights(NamedTuple, Generic[Leaf]):
    router: Leaf  # (expert, embed): every rank chooses among all experts
    experts: Any  # ExpertWeights
    router_bias: Leaf | None = None  # (expert,)


@dataclass(frozen=True, slots=True)
class ExpertFfn:
    """An Ffn. Experts are cut over ranks."""

    router: SoftmaxRouter
    gate: Gate
    plans: ExpertFfnWeights[Any]

    def apply(self, weights: ExpertFfnWeights[jax.Array], x: jax.Array) -> jax.Array:
        logits = product(x, weights.router, jnp.float32)
        if weights.router_bias is not None:
            logits = logits + weights.router_bias.astype(jnp.float32)
        return experts_share(x, self.router(logits), weights.experts, self.gate)
