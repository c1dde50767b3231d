"""The decoder of families with attention in every layer: what a ModelConfig's switches say, as layers and weights."""

from __future__ import annotations

from collections.abc import Sequence

from app.config.model_config import Component, ModelConfig
from app.errors import ConfigError
from app.models.decoder import Decoder, DecoderLayer, Ffn
from app.models.families.expert_plans import expert_ffn, fused_expert_ffn, softmax_router
from app.models.families.parts import Rows
from app.models.ffns.gated import GatedFfn, GatedWeights
from app.models.layers.attention import Scores
from app.models.layers.norms import RmsNorm
from app.models.layers.rope import Rope
from app.models.mixers.grouped_attention import AttentionWeights, GroupedAttention
from app.models.weight_plan import LAYER, TensorPlan


def transformer(config: ModelConfig) -> Decoder:
    return around(config, [_layer(config, index) for index in range(config.num_layers)])


def around(config: ModelConfig, layers: Sequence[DecoderLayer], final_norm: str = "model.norm") -> Decoder:
    """The decoder that has these layers. final_norm: its module."""
    return Decoder(
        layers=tuple(layers),
        embedding=embedding_plan(config),
        head=head_plan(config),
        final_norm=norm_plan(config, final_norm),
        norm=norm_of(config),
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        logit_soft_cap=config.logit_soft_cap,
    )


def embedding_plan(config: ModelConfig) -> TensorPlan:
    return TensorPlan("model.embed_tokens.weight", ("vocab", "embed"), (config.vocab_size, config.hidden_size))


def head_plan(config: ModelConfig) -> TensorPlan | None:
    """None where the embedding is the head."""
    if config.tie_word_embeddings:
        return None
    return TensorPlan("lm_head.weight", ("vocab", "embed"), (config.vocab_size, config.hidden_size))


def norm_of(config: ModelConfig) -> RmsNorm:
    return RmsNorm(config.rms_norm_eps, config.norm_offset)


def norm_plan(config: ModelConfig, module: str) -> TensorPlan:
    return TensorPlan(f"{module}.weight", ("embed",), (config.hidden_size,))


def grouped_attention(config: ModelConfig, component: Component) -> GroupedAttention:
    """The attention of layers with this component."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    window = config.sliding_window if component is Component.SWA else None
    return GroupedAttention(
        head_dim=config.head_dim,
        rope=_rope(config, component),
        scores=Scores(scale=scale, soft_cap=config.attention_soft_cap, window=window),
        head_norm=norm_of(config),
        out_scale=config.attention_out_scale,
        plans=_attention_plans(config),
    )


def gated_ffn(config: ModelConfig, module: str = f"{LAYER}.mlp", size: int | None = None) -> GatedFfn:
    """size: of its inner products, where it is not the model's intermediate size."""
    width, inner = config.hidden_size, size or config.intermediate_size
    plans = GatedWeights(
        gate=TensorPlan(f"{module}.gate_proj.weight", ("ffn", "embed"), (inner, width)),
        up=TensorPlan(f"{module}.up_proj.weight", ("ffn", "embed"), (inner, width)),
        down=TensorPlan(f"{module}.down_proj.weight", ("embed", "ffn"), (width, inner)),
    )
    return GatedFfn(config.activation, plans, config.ffn_gate_scale, config.ffn_out_scale)


def _layer(config: ModelConfig, index: int) -> DecoderLayer:
    norm = norm_of(config)
    kinds = config.components_of(index)
    if len(kinds) != 1 or Component.RECURRENT in kinds:
        raise ConfigError(field="model", value=config.architecture, allowed=f"layer {index} has one kind of attention")
    (component,) = kinds
    before = norm_plan(config, f"{LAYER}.input_layernorm")
    attention = (grouped_attention(config, component),)
    after = norm_plan(config, f"{LAYER}.post_attention_layernorm")
    if not config.post_norms:
        return DecoderLayer(attention, _ffn(config, index), norm, norms=(before, after))
    around_ffn = [norm_plan(config, f"{LAYER}.{place}_feedforward_layernorm") for place in ("pre", "post")]
    return DecoderLayer(
        attention, _ffn(config, index), norm, norms=(before, around_ffn[0]), post_norms=(after, around_ffn[1])
    )


def _ffn(config: ModelConfig, index: int) -> Ffn:
    if config.experts is None or index in config.experts.dense_layers:
        return gated_ffn(config)
    if config.experts.gate_limit is not None:
        return fused_expert_ffn(config, config.experts, config.experts.gate_limit)
    return expert_ffn(config, config.experts, softmax_router(config.experts))


def _rope(config: ModelConfig, component: Component) -> Rope:
    dim = config.rotary_dim or config.head_dim
    if component is Component.SWA and config.window_rope_theta is not None:
        return Rope(dim, config.window_rope_theta)
    return Rope(dim, config.rope_theta, config.rope_scaling)


def _attention_plans(config: ModelConfig) -> AttentionWeights[TensorPlan]:
    module, width = f"{LAYER}.self_attn", config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    plans = AttentionWeights(
        q=TensorPlan(f"{module}.q_proj.weight", ("heads", "embed"), (heads, width)),
        k=TensorPlan(f"{module}.k_proj.weight", ("kv_heads", "embed"), (kv_heads, width)),
        v=TensorPlan(f"{module}.v_proj.weight", ("kv_heads", "embed"), (kv_heads, width)),
        o=TensorPlan(f"{module}.o_proj.weight", ("embed", "heads"), (width, heads)),
    )
    if config.attention_bias:
        plans = plans._replace(
            q_bias=TensorPlan(f"{module}.q_proj.bias", ("heads",), (heads,)),
            k_bias=TensorPlan(f"{module}.k_proj.bias", ("kv_heads",), (kv_heads,)),
            v_bias=TensorPlan(f"{module}.v_proj.bias", ("kv_heads",), (kv_heads,)),
        )
    if config.attention_gate:  # in the rows of the queries' matrix, after each head's
        both = (2 * heads, width)
        own, gate = (Rows(config.num_heads, part * config.head_dim, config.head_dim) for part in (0, 1))
        plans = plans._replace(
            q=TensorPlan(f"{module}.q_proj.weight", ("heads", "embed"), (heads, width), own, both),
            gate=TensorPlan(f"{module}.q_proj.weight", ("heads", "embed"), (heads, width), gate, both),
        )
    if config.attention_out_bias:
        plans = plans._replace(o_bias=TensorPlan(f"{module}.o_proj.bias", ("embed",), (width,)))
    if config.qk_norm:
        plans = plans._replace(
            q_norm=TensorPlan(f"{module}.q_norm.weight", ("head_dim",), (config.head_dim,)),
            k_norm=TensorPlan(f"{module}.k_norm.weight", ("head_dim",), (config.head_dim,)),
        )
    if config.attention_sinks:
        plans = plans._replace(sinks=TensorPlan(f"{module}.sinks", ("heads",), (config.num_heads,)))
    return plans
