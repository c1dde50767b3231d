"""The gated FFN of one pair of matrices in and one out (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple

import jax

from app.models.decoder import Leaf
from app.models.layers.linear import linear
from app.models.weight_plan import TensorPlan

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}
)


class GatedWeights(NamedTuple, Generic[Leaf]):
    gate: Leaf  # (ffn, embed)
    up: Leaf  # (ffn, embed)
    down: Leaf  # (embed, ffn)


@dataclass(frozen=True, slots=True)
class GatedFfn:
    """An Ffn. activation: a key of ACTIVATIONS, of the gate times gate_scale."""

    activation: str
    plans: GatedWeights[TensorPlan]
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def apply(self, weights: GatedWeights[jax.Array], x: jax.Array) -> jax.Array:
        inner = ACTIVATIONS[self.activation](linear(x, weights.gate) * self.gate_scale) * linear(x, weights.up)
        return linear(inner, weights.down) * self.out_scale
