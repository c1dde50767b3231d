"""Weights out of a random generator, for tests and demonstrations of models whose weights are not at hand."""

from __future__ import annotations

import zlib

import numpy as np

from app.config.model_config import ModelConfig
from app.hicache.identities import random_weights_digest
from app.models.families.table import decoder_of
from app.models.weight_plan import EXPERT


class RandomWeights:
    """A WeightsSource: every tensor is a function of (seed, name) and the configuration alone.

    Matrices are scaled so that activations keep their size through the layers; norms lie around 1, biases around 0.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """Raises ConfigError for a family without a decoder."""
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        for plan, layer in decoder_of(config).plans():
            for expert in range(plan.shape[0] if EXPERT in plan.name else 1):
                self._shapes[plan.name.format(layer=layer, expert=expert)] = plan.tensor_shape

    @property
    def digest(self) -> str:
        """Equal only for equal weights of one configuration."""
        return random_weights_digest(self._seed)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(self._shapes)

    def tensor(self, name: str) -> np.ndarray:
        """float32; Hugging Face names and shapes. Raises KeyError for a name that this model does not have."""
        shape = self._shapes[name]
        generator = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        if name.endswith("bias"):
            return generator.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            return generator.normal(1, 0.1, shape).astype(np.float32)
        return generator.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
