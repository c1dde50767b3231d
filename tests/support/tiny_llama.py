"""A Llama small enough for any test, with random weights, for containers that run the real model runner."""

from __future__ import annotations

from typing import Any

from dependency_injector import providers

from app.config.model_config import ModelConfig
from app.models.random_weights import RandomWeights
from app.providers.testing import Override, fake_model

_SHAPE: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "context_length": 256,
}


def tiny_llama(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**_SHAPE, **changes})


def files_of(model: ModelConfig, seed: int = 0) -> dict[str, Override]:
    """Overrides that stand for the model's files: configuration, weights, tokenizer."""
    fakes = fake_model(model)
    return {
        "checkpoint": lambda _: providers.Object(RandomWeights(model, seed=seed)),
        **{name: fakes[name] for name in ("base_model_config", "tokenizer", "detokenizer")},
    }
