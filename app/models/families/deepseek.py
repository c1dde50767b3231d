"""deepseek_v3: latent attention; plain FFNs in the first layers, then experts in groups, with shared ones beside."""

from __future__ import annotations

from typing import Any

from app.config.model_config import ExpertsConfig, LatentShape, ModelConfig, RopeScaling
from app.models.decoder import Decoder, DecoderLayer, Ffn
from app.models.families.expert_plans import expert_ffn
from app.models.families.fields import Fields, model_config, rope, yarn_length
from app.models.families.parts import HeadRows, PairsApart, Rows
from app.models.families.transformer import around, gated_ffn, norm_of, norm_plan
from app.models.ffns.experts import SharedExpertFfn
from app.models.layers.latent_attention import LatentWeights
from app.models.layers.moe import GroupRouter
from app.models.layers.rope import Rope
from app.models.mixers.latent_attention import LatentAttention
from app.models.weight_plan import LAYER, TensorPlan, whole


def deepseek_v3(fields: Fields) -> ModelConfig:
    fields.require("hidden_act", default="silu", allowed=("silu",))
    fields.require("scoring_func", default="sigmoid", allowed=("sigmoid",))
    fields.require("topk_method", default="noaux_tc", allowed=("noaux_tc",))
    fields.require("moe_layer_freq", default=1, allowed=(1,))
    turning = rope(fields)
    latent = _latent(fields, turning["rope_scaling"])
    return model_config(
        fields,
        num_kv_heads=1,
        head_dim=latent.stored_dim,
        rotary_dim=latent.rope_dim,
        latent=latent,
        experts=_experts(fields),
        **turning,
    )


def _latent(fields: Fields, scaling: RopeScaling) -> LatentShape:
    plain, rotated = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    section = fields.section("rope_parameters" if fields.raw("rope_parameters") else "rope_scaling")
    strength = section.raw("mscale_all_dim") or 0
    steeper = yarn_length(scaling.factor, section.number("mscale_all_dim")) if strength else 1.0
    return LatentShape(
        latent_dim=fields.count("kv_lora_rank"),
        rope_dim=rotated,
        plain_dim=plain,
        value_dim=fields.count("v_head_dim"),
        query_rank=None if fields.raw("q_lora_rank") is None else fields.count("q_lora_rank"),
        score_scale=(plain + rotated) ** -0.5 * steeper**2,
        paired_rows=fields.switch("rope_interleave", True),
        biases=fields.switch("attention_bias", False),
    )


def _experts(fields: Fields) -> ExpertsConfig:
    size, num_experts = fields.count("moe_intermediate_size"), fields.count("n_routed_experts")
    num_groups, kept = fields.count("n_group"), fields.count("topk_group")
    if num_experts % num_groups or num_experts // num_groups < 2:
        raise fields.refusal("n_routed_experts", f"a multiple of n_group={num_groups}, at least twice that")
    if kept > num_groups:
        raise fields.refusal("topk_group", f"at most n_group={num_groups}")
    first = fields.raw("first_k_dense_replace") or 0
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=fields.count("num_experts_per_tok"),
        intermediate_size=size,
        normalised=fields.switch("norm_topk_prob", True),
        dense_layers=frozenset(range(min(first, fields.count("num_hidden_layers")))),
        shared_size=size * fields.count("n_shared_experts"),
        num_groups=num_groups,
        groups_per_token=kept,
        scale=fields.number("routed_scaling_factor"),
    )


def latent_transformer(config: ModelConfig) -> Decoder:
    """The decoder of a model with latent attention and, beside its dense layers, grouped experts."""
    assert config.latent is not None
    assert config.experts is not None
    return around(config, [_layer(config, config.latent, config.experts, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, latent: LatentShape, experts: ExpertsConfig, index: int) -> DecoderLayer:
    attention = LatentAttention(
        shape=latent,
        rope=Rope(latent.rope_dim, config.rope_theta, config.rope_scaling),
        plans=_attention_plans(config, latent),
    )
    before = norm_plan(config, f"{LAYER}.input_layernorm")
    after = norm_plan(config, f"{LAYER}.post_attention_layernorm")
    ffn = gated_ffn(config) if index in experts.dense_layers else _expert_ffn(config, experts)
    return DecoderLayer((attention,), ffn, norm_of(config), norms=(before, after))


def _expert_ffn(config: ModelConfig, experts: ExpertsConfig) -> Ffn:
    router = GroupRouter(
        experts_per_token=experts.experts_per_token,
        num_groups=experts.num_groups,
        groups_per_token=experts.groups_per_token,
        scale=experts.scale,
        normalised=experts.normalised,
    )
    return SharedExpertFfn(
        expert_ffn(config, experts, router, bias="e_score_correction_bias"),
        gated_ffn(config, f"{LAYER}.mlp.shared_experts", experts.shared_size),
    )


def _attention_plans(config: ModelConfig, latent: LatentShape) -> LatentWeights:
    module, width, heads = f"{LAYER}.self_attn", config.hidden_size, config.num_heads
    rank, query_rank = latent.latent_dim, latent.query_rank
    head_dim = latent.plain_dim + latent.rope_dim
    of_queries = PairsApart(heads, latent.rope_dim) if latent.paired_rows else whole
    of_latents = PairsApart(1, latent.rope_dim) if latent.paired_rows else whole
    kv_b, rows_a_head = f"{module}.kv_b_proj.weight", latent.plain_dim + latent.value_dim
    of_keys = HeadRows(Rows(heads, 0, latent.plain_dim))
    of_values = HeadRows(Rows(heads, latent.plain_dim, latent.value_dim))
    axes, stored = ("heads", "head_dim", "latent"), (heads * rows_a_head, rank)
    plans: dict[str, Any] = {
        "q": TensorPlan(
            f"{module}.q_proj.weight" if query_rank is None else f"{module}.q_b_proj.weight",
            ("heads", "embed"),
            (heads * head_dim, query_rank or width),
            of_queries,
        ),
        "latent": TensorPlan(
            f"{module}.kv_a_proj_with_mqa.weight", ("latent", "embed"), (latent.stored_dim, width), of_latents
        ),
        "latent_norm": TensorPlan(f"{module}.kv_a_layernorm.weight", ("latent",), (rank,)),
        "key": TensorPlan(kv_b, axes, (heads, latent.plain_dim, rank), of_keys, stored),
        "value": TensorPlan(kv_b, axes, (heads, latent.value_dim, rank), of_values, stored),
        "out": TensorPlan(f"{module}.o_proj.weight", ("embed", "heads"), (width, heads * latent.value_dim)),
    }
    if query_rank is not None:
        plans["q_latent"] = TensorPlan(f"{module}.q_a_proj.weight", ("latent", "embed"), (query_rank, width))
        plans["q_norm"] = TensorPlan(f"{module}.q_a_layernorm.weight", ("latent",), (query_rank,))
    if latent.biases:
        plans["latent_bias"] = TensorPlan(
            f"{module}.kv_a_proj_with_mqa.bias", ("latent",), (latent.stored_dim,), of_latents
        )
        plans["out_bias"] = TensorPlan(f"{module}.o_proj.bias", ("embed",), (width,))
        if query_rank is not None:
            plans["q_latent_bias"] = TensorPlan(f"{module}.q_a_proj.bias", ("latent",), (query_rank,))
    return LatentWeights(**plans)
