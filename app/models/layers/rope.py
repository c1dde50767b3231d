"""Rotary position embedding (arXiv:2104.09864), with the two halves of a head rotated against one another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from app.config.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """(head_dim // 2,) float32: radians that each pair turns by from one position to the next."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divide slow pairs by `factor`, keep fast ones, blend those between by their turns in the original context."""
    turns = scaling.original_context_length * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0, 1)
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def rotation(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(T,) int32 -> cosines and sines, (T, 1, head_dim // 2) float32 each."""
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """(T, heads, head_dim) -> the same, each pair (i, i + head_dim // 2) turned by its angle."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
