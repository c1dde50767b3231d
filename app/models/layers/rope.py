"""Rotary position embedding (arXiv:2104.09864), with the two halves of a head rotated against one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from app.config.model_config import RopeScaling


class Rope(NamedTuple):
    """dim: how many of a head's first elements are rotated."""

    dim: int
    theta: float
    scaling: RopeScaling = RopeScaling()


class Rotation(NamedTuple):
    """Of T positions, (T, 1, dim // 2) float32 each."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """(dim // 2,) float32: radians that each pair turns by from one position to the next."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    frequencies = (1.0 / rope.theta**exponents).astype(np.float32)
    return _SCALINGS[rope.scaling.kind](frequencies, rope).astype(np.float32)


def rotation(positions: jax.Array, rope: Rope) -> Rotation:
    """Of (T,) int32 positions."""
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(rope)
    longer = rope.scaling.attention_factor
    return Rotation((jnp.cos(angles) * longer)[:, None, :], (jnp.sin(angles) * longer)[:, None, :])


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """(T, heads, head_dim) -> the same, each pair (i, i + dim // 2) turned by its angle; what is beyond dim stays."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1).astype(x.dtype)


def _unscaled(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    return frequencies


def _linear(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    return frequencies / rope.scaling.factor


def _llama3(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    """Divide slow pairs by `factor`, keep fast ones, blend those between by their turns in the original context."""
    scaling = rope.scaling
    turns = scaling.original_context_length * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    """The same idea, blended by the pairs' numbers between two that turn a given number of times (arXiv:2309.00071)."""
    scaling = rope.scaling

    def pair(turns: float) -> float:
        wavelengths = scaling.original_context_length / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    fastest, slowest = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.whole_pairs:
        fastest, slowest = math.floor(fastest), math.ceil(slowest)
    fastest, slowest = max(fastest, 0), min(slowest, rope.dim - 1)
    spread = max(slowest - fastest, 0.001)
    blend = np.clip((np.arange(frequencies.size, dtype=np.float32) - fastest) / spread, 0, 1)
    return blend * frequencies / scaling.factor + (1 - blend) * frequencies


_SCALINGS: Mapping[str, Callable[[np.ndarray, Rope], np.ndarray]] = {
    "none": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
