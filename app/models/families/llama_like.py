"""llama, mistral, qwen2, qwen3 and qwen3_moe: they differ by biases, norms of heads, windows and experts."""

from __future__ import annotations

from typing import Any

from app.config.model_config import Component, ExpertsConfig, ModelConfig
from app.models.families.fields import Fields, model_config, rope, shorter_window, windows


def llama(fields: Fields) -> ModelConfig:
    fields.require("attention_bias", default=False, allowed=(False,))
    fields.require("mlp_bias", default=False, allowed=(False,))
    return _model(fields)


def mistral(fields: Fields) -> ModelConfig:
    fields.require("layer_types", default=None, allowed=(None,))
    every_layer = (Component.SWA,) * fields.count("num_hidden_layers")
    return _model(fields, **windows(fields, shorter_window(fields), every_layer))


def qwen2(fields: Fields) -> ModelConfig:
    return _model(fields, attention_bias=True, **_late_windows(fields))


def qwen3(fields: Fields) -> ModelConfig:
    fields.require("attention_bias", default=False, allowed=(False,))
    return _model(fields, qk_norm=True, **_late_windows(fields))


def qwen3_moe(fields: Fields) -> ModelConfig:
    fields.require("attention_bias", default=False, allowed=(False,))
    fields.require("use_sliding_window", default=False, allowed=(False,))
    every = fields.count("decoder_sparse_step", 1)
    layers = range(fields.count("num_hidden_layers"))
    plain = fields.layer_numbers("mlp_only_layers") | {layer for layer in layers if (layer + 1) % every}
    # Newer files have the count of experts under the name that other families use.
    num_experts = fields.count("num_experts" if fields.raw("num_experts") is not None else "num_local_experts")
    experts = ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        normalised=fields.switch("norm_topk_prob", False),
        dense_layers=frozenset(plain),
    )
    return _model(fields, qk_norm=True, experts=experts)


def _model(fields: Fields, **family: Any) -> ModelConfig:
    fields.require("hidden_act", default="silu", allowed=("silu",))
    return model_config(fields, **rope(fields), **family)


def _late_windows(fields: Fields) -> dict[str, Any]:
    """Qwen: with use_sliding_window, the layers from max_window_layers on have a window."""
    if not fields.switch("use_sliding_window", False):
        return {}
    first = fields.raw("max_window_layers") or 0
    layers = range(fields.count("num_hidden_layers"))
    by_default = tuple(Component.SWA if layer >= first else Component.FULL for layer in layers)
    return windows(fields, shorter_window(fields), by_default)
