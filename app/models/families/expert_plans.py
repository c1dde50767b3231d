"""Mixtures of experts as checkpoints have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.config.model_config import ExpertsConfig, ModelConfig
from app.models.ffns.experts import ExpertFfn, ExpertFfnWeights
from app.models.layers.moe import ClampedGate, ExpertWeights, Router, SoftmaxRouter, silu_gate
from app.models.weight_plan import EXPERT, LAYER, TensorPlan

_MATRIX, _BACK = ("experts", "embed", "expert_ffn"), ("experts", "expert_ffn", "embed")
_STEEPNESS = 1.702  # of gpt_oss's gate


def expert_ffn(config: ModelConfig, experts: ExpertsConfig, router: Router, bias: str | None = None) -> ExpertFfn:
    """With a tensor for each expert's matrix, and SwiGLU. bias: the name of the router's, beside its weight."""
    module = f"{LAYER}.mlp"
    count, inner, width = experts.num_experts, experts.intermediate_size, config.hidden_size
    name = f"{module}.experts.{EXPERT}.{{}}_proj.weight"
    plans: dict[str, Any] = {
        "gate": TensorPlan(name.replace("{}", "gate"), _MATRIX, (count, width, inner), _transposed, (inner, width)),
        "up": TensorPlan(name.replace("{}", "up"), _MATRIX, (count, width, inner), _transposed, (inner, width)),
        "down": TensorPlan(name.replace("{}", "down"), _BACK, (count, inner, width), _transposed, (width, inner)),
    }
    weights = ExpertFfnWeights(
        TensorPlan(f"{module}.gate.weight", ("expert", "embed"), (count, width)),
        ExpertWeights(**plans),
        None if bias is None else TensorPlan(f"{module}.gate.{bias}", ("expert",), (count,)),
    )
    return ExpertFfn(router, silu_gate, weights)


def softmax_router(experts: ExpertsConfig) -> SoftmaxRouter:
    return SoftmaxRouter(experts.experts_per_token, experts.normalised)


def fused_expert_ffn(config: ModelConfig, experts: ExpertsConfig, gate_limit: float) -> ExpertFfn:
    """gpt_oss: all experts in one tensor, (in, out), gates and ups taking turns in the columns; biases everywhere."""
    module = f"{LAYER}.mlp"
    count, inner, width = experts.num_experts, experts.intermediate_size, config.hidden_size
    both, out = f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"
    stored = (count, width, 2 * inner)
    plans: dict[str, Any] = {
        "gate": TensorPlan(both, _MATRIX, (count, width, inner), _even, stored),
        "up": TensorPlan(both, _MATRIX, (count, width, inner), _odd, stored),
        "down": TensorPlan(out, _BACK, (count, inner, width)),
        "gate_bias": TensorPlan(f"{both}_bias", ("experts", "expert_ffn"), (count, inner), _even, (count, 2 * inner)),
        "up_bias": TensorPlan(f"{both}_bias", ("experts", "expert_ffn"), (count, inner), _odd, (count, 2 * inner)),
        "down_bias": TensorPlan(f"{out}_bias", ("experts", "embed"), (count, width)),
    }
    return ExpertFfn(
        softmax_router(experts),
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
