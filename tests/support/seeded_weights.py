"""Weights that are a function of their name and shape alone, so that a golden file need not hold them.

Spread so that every part of a model shows in its logits: norms are not 1, biases and sinks not 0, and the heads of a
recurrent layer forget at different speeds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Draw = Callable[[np.random.RandomState, tuple[int, ...]], np.ndarray]


def _normal(mean: float, spread: float) -> Draw:
    return lambda rng, shape: rng.normal(mean, spread, shape)


def _uniform(low: float, high: float) -> Draw:
    return lambda rng, shape: rng.uniform(low, high, shape)


def _matrix(rng: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Keeps the scale of what it multiplies; (..., out, in)."""
    return rng.normal(0, shape[-1] ** -0.5, shape)


# The first ending that a name has decides.
_BY_ENDING: tuple[tuple[str, Draw], ...] = (
    ("embed_tokens.weight", _normal(0, 0.3)),
    ("e_score_correction_bias", _normal(0, 0.2)),
    ("sinks", _normal(0, 2)),
    ("A_log", _uniform(np.log(0.02), np.log(0.8))),
    ("dt_bias", _uniform(-2, 0.5)),
    (".D", _normal(1, 0.3)),
    ("bias", _normal(0, 0.3)),
    ("norm.weight", _normal(0.6, 0.3)),
)


def seeded_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """float32 of the given shape; the same on every machine."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))  # its stream is frozen, other generators' may change
    draw = next((draw for ending, draw in _BY_ENDING if name.endswith(ending)), _matrix)
    return draw(rng, tuple(shape)).astype(np.float32)


def seeded_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Name -> shape, as a golden file states them, to name -> array."""
    return {name: seeded_weight(name, shape) for name, shape in shapes.items()}
