"""Recurrent layers as mixers: what they keep of a row is its state after its last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from app.config.model_config import Component
from app.models.decoder import Kept, Recurrence, Step
from app.models.layers.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMixer:
    """A Mixer. layer(shape, weights): the recurrence on one rank's share of its weights. plans: of these weights."""

    layer: Callable[[Any, Any], Recurrence]
    shape: Any
    plans: Any

    @property
    def component(self) -> Component:
        return Component.RECURRENT

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return ()

    def mix(self, weights: Any, x: jax.Array, kept: Kept, step: Step) -> tuple[jax.Array, Kept]:
        return step.recur(self.layer(self.shape, weights), x, kept)
