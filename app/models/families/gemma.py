"""gemma2 and gemma3_text: layers with and without a window take turns; norms on both sides of everything."""

from __future__ import annotations

from typing import Any

from app.config.model_config import Component, ModelConfig
from app.models.families.fields import Fields, RopeFields, model_config, rope, rope_of, windows


def gemma2(fields: Fields) -> ModelConfig:
    caps = {
        "attention_soft_cap": fields.number_or_none("attn_logit_softcapping", absent=50.0),
        "logit_soft_cap": fields.number_or_none("final_logit_softcapping", absent=30.0),
    }
    return _model(fields, full_every=2, **caps, **rope(fields))


def gemma3_text(fields: Fields) -> ModelConfig:
    everywhere, in_windows = _two_ropes(fields)
    return _model(
        fields,
        full_every=fields.count("sliding_window_pattern", fields.raw("_sliding_window_pattern") or 6),
        qk_norm=True,
        attention_soft_cap=fields.number_or_none("attn_logit_softcapping"),
        logit_soft_cap=fields.number_or_none("final_logit_softcapping"),
        rope_theta=everywhere.theta,
        rope_scaling=everywhere.scaling,
        window_rope_theta=in_windows.theta,
    )


def _two_ropes(fields: Fields) -> tuple[RopeFields, RopeFields]:
    """Of layers that see everything, and of layers with a window. Newer files have a section for each."""
    sections = fields.section("rope_parameters")
    if isinstance(sections.raw("full_attention"), dict):
        full, window = sections.section("full_attention"), sections.section("sliding_attention")
        window.require("rope_type", default="default", allowed=("default",))
        return rope_of(full, "rope_parameters", full), rope_of(window, "rope_parameters", window)
    everywhere = rope_of(fields, "rope_scaling", fields.section("rope_scaling"), default_theta=1_000_000.0)
    return everywhere, RopeFields(fields.number("rope_local_base_freq", 10_000.0))


def _model(fields: Fields, *, full_every: int, **family: Any) -> ModelConfig:
    """full_every: the last of each so many layers sees everything."""
    fields.require("attention_bias", default=False, allowed=(False,))
    fields.require("use_bidirectional_attention", default=None, allowed=(None, False))
    layers = range(fields.count("num_hidden_layers"))
    by_default = tuple(Component.SWA if (layer + 1) % full_every else Component.FULL for layer in layers)
    return model_config(
        fields,
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        post_norms=True,
        tie_word_embeddings=fields.switch("tie_word_embeddings", True),
        embedding_scale=fields.count("hidden_size") ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        head_dim=fields.count("head_dim", 256),
        **windows(fields, fields.count("sliding_window"), by_default),
        **family,
    )
