"""Multi-head latent attention (arXiv:2405.04434): all heads read one latent of each token.

A token's keys and values are products of one latent with each head's matrices. These matrices are moved to the other
side, "absorbed": what a head multiplies with its keys becomes a query for latents, and what it mixes is a latent that
its value matrix then reads. So the pool keeps, and attention reads, one row of latent_dim + rope_dim numbers a token:

    [ latent, after its norm | the part of the key that is rotated, the same for all heads ]

Every rank holds it; heads are cut over ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from app.config.model_config import LatentShape
from app.models.layers.linear import linear, once
from app.models.layers.norms import rms_norm
from app.models.layers.rope import rotate

NORM_EPS = 1e-6  # of both latents' norms, whatever the model's other norms have


class LatentWeights(NamedTuple):
    """Of the two numbers that are rotated together, the first of all pairs come before the second. None where a model
    has none.
    """

    q: jax.Array  # (heads * (plain_dim + rope_dim), query_rank or embed)
    latent: jax.Array  # (latent_dim + rope_dim, embed)
    latent_norm: jax.Array  # (latent_dim,)
    key: jax.Array  # (heads, plain_dim, latent_dim)
    value: jax.Array  # (heads, value_dim, latent_dim)
    out: jax.Array  # (embed, heads * value_dim)
    q_latent: jax.Array | None = None  # (query_rank, embed)
    q_norm: jax.Array | None = None  # (query_rank,)
    q_latent_bias: jax.Array | None = None  # (query_rank,)
    latent_bias: jax.Array | None = None  # (latent_dim + rope_dim,)
    out_bias: jax.Array | None = None  # (embed,)


def queries(weights: LatentWeights, x: jax.Array, cos: jax.Array, sin: jax.Array, shape: LatentShape) -> jax.Array:
    """(T, embed) -> (T, heads, stored_dim), unscaled: products with stored rows are those of queries with keys.

    cos, sin: of the tokens' positions, (T, 1, rope_dim // 2) float32.
    """
    if weights.q_latent is not None and weights.q_norm is not None:
        x = rms_norm(linear(x, weights.q_latent, weights.q_latent_bias), weights.q_norm, NORM_EPS)
    heads = linear(x, weights.q).reshape(x.shape[0], -1, shape.plain_dim + shape.rope_dim)
    plain, rotated = jnp.split(heads, [shape.plain_dim], axis=-1)
    absorbed = jnp.einsum("thp,hpl->thl", plain, weights.key)
    return jnp.concatenate([absorbed, rotate(rotated, cos, sin)], axis=-1)


def stored(weights: LatentWeights, x: jax.Array, cos: jax.Array, sin: jax.Array, shape: LatentShape) -> jax.Array:
    """(T, embed) -> (T, stored_dim), what the pool keeps: a key as it is, and with its first latent_dim the value."""
    latent, rotated = jnp.split(linear(x, weights.latent, weights.latent_bias), [shape.latent_dim], axis=-1)
    latent = rms_norm(latent, weights.latent_norm, NORM_EPS)
    return jnp.concatenate([latent, rotate(rotated[:, None], cos, sin)[:, 0]], axis=-1)


def output(weights: LatentWeights, attended: jax.Array) -> jax.Array:
    """What heads mixed of latents, (T, heads * latent_dim), -> this rank's share of the layer's output, (T, embed)."""
    by_head = attended.reshape(attended.shape[0], -1, weights.value.shape[-1])
    values = jnp.einsum("thl,hvl->thv", by_head, weights.value)
    bias = None if weights.out_bias is None else once(weights.out_bias)
    return linear(values.reshape(attended.shape[0], -1), weights.out, bias)
