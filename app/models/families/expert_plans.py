"""Mixtures of experts as checkpoints have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.config.model_config import ExpertsConfig, ModelConfig
from app.models.ffns.experts import ExpertFfn, ExpertFfnWeights
from app.models.layers.moe import ClampedGate, ExpertWeights, SoftmaxRouter, silu_gate
from app.models.weight_plan import EXPERT, LAYER, TensorPlan

_MATRIX, _BACK = ("experts", "expert_ffn", "embed"), ("experts", "embed", "expert_ffn")
_STEEPNESS = 1.702  # of gpt_oss's gate


def expert_ffn(config: ModelConfig, experts: ExpertsConfig) -> ExpertFfn:
    """With a tensor for each expert's matrix, and SwiGLU."""
    module = f"{LAYER}.mlp"
    count, inner, width = experts.num_experts, experts.intermediate_size, config.hidden_size
    plans: dict[str, Any] = {
        "gate": TensorPlan(f"{module}.experts.{EXPERT}.gate_proj.weight", _MATRIX, (count, inner, width)),
        "up": TensorPlan(f"{module}.experts.{EXPERT}.up_proj.weight", _MATRIX, (count, inner, width)),
        "down": TensorPlan(f"{module}.experts.{EXPERT}.down_proj.weight", _BACK, (count, width, inner)),
    }
    router = TensorPlan(f"{module}.gate.weight", ("expert", "embed"), (count, width))
    return ExpertFfn(
        SoftmaxRouter(experts.experts_per_token, experts.normalised),
        silu_gate,
        ExpertFfnWeights(router, ExpertWeights(**plans)),
    )


def fused_expert_ffn(config: ModelConfig, experts: ExpertsConfig, gate_limit: float) -> ExpertFfn:
    """gpt_oss: all experts in one tensor, (in, out), gates and ups taking turns in the columns; biases everywhere."""
    module = f"{LAYER}.mlp"
    count, inner, width = experts.num_experts, experts.intermediate_size, config.hidden_size
    both, out = f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"
    plans: dict[str, Any] = {
        "gate": TensorPlan(both, _MATRIX, (count, inner, width), _even_columns),
        "up": TensorPlan(both, _MATRIX, (count, inner, width), _odd_columns),
        "down": TensorPlan(out, _BACK, (count, width, inner), _transposed),
        "gate_bias": TensorPlan(f"{both}_bias", ("experts", "expert_ffn"), (count, inner), _even),
        "up_bias": TensorPlan(f"{both}_bias", ("experts", "expert_ffn"), (count, inner), _odd),
        "down_bias": TensorPlan(f"{out}_bias", ("experts", "embed"), (count, width)),
    }
    return ExpertFfn(
        SoftmaxRouter(experts.experts_per_token, experts.normalised),
        ClampedGate(gate_limit, _STEEPNESS),
        ExpertFfnWeights(
            TensorPlan(f"{module}.router.weight", ("expert", "embed"), (count, width)),
            ExpertWeights(**plans),
            TensorPlan(f"{module}.router.bias", ("expert",), (count,)),
        ),
    )


def _even(tensor: np.ndarray) -> np.ndarray:
    return tensor[..., ::2]


def _odd(tensor: np.ndarray) -> np.ndarray:
    return tensor[..., 1::2]


def _transposed(tensor: np.ndarray) -> np.ndarray:
    return tensor.swapaxes(-1, -2)


def _even_columns(tensor: np.ndarray) -> np.ndarray:
    return _transposed(_even(tensor))


def _odd_columns(tensor: np.ndarray) -> np.ndarray:
    return _transposed(_odd(tensor))
