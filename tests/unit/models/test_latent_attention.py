"""Absorbed latent attention against the same attention with every head's keys and values written out, in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from app.config.model_config import LatentShape
from app.models.families.parts import PairsApart
from app.models.layers import latent_attention
from app.models.layers.latent_attention import LatentWeights
from tests.support.one_rank import on_one_rank

SHAPE = LatentShape(latent_dim=32, rope_dim=8, plain_dim=24, value_dim=16, score_scale=0.2)
EMBED, HEADS, QUERY_RANK, NUM_TOKENS = 40, 4, 20, 30
HEAD_DIM = SHAPE.plain_dim + SHAPE.rope_dim
FREQUENCIES = 100.0 ** -(np.arange(0, SHAPE.rope_dim, 2) / SHAPE.rope_dim)
ANGLES = np.arange(NUM_TOKENS)[:, None, None] * FREQUENCIES


def checkpoint(query_rank: int | None) -> dict[str, np.ndarray]:
    """As Hugging Face stores it: the two numbers of a pair that is rotated lie side by side."""
    rng = np.random.default_rng(1)
    shapes = {
        "q": (HEADS * HEAD_DIM, query_rank or EMBED),
        "kv_a": (SHAPE.stored_dim, EMBED),
        "kv_b": (HEADS * (SHAPE.plain_dim + SHAPE.value_dim), SHAPE.latent_dim),
        "o": (EMBED, HEADS * SHAPE.value_dim),
    }
    if query_rank:
        shapes["q_a"] = (query_rank, EMBED)
    arrays = {name: rng.normal(0, 1.5 * shape[1] ** -0.5, shape) for name, shape in shapes.items()}
    arrays["kv_a_norm"] = rng.normal(1, 0.3, SHAPE.latent_dim)
    if query_rank:
        arrays["q_a_norm"], arrays["q_a_bias"] = rng.normal(1, 0.3, query_rank), rng.normal(0, 0.3, query_rank)
        arrays["kv_a_bias"] = rng.normal(0, 0.3, SHAPE.stored_dim)
    return arrays


def weights_of(arrays: dict[str, np.ndarray]) -> LatentWeights:
    of_latents = PairsApart(1, SHAPE.rope_dim)
    kv_b = arrays["kv_b"].reshape(HEADS, -1, SHAPE.latent_dim)
    found = {
        "q": PairsApart(HEADS, SHAPE.rope_dim)(arrays["q"]),
        "latent": of_latents(arrays["kv_a"]),
        "latent_norm": arrays["kv_a_norm"],
        "key": kv_b[:, : SHAPE.plain_dim],
        "value": kv_b[:, SHAPE.plain_dim :],
        "out": arrays["o"],
    }
    if "q_a" in arrays:
        found |= {"q_latent": arrays["q_a"], "q_norm": arrays["q_a_norm"], "q_latent_bias": arrays["q_a_bias"]}
        found |= {"latent_bias": of_latents(arrays["kv_a_bias"])}
    return LatentWeights(**{name: jnp.asarray(array, jnp.float32) for name, array in found.items()})


def written_out(arrays: dict[str, np.ndarray], x: np.ndarray, scale: float) -> np.ndarray:
    """(T, embed) -> (T, embed): causal attention with keys and values of their own for each head."""
    x = x.astype(np.float64)
    inner = x
    if "q_a" in arrays:
        inner = _normed(x @ arrays["q_a"].T + arrays["q_a_bias"]) * arrays["q_a_norm"]
    q = (inner @ arrays["q"].T).reshape(NUM_TOKENS, HEADS, HEAD_DIM)
    kv_a = x @ arrays["kv_a"].T + arrays.get("kv_a_bias", 0)
    latent = _normed(kv_a[:, : SHAPE.latent_dim]) * arrays["kv_a_norm"]
    kv = (latent @ arrays["kv_b"].T).reshape(NUM_TOKENS, HEADS, -1)
    shared = np.repeat(_rotated(kv_a[:, None, SHAPE.latent_dim :]), HEADS, axis=1)
    k = np.concatenate([kv[..., : SHAPE.plain_dim], shared], axis=-1)
    q = np.concatenate([q[..., : SHAPE.plain_dim], _rotated(q[..., SHAPE.plain_dim :])], axis=-1)
    return _attended(q, k, kv[..., SHAPE.plain_dim :], scale) @ arrays["o"].T


def _rotated(pairs: np.ndarray) -> np.ndarray:
    as_complex = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * np.exp(1j * ANGLES)
    return np.stack([as_complex.real, as_complex.imag], axis=-1).reshape(pairs.shape)


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """(T, heads, dim) each -> (T, heads * value_dim)."""
    scores = np.einsum("thd,ihd->hti", q, k) * scale
    scores = np.where(np.tri(NUM_TOKENS, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("hti,ihv->thv", shares, v).reshape(NUM_TOKENS, -1)


@pytest.mark.parametrize("query_rank", [QUERY_RANK, None], ids=["queries from a latent", "queries directly"])
def test_attention_over_stored_latents_is_attention_over_every_heads_keys_and_values(query_rank: int | None) -> None:
    arrays = checkpoint(query_rank)
    x = np.random.default_rng(2).normal(0, 1, (NUM_TOKENS, EMBED)).astype(np.float32)
    cos, sin = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)

    def before(weights: LatentWeights, x: Any, cos: Any, sin: Any) -> Any:
        return (
            latent_attention.queries(weights, x, cos, sin, SHAPE),
            latent_attention.stored(weights, x, cos, sin, SHAPE),
        )

    weights = weights_of(arrays)
    q, rows = (np.asarray(found, np.float64) for found in on_one_rank(before)(weights, x, cos, sin))
    keys = np.repeat(rows[:, None], HEADS, axis=1)  # one row is the key of every head, and its start the value
    attended = _attended(q, keys, keys[..., : SHAPE.latent_dim], SHAPE.score_scale).astype(np.float32)
    out = on_one_rank(latent_attention.output)(weights, attended)

    assert rows.shape == (NUM_TOKENS, SHAPE.stored_dim)
    wanted = written_out(arrays, x, SHAPE.score_scale)
    assert np.abs(np.asarray(out) - wanted).max() <= 2e-5 * np.abs(wanted).max()
