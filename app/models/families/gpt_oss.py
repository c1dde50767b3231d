"""gpt_oss: windows and full attention take turns, sinks in every head, and nothing but experts."""

from __future__ import annotations

from app.config.model_config import Component, ExpertsConfig, ModelConfig
from app.models.families.fields import Fields, model_config, rope, windows


def gpt_oss(fields: Fields) -> ModelConfig:
    fields.require("hidden_act", default="silu", allowed=("silu",))
    fields.require("swiglu_alpha", default=1.702, allowed=(1.702,))
    if fields.raw("rope_parameters") is None and fields.raw("rope_scaling") is None:
        raise fields.refusal("rope_scaling", "a rope type; every published file states yarn")
    layers = range(fields.count("num_hidden_layers"))
    biases = fields.switch("attention_bias", True)
    experts = ExpertsConfig(
        num_experts=fields.count("num_local_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("intermediate_size"),
        gate_limit=fields.number("swiglu_limit", 7.0),
    )
    by_default = tuple(Component.FULL if layer % 2 else Component.SWA for layer in layers)
    return model_config(
        fields,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        attention_bias=biases,
        attention_out_bias=biases,
        attention_sinks=True,
        experts=experts,
        **rope(fields, default_theta=150_000.0),
        **windows(fields, fields.count("sliding_window"), by_default),
    )
