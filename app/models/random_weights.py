"""Weights out of a random generator, for tests and demonstrations of models whose weights are not at hand."""

from __future__ import annotations

import zlib

import numpy as np

from app.config.model_config import ModelConfig


class RandomWeights:
    """A WeightsSource: every tensor is a function of (seed, name) and the configuration alone.

    Matrices are scaled so that activations keep their size through the layers; norms lie around 1, biases around 0.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed

    def tensor(self, name: str) -> np.ndarray:
        """float32; Hugging Face names and shapes. Raises KeyError for a name that this family does not have."""
        *_, module, kind = name.split(".")
        shape = self._shapes()[module]
        generator = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        if kind == "bias":
            return generator.normal(0, 0.1, shape[0]).astype(np.float32)
        if len(shape) == 1:
            return generator.normal(1, 0.1, shape).astype(np.float32)
        return generator.normal(0, shape[1] ** -0.5, shape).astype(np.float32)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        width = config.hidden_size
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        norms = ("input_layernorm", "post_attention_layernorm", "norm")
        return {
            "embed_tokens": (config.vocab_size, width),
            "lm_head": (config.vocab_size, width),
            "q_proj": (heads, width),
            "k_proj": (kv_heads, width),
            "v_proj": (kv_heads, width),
            "o_proj": (width, heads),
            "gate_proj": (config.intermediate_size, width),
            "up_proj": (config.intermediate_size, width),
            "down_proj": (width, config.intermediate_size),
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
            **dict.fromkeys(norms, (width,)),
        }
