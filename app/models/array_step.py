"""The Step of layers that have arrays of their own: inside one program, on one rank's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from app.config.model_config import Component
from app.models.decoder import Kept, Recurrence
from app.models.layers.attention import (
    PageReader,
    Scores,
    decode_attention,
    extend_attention,
    latent_array,
    separate_arrays,
)
from app.models.layers.rope import Rope, Rotation
from app.models.steps import ExtendRows, TokenPlaces
from app.tpu.hybrid_buffers import LayerStates
from app.tpu.kv_pool import write_tokens


class LayerKV(NamedTuple):
    """One layer's arrays; no values where the keys are latents."""

    keys: jax.Array
    values: Any


class Reach(NamedTuple):
    """The step's rows as layers of one kind see them, and where its tokens lie there."""

    rows: Any  # DecodeRows or ExtendRows
    places: TokenPlaces


# (queries, layer, rows, scores, sinks) -> attended
AttendRows = Callable[[jax.Array, PageReader, Any, Scores, jax.Array | None], jax.Array]
# (recurrence, x, states) -> (output, states)
RunRows = Callable[[Recurrence, jax.Array, LayerStates], tuple[jax.Array, LayerStates]]


@dataclass(frozen=True, slots=True)
class ArrayStep:
    """reaches: for each kind of attention that the model has. state_slots: (rows,) int32, beyond the last for padding;
    None for models without recurrent layers.
    """

    rotations: Mapping[Rope, Rotation]
    reaches: Mapping[Component, Reach]
    state_slots: jax.Array | None
    attend_rows: AttendRows
    run_rows: RunRows

    def turns(self, rope: Rope) -> Rotation:
        return self.rotations[rope]

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: Kept, scores: Scores, sinks: jax.Array | None
    ) -> tuple[jax.Array, Kept]:
        component = Component.FULL if scores.window is None else Component.SWA
        rows, places = self.reaches[component]
        held: LayerKV = kept[component.value]
        keys, values = _written(held.keys, places, k), _written(held.values, places, v)
        reader = separate_arrays(keys, values, k.shape[-1])
        return self.attend_rows(q, reader, rows, scores, sinks), {**kept, component.value: LayerKV(keys, values)}

    def attend_latent(
        self, q: jax.Array, latent: jax.Array, kept: Kept, scores: Scores, value_dim: int
    ) -> tuple[jax.Array, Kept]:
        rows, places = self.reaches[Component.FULL]
        held: jax.Array = kept[Component.FULL.value].keys
        q, latent = (_widened(values, held.shape[-1]) for values in (q, latent))
        latents = _written(held, places, latent)
        attended = self.attend_rows(q, latent_array(latents, value_dim), rows, scores, None)
        return attended, {**kept, Component.FULL.value: LayerKV(latents, None)}

    def recur(self, recurrence: Recurrence, x: jax.Array, kept: Kept) -> tuple[jax.Array, Kept]:
        held: LayerStates = kept[Component.RECURRENT.value]
        slots = self.state_slots
        found = tuple(array.at[slots].get(mode="clip") for array in held)  # a padding row's is of no account
        out, after = self.run_rows(recurrence, x, found)
        written = tuple(array.at[slots].set(new, mode="drop") for array, new in zip(held, after, strict=True))
        return out, {**kept, Component.RECURRENT.value: written}


def decode_step(
    rotations: Mapping[Rope, Rotation], reaches: Mapping[Component, Reach], state_slots: jax.Array | None
) -> ArrayStep:
    def run_rows(recurrence: Recurrence, x: jax.Array, states: LayerStates) -> tuple[jax.Array, LayerStates]:
        return recurrence.decode(x, states)

    return ArrayStep(rotations, reaches, state_slots, decode_attention, run_rows)


def extend_step(
    rotations: Mapping[Rope, Rotation],
    reaches: Mapping[Component, Reach],
    state_slots: jax.Array | None,
    rows: ExtendRows,
    max_chunk: int,
) -> ArrayStep:
    def attend_rows(
        q: jax.Array, layer: PageReader, rows: ExtendRows, scores: Scores, sinks: jax.Array | None
    ) -> jax.Array:
        return extend_attention(q, layer, rows, max_chunk, scores, sinks)

    def run_rows(recurrence: Recurrence, x: jax.Array, states: LayerStates) -> tuple[jax.Array, LayerStates]:
        return recurrence.extend(x, rows, max_chunk, states)

    return ArrayStep(rotations, reaches, state_slots, attend_rows, run_rows)


def _written(array: jax.Array, places: TokenPlaces, tokens: jax.Array) -> jax.Array:
    """tokens: (T, ...), a line of the array for each."""
    return write_tokens(array, places.pages, places.offsets, tokens.reshape(tokens.shape[0], -1))


def _widened(values: jax.Array, width: int) -> jax.Array:
    """Zeros behind each of (T, ..., n), up to the width that the pool stores."""
    return jnp.pad(values, (*((0, 0),) * (values.ndim - 1), (0, width - values.shape[-1])))
