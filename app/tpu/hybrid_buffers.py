"""The device arrays of a model whose layers do not all keep the same kind of state."""

from __future__ import annotations

from typing import NamedTuple

import jax

from app.tpu.pool_layout import KVBuffers

LayerStates = tuple[jax.Array, ...]
"""One recurrent layer's arrays, as StateSpec.arrays says, each (num_slots, *shape) float32."""


class HybridBuffers(NamedTuple):
    """Everything that one model keeps on the device, layers of each kind in order; empty tuples for kinds it lacks.

    full: layers that see every token; with one latent for keys and values (MLA) the latent is `full.keys`, and
        `full.values` is empty.
    window: layers that see a sliding window, over pages of their own.
    states: recurrent layers.
    A layer may have more than one of them.
    """

    full: KVBuffers
    window: KVBuffers
    states: tuple[LayerStates, ...]
