"""Attention over a window, with sinks and caps, against a dense softmax in float64. 1e-5."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from app.models.layers.attention import (
    PageReader,
    Scores,
    decode_attention,
    extend_attention,
    latent_array,
    separate_arrays,
)
from app.models.steps import DecodeRows, ExtendRows

HEADS, KV_HEADS, DIM = 4, 2, 8
RNG = np.random.default_rng(0)


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, scores: Scores, sinks: np.ndarray | None
) -> np.ndarray:
    """Queries (n, heads, dim) at positions first, first + 1, ... over all tokens (t, kv_heads, dim)."""
    out = np.zeros((q.shape[0], HEADS, v.shape[-1]))
    for index in range(q.shape[0]):
        position = first + index
        start = 0 if scores.window is None else max(position - scores.window + 1, 0)
        for head in range(HEADS):
            kv_head = head * k.shape[1] // HEADS
            found = k[start : position + 1, kv_head].astype(np.float64) @ q[index, head] * scores.scale
            if scores.soft_cap is not None:
                found = scores.soft_cap * np.tanh(found / scores.soft_cap)
            weights = np.exp(found)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            out[index, head] = weights @ v[start : position + 1, kv_head] / total
    return out.reshape(q.shape[0], -1)


def paged(tokens: np.ndarray, page_size: int, num_pages: int) -> np.ndarray:
    """(t, heads, dim) -> pages 1..num_pages in order, and the page 0 of zeros."""
    pages = np.zeros((num_pages + 1, page_size, tokens[0].size), np.float32)
    pages[1:].reshape(num_pages * page_size, -1)[: len(tokens)] = tokens.reshape(len(tokens), -1)
    return pages


CASES = [
    Scores(0.3),
    Scores(0.3, window=5),
    Scores(0.5, soft_cap=1.5, window=16),
    Scores(0.4, window=300),
]


@pytest.mark.parametrize("scores", CASES)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_queries_see_their_window_and_nothing_before_it_is_read(
    scores: Scores, with_sinks: bool, page_size: int
) -> None:
    length, chunk = 640, 130
    k, v = (RNG.normal(size=(length, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    q = RNG.normal(size=(chunk, HEADS, DIM)).astype(np.float32)
    sinks = RNG.normal(size=HEADS).astype(np.float32) if with_sinks else None
    expected = dense(q, k, v, length - chunk, scores, sinks)

    # The table begins where the chunk's first query begins to see, which may be within a page.
    first_page = 0 if scores.window is None else max(length - chunk - scores.window + 1, 0) // page_size
    num_pages = length // page_size
    table = jnp.arange(first_page + 1, num_pages + 1, dtype=jnp.int32)[None]
    first = jnp.full(1, first_page, jnp.int32)
    reader = separate_arrays(*(jnp.array(paged(tokens, page_size, num_pages)) for tokens in (k, v)), DIM)
    held = None if sinks is None else jnp.array(sinks)

    rows = ExtendRows(*(jnp.array([n], jnp.int32) for n in (0, chunk, length - chunk)), table, first)
    extended = extend_attention(jnp.array(q), reader, rows, 256, scores, held)
    np.testing.assert_allclose(extended, expected, atol=1e-5)

    decoded = decode_attention(
        jnp.array(q[-1:]), reader, DecodeRows(jnp.array([length], jnp.int32), table, first), scores, held
    )
    np.testing.assert_allclose(decoded, expected[-1:], atol=1e-5)


def test_tiles_before_the_window_are_not_read() -> None:
    """With the whole row in the table, so that only skipping keeps what is not a number out."""
    length, page_size = 1024, 16
    k, v = (RNG.normal(size=(length, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    q = RNG.normal(size=(8, HEADS, DIM)).astype(np.float32)
    scores = Scores(0.3, window=32)
    expected = dense(q, k, v, length - 8, scores, None)
    k[:768], v[:768] = np.nan, np.nan
    reader = separate_arrays(*(jnp.array(paged(tokens, page_size, 64)) for tokens in (k, v)), DIM)

    table = jnp.arange(1, 65, dtype=jnp.int32)[None]
    rows = ExtendRows(*(jnp.array([n], jnp.int32) for n in (0, 8, length - 8)), table)

    np.testing.assert_allclose(extend_attention(jnp.array(q), reader, rows, 8, scores), expected, atol=1e-5)


def test_a_latent_is_key_and_value_of_every_head() -> None:
    length, width, value_dim, page_size = 40, 12, 8, 8
    latents = RNG.normal(size=(length, 1, width)).astype(np.float32)
    q = RNG.normal(size=(10, HEADS, width)).astype(np.float32)
    expected = dense(q, latents, latents[..., :value_dim], length - 10, Scores(0.2), None)
    pages = jnp.array(paged(latents, page_size, length // page_size))
    reader: PageReader = latent_array(pages, value_dim)
    table = jnp.arange(1, 6, dtype=jnp.int32)[None]

    rows = ExtendRows(*(jnp.array([n], jnp.int32) for n in (0, 10, length - 10)), table)
    np.testing.assert_allclose(extend_attention(jnp.array(q), reader, rows, 16, Scores(0.2)), expected, atol=1e-5)
    last = DecodeRows(jnp.array([length], jnp.int32), table)
    np.testing.assert_allclose(decode_attention(jnp.array(q[-1:]), reader, last, Scores(0.2)), expected[-1:], atol=1e-5)
