"""The Llama family once more, densely and in float64 numpy: no cache, no pages, one sequence. The oracle of the tests.

Written from the papers and the models' cards, not from the code under test; they share the names of weights only.
"""

from __future__ import annotations

import math

import numpy as np

from app.config.model_config import ModelConfig
from app.models.random_weights import RandomWeights


def dense_logits(config: ModelConfig, weights: RandomWeights, token_ids: np.ndarray) -> np.ndarray:
    """(n,) ids -> (n, vocab_size) float64: the logits after each token."""

    def w(name: str) -> np.ndarray:
        return weights.tensor(name).astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w(name)

    x = w("model.embed_tokens.weight")[token_ids]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        x = x + _attention(config, w, norm, layer, norm(x, f"{layer}.input_layernorm.weight"))
        inner = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = inner @ w(f"{layer}.mlp.gate_proj.weight").T
        up = inner @ w(f"{layer}.mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w(f"{layer}.mlp.down_proj.weight").T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w(head).T


def _attention(config, w, norm, layer: str, x: np.ndarray) -> np.ndarray:
    count = x.shape[0]
    projected = {}
    for kind, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        out = x @ w(f"{layer}.self_attn.{kind}_proj.weight").T
        if config.attention_bias:
            out = out + w(f"{layer}.self_attn.{kind}_proj.bias")
        out = out.reshape(count, heads, config.head_dim)
        if config.qk_norm and kind != "v":
            out = norm(out, f"{layer}.self_attn.{kind}_norm.weight")
        projected[kind] = out if kind == "v" else _turn(config, out)
    outputs = []
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        scores = projected["q"][:, head] @ projected["k"][:, kv_head].T / math.sqrt(config.head_dim)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        outputs.append(probabilities @ projected["v"][:, kv_head])
    return np.concatenate(outputs, -1) @ w(f"{layer}.self_attn.o_proj.weight").T


def _turn(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Each pair (i, i + half) as a complex number, turned by position * frequency."""
    half = config.head_dim // 2
    frequencies = np.array([_frequency(config, i) for i in range(half)])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(np.arange(x.shape[0]), frequencies))[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def _frequency(config: ModelConfig, pair: int) -> float:
    frequency = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context_length / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_context_length / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
