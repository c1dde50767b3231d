"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RmsNorm(NamedTuple):
    """offset: added to the weights."""

    eps: float
    offset: float = 0.0

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """(..., width) and (width,) -> (..., width) in x's type; computed in float32."""
        wide = weight.astype(jnp.float32)
        return rms_norm(x, wide + self.offset if self.offset else wide, self.eps)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """(..., width) and (width,) -> (..., width) in x's type; computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
