"""falcon_h1: full attention and a state-space layer side by side in every layer, with constants in many places."""

from __future__ import annotations

import math
from typing import Any

from app.config.model_config import Component, ModelConfig, StateSpaceScales, StateSpaceShape
from app.models.decoder import Decoder, DecoderLayer
from app.models.families.fields import Fields, model_config, rope
from app.models.families.parts import Rows, Taps
from app.models.families.transformer import around, gated_ffn, grouped_attention, norm_of, norm_plan
from app.models.layers.recurrence import DECAY_DTYPE
from app.models.layers.state_space import StateSpace, StateSpaceWeights
from app.models.mixers.recurrence import RecurrentMixer
from app.models.weight_plan import LAYER, TensorPlan

_INFINITY = {"__float__": "Infinity"}  # which JSON has no number for


def falcon_h1(fields: Fields) -> ModelConfig:
    fields.require("hidden_act", default="silu", allowed=("silu",))
    for bias in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.require(bias, default=False, allowed=(False,))
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    # Queries, keys and values are products with the input times one constant, keys times another: scores take the
    # square of the one and the other, what is attended takes the one.
    into = fields.number("attention_in_multiplier", 1.0)
    gate, out = _numbers(fields, "mlp_multipliers", 2)
    recurrence = _state_space(fields)
    kinds = frozenset({Component.FULL, Component.RECURRENT})
    return model_config(
        fields,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        head_dim=head_dim,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        attention_scale=head_dim**-0.5 * into**2 * fields.number("key_multiplier", 1.0),
        attention_out_scale=into * fields.number("attention_out_multiplier", 1.0),
        ffn_gate_scale=gate,
        ffn_out_scale=out,
        components=kinds,
        state_space=recurrence,
        recurrent_state=recurrence.states,
        **rope(fields),
    )


def _state_space(fields: Fields) -> StateSpaceShape:
    inner = fields.raw("mamba_d_ssm") or fields.count("mamba_expand", 2) * fields.count("hidden_size")
    num_heads, num_groups = fields.count("mamba_n_heads"), fields.count("mamba_n_groups", 1)
    if inner % num_heads or fields.raw("mamba_d_head") not in (None, "auto", inner // num_heads):
        raise fields.refusal("mamba_d_head", f"a head's share of {inner} channels on {num_heads} heads")
    if num_heads % num_groups:
        raise fields.refusal("mamba_n_groups", f"a divisor of mamba_n_heads={num_heads}")
    least, greatest = _numbers(fields, "time_step_limit", 2, (0.0, math.inf))
    gate, x, into, read, step = _numbers(fields, "ssm_multipliers", 5)
    taken = fields.number("ssm_in_multiplier", 1.0)
    return StateSpaceShape(
        num_heads=num_heads,
        head_dim=inner // num_heads,
        num_groups=num_groups,
        state_dim=fields.count("mamba_d_state", 256),
        num_taps=fields.count("mamba_d_conv", 4),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        normed=fields.switch("mamba_rms_norm", False),
        gate_after_norm=fields.switch("mamba_norm_before_gate", True),
        conv_bias=fields.switch("mamba_conv_bias", True),
        least_step=least,
        greatest_step=greatest,
        scales=StateSpaceScales(
            gate=taken * gate,
            x=taken * x,
            into=taken * into,
            read=taken * read,
            step=taken * step,
            out=fields.number("ssm_out_multiplier", 1.0),
        ),
    )


def _numbers(fields: Fields, name: str, count: int, absent: tuple[float, ...] = ()) -> tuple[float, ...]:
    """A list of so many numbers; ones when absent, where nothing else is said."""
    found = fields.raw(name)
    if found is None:
        return absent or (1.0,) * count
    if isinstance(found, list):
        found = [math.inf if value == _INFINITY else value for value in found]
    if not isinstance(found, list) or len(found) != count or not all(isinstance(value, int | float) for value in found):
        raise fields.refusal(name, f"{count} numbers")
    return tuple(float(value) for value in found)


def attention_beside_state_space(config: ModelConfig) -> Decoder:
    """The decoder of a model whose every layer has both, over the same normed input."""
    shape = config.state_space
    assert shape is not None
    space = RecurrentMixer(layer=StateSpace, shape=shape, plans=_space_plans(config.hidden_size, shape))
    before = norm_plan(config, f"{LAYER}.input_layernorm")
    after = norm_plan(config, f"{LAYER}.pre_ff_layernorm")
    layer = DecoderLayer(
        (space, grouped_attention(config, Component.FULL)),
        gated_ffn(config, f"{LAYER}.feed_forward"),
        norm_of(config),
        norms=(before, after),
    )
    return around(config, (layer,) * config.num_layers, final_norm="model.final_layernorm")


def _space_plans(width: int, shape: StateSpaceShape) -> StateSpaceWeights:
    """One tensor has everything that is multiplied with the input, and one all convolutions."""
    module = f"{LAYER}.mamba"
    heads, inner, shared = shape.num_heads, shape.num_heads * shape.head_dim, shape.num_groups * shape.state_dim
    channels = {"x": (0, inner, "heads"), "into": (inner, shared, "state"), "read": (inner + shared, shared, "state")}
    num_channels, num_rows = inner + 2 * shared, 2 * inner + 2 * shared + heads

    def product(first: int, count: int, axis: str) -> TensorPlan:
        own, stored = Rows(1, first, count), (num_rows, width)
        return TensorPlan(f"{module}.in_proj.weight", (axis, "embed"), (count, width), own, stored)

    def of_heads(tensor: str) -> TensorPlan:
        return TensorPlan(f"{module}.{tensor}", ("heads",), (heads,), dtype=DECAY_DTYPE)

    plans: dict[str, Any] = {
        "gate": product(0, inner, "heads"),
        "step": product(num_rows - heads, heads, "heads"),
        "step_bias": of_heads("dt_bias"),
        "log_speed": of_heads("A_log"),
        "skip": of_heads("D"),
        "out": TensorPlan(f"{module}.out_proj.weight", ("embed", "heads"), (width, inner)),
    }
    for name, (first, count, axis) in channels.items():
        plans[name] = product(inner + first, count, axis)
        stored, taps = (num_channels, 1, shape.num_taps), (shape.num_taps, count)
        plans[f"{name}_conv"] = TensorPlan(f"{module}.conv1d.weight", ("taps", axis), taps, Taps(first, count), stored)
        if shape.conv_bias:
            own = Rows(1, first, count)
            plans[f"{name}_conv_bias"] = TensorPlan(f"{module}.conv1d.bias", (axis,), (count,), own, (num_channels,))
    if shape.normed:
        plans["norm"] = TensorPlan(f"{module}.norm.weight", ("heads",), (inner,))
    return StateSpaceWeights(**plans)
