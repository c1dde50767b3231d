"""A mixture of experts in the place of an FFN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from app.models.decoder import Leaf
from app.models.ffns.gated import GatedFfn
from app.models.layers.linear import product
from app.models.layers.moe import Gate, Router, experts_share


class ExpertFfnWeights(NamedTuple, Generic[Leaf]):
    router: Leaf  # (expert, embed): every rank chooses among all experts
    experts: Any  # ExpertWeights
    router_bias: Leaf | None = None  # (expert,)


@dataclass(frozen=True, slots=True)
class ExpertFfn:
    """An Ffn. Experts are cut over ranks."""

    router: Router
    gate: Gate
    plans: ExpertFfnWeights[Any]

    def apply(self, weights: ExpertFfnWeights[jax.Array], x: jax.Array) -> jax.Array:
        bias = None if weights.router_bias is None else weights.router_bias.astype(jnp.float32)
        chosen = self.router(product(x, weights.router, jnp.float32), bias)
        return experts_share(x, chosen, weights.experts, self.gate)


class SharedExpertWeights(NamedTuple, Generic[Leaf]):
    routed: Any  # ExpertFfnWeights
    shared: Any  # GatedWeights
    gate: Leaf | None = None  # (1, embed)


@dataclass(frozen=True, slots=True)
class SharedExpertFfn:
    """An Ffn: experts that are chosen, and one that every token goes through, gated where there are weights for it."""

    routed: ExpertFfn
    shared: GatedFfn
    gate: Any = None  # a TensorPlan

    @property
    def plans(self) -> SharedExpertWeights[Any]:
        return SharedExpertWeights(self.routed.plans, self.shared.plans, self.gate)

    def apply(self, weights: SharedExpertWeights[jax.Array], x: jax.Array) -> jax.Array:
        shared = self.shared.apply(weights.shared, x)
        if weights.gate is not None:
            shared = shared * jax.nn.sigmoid(product(x, weights.gate, jnp.float32)).astype(x.dtype)
        return self.routed.apply(weights.routed, x) + shared
