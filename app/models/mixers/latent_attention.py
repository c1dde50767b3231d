"""Multi-head latent attention as a layer's mixer."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from app.config.model_config import Component, LatentShape
from app.models.decoder import Kept, Step
from app.models.layers.attention import Scores
from app.models.layers.latent_attention import LatentWeights, output, queries, stored
from app.models.layers.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """A Mixer. plans: LatentWeights of TensorPlans."""

    shape: LatentShape
    rope: Rope
    plans: LatentWeights

    @property
    def component(self) -> Component:
        return Component.FULL

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,)

    def mix(self, weights: LatentWeights, x: jax.Array, kept: Kept, step: Step) -> tuple[jax.Array, Kept]:
        turns = step.turns(self.rope)
        q, row = (side(weights, x, *turns, self.shape) for side in (queries, stored))
        attended, kept = step.attend_latent(q, row, kept, Scores(self.shape.score_scale), self.shape.latent_dim)
        return output(weights, attended), kept
