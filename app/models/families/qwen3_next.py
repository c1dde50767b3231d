"""qwen3_next: a gated delta net in most layers and gated full attention in the others; experts, one of them shared."""

from __future__ import annotations

from typing import Any

from app.config.model_config import Component, ExpertsConfig, GatedDeltaShape, ModelConfig
from app.models.decoder import Decoder, DecoderLayer, Ffn
from app.models.families.expert_plans import expert_ffn, softmax_router
from app.models.families.fields import Fields, model_config, rope_of
from app.models.families.parts import HeadRows, Rows, Taps
from app.models.families.transformer import around, gated_ffn, grouped_attention, norm_of, norm_plan
from app.models.ffns.experts import SharedExpertFfn
from app.models.layers.gated_delta import GatedDeltaNet, GatedDeltaWeights
from app.models.layers.recurrence import DECAY_DTYPE
from app.models.mixers.recurrence import RecurrentMixer
from app.models.weight_plan import LAYER, TensorPlan

_KINDS = {"full_attention": Component.FULL, "linear_attention": Component.RECURRENT}


def qwen3_next(fields: Fields) -> ModelConfig:
    fields.require("hidden_act", default="silu", allowed=("silu",))
    fields.require("attention_bias", default=False, allowed=(False,))
    name = "rope_parameters" if fields.raw("rope_parameters") else "rope_scaling"
    section = fields.section(name)
    turning = rope_of(fields, name, section)
    head_dim = fields.count("head_dim", 256)
    rotated = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 0.25))
    recurrence = GatedDeltaShape(
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        num_taps=fields.count("linear_conv_kernel_dim"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )
    if recurrence.num_value_heads % recurrence.num_key_heads:
        raise fields.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads={recurrence.num_key_heads}")
    kinds = _kinds(fields)
    return model_config(
        fields,
        head_dim=head_dim,
        norm_offset=1.0,
        qk_norm=True,
        attention_gate=True,
        rope_theta=turning.theta,
        rope_scaling=turning.scaling,
        rotary_dim=int(head_dim * rotated),
        experts=_experts(fields),
        components=frozenset(kinds),
        layer_components=tuple(frozenset({kind}) for kind in kinds),
        gated_delta=recurrence,
        recurrent_state=recurrence.states,
    )


def _kinds(fields: Fields) -> tuple[Component, ...]:
    """Of each layer."""
    num_layers, types = fields.count("num_hidden_layers"), fields.raw("layer_types")
    if types is None:
        every = fields.count("full_attention_interval", 4)
        return tuple(Component.RECURRENT if (layer + 1) % every else Component.FULL for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(_KINDS):
        raise fields.refusal("layer_types", f"one of {', '.join(_KINDS)} for each of {num_layers} layers")
    return tuple(_KINDS[kind] for kind in types)


def _experts(fields: Fields) -> ExpertsConfig | None:
    """None for a model whose every layer has a plain FFN."""
    if not fields.raw("num_experts"):
        return None
    every = fields.count("decoder_sparse_step", 1)
    layers = range(fields.count("num_hidden_layers"))
    plain = fields.layer_numbers("mlp_only_layers") | {layer for layer in layers if (layer + 1) % every}
    return ExpertsConfig(
        num_experts=fields.count("num_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        normalised=fields.switch("norm_topk_prob", True),
        dense_layers=frozenset(plain),
        shared_size=fields.count("shared_expert_intermediate_size"),
    )


def delta_and_attention(config: ModelConfig) -> Decoder:
    """The decoder of a model whose layers have either a gated delta net or full attention."""
    return around(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> DecoderLayer:
    (component,) = config.components_of(index)
    mixer = _delta_net(config) if component is Component.RECURRENT else grouped_attention(config, component)
    before = norm_plan(config, f"{LAYER}.input_layernorm")
    after = norm_plan(config, f"{LAYER}.post_attention_layernorm")
    return DecoderLayer((mixer,), _ffn(config, index), norm_of(config), norms=(before, after))


def _ffn(config: ModelConfig, index: int) -> Ffn:
    experts, module = config.experts, f"{LAYER}.mlp"
    if experts is None or index in experts.dense_layers:
        return gated_ffn(config)
    return SharedExpertFfn(
        expert_ffn(config, experts, softmax_router(experts)),
        gated_ffn(config, f"{module}.shared_expert", experts.shared_size),
        TensorPlan(f"{module}.shared_expert_gate.weight", ("expert", "embed"), (1, config.hidden_size)),
    )


def _delta_net(config: ModelConfig) -> RecurrentMixer:
    assert config.gated_delta is not None
    plans = _delta_plans(config.hidden_size, config.gated_delta)
    return RecurrentMixer(layer=GatedDeltaNet, shape=config.gated_delta, plans=plans)


def _delta_plans(width: int, shape: GatedDeltaShape) -> GatedDeltaWeights:
    """Two tensors have everything that is multiplied with the input, key head by key head; one has all convolutions."""
    module = f"{LAYER}.linear_attn"
    key_heads, value_heads = shape.num_key_heads, shape.num_value_heads
    keys, values, group = key_heads * shape.key_dim, value_heads * shape.value_dim, value_heads // key_heads
    of_key, of_value = shape.key_dim, group * shape.value_dim  # rows that a key head has

    def product(tensor: str, first: int, count: int, rows_a_head: int) -> TensorPlan:
        own, stored = Rows(key_heads, first, count), (key_heads * rows_a_head, width)
        return TensorPlan(f"{module}.{tensor}.weight", ("heads", "embed"), (key_heads * count, width), own, stored)

    def taps(first: int, count: int) -> TensorPlan:
        stored = (2 * keys + values, 1, shape.num_taps)
        shown = (shape.num_taps, count)
        return TensorPlan(f"{module}.conv1d.weight", ("taps", "heads"), shown, Taps(first, count), stored)

    def by_key_head(tensor: str) -> TensorPlan:
        own = HeadRows(Rows(key_heads, 0, group))
        shape = (key_heads, group)
        return TensorPlan(f"{module}.{tensor}", ("heads", "group"), shape, own, (value_heads,), dtype=DECAY_DTYPE)

    both, all_four = 2 * group, 2 * (of_key + of_value)
    plans: dict[str, Any] = {
        "q": product("in_proj_qkvz", 0, of_key, all_four),
        "k": product("in_proj_qkvz", of_key, of_key, all_four),
        "v": product("in_proj_qkvz", 2 * of_key, of_value, all_four),
        "z": product("in_proj_qkvz", 2 * of_key + of_value, of_value, all_four),
        "rate": product("in_proj_ba", 0, group, both),
        "step": product("in_proj_ba", group, group, both),
        "q_conv": taps(0, keys),
        "k_conv": taps(keys, keys),
        "v_conv": taps(2 * keys, values),
        "step_bias": by_key_head("dt_bias"),
        "log_speed": by_key_head("A_log"),
        "norm": TensorPlan(f"{module}.norm.weight", ("head_dim",), (shape.value_dim,)),
        "out": TensorPlan(f"{module}.out_proj.weight", ("embed", "heads"), (width, values)),
    }
    return GatedDeltaWeights(**plans)
