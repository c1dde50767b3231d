from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from app.config.model_config import Component, ExpertsConfig, RopeScaling, StateSpaceScales
from app.errors import ConfigError
from app.models.hf_config import load_model_config, model_config_from_hf

FULL, SWA, RECURRENT = Component.FULL, Component.SWA, Component.RECURRENT


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
GPT_OSS = {"sliding_window": 128, "rope_scaling": YARN, "num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NEXT = {
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
FALCON = {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 16}
DEEPSEEK = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 48,
}


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A small config.json of a family, with the fields that every one of them has."""
    shape = {
        "model_type": model_type,
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return {**shape, **changes}


def needed(model_type: str) -> dict[str, Any]:
    """What a family's file must state beside the fields that all have."""
    by_family = {
        "gpt_oss": GPT_OSS,
        "qwen3_moe": EXPERTS,
        "qwen3_next": NEXT,
        "falcon_h1": FALCON,
        "deepseek_v3": DEEPSEEK,
    }
    return by_family.get(model_type, {"sliding_window": 128} if model_type.startswith("gemma") else {})


def test_a_llama_is_read_in_full() -> None:
    model = model_config_from_hf(
        config(
            "llama",
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=True,
            bos_token_id=128000,
            eos_token_id=[128001, 128009],
            attention_bias=False,
            hidden_act="silu",
        )
    )

    assert (model.architecture, model.num_layers, model.num_heads, model.num_kv_heads) == ("llama", 4, 8, 2)
    assert (model.head_dim, model.context_length, model.vocab_size) == (8, 4096, 1000)
    assert (model.rms_norm_eps, model.rope_theta, model.tie_word_embeddings) == (1e-5, 500000.0, True)
    assert model.rope_scaling == RopeScaling(kind="llama3", factor=32.0, original_context_length=8192)
    assert (model.bos_token_id, model.eos_token_ids) == (128000, (128001, 128009))
    assert (model.attention_bias, model.qk_norm, model.sliding_window) == (False, False, None)
    assert model.components == {FULL}


def test_absent_fields_have_the_defaults_of_the_family() -> None:
    model = model_config_from_hf({**config("llama"), "num_key_value_heads": None})

    assert model.num_kv_heads == 8
    assert (model.rms_norm_eps, model.rope_theta, model.tie_word_embeddings) == (1e-6, 10_000.0, False)
    assert (model.rope_scaling, model.eos_token_ids, model.bos_token_id) == (RopeScaling(), (), None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeScaling()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, RopeScaling()),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5.0}},
            RopeScaling(kind="linear", factor=4.0),
        ),
    ],
)
def test_rope_settings_are_found_in_their_old_and_new_places(fields: dict[str, Any], expected: RopeScaling) -> None:
    model = model_config_from_hf(config("llama", **fields))

    assert model.rope_scaling == expected
    assert model.rope_theta == (5.0 if "rope_parameters" in fields else 10_000.0)


@pytest.mark.parametrize(
    ("family", "fields", "components", "window"),
    [
        ("mistral", {"sliding_window": None}, {FULL}, None),
        ("mistral", {"sliding_window": 1024}, {SWA}, 1024),
        ("mistral", {"sliding_window": 4096}, {FULL}, None),  # never cuts anything within the context
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": False}, {FULL}, None),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}, {FULL, SWA}, 1024),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 4}, {FULL}, None),
        ("qwen3", {"sliding_window": None, "use_sliding_window": False}, {FULL}, None),
        ("gemma2", {"sliding_window": 512}, {FULL, SWA}, 512),
        ("gemma3_text", {"sliding_window": 512, "num_hidden_layers": 6}, {FULL, SWA}, 512),
        ("gpt_oss", GPT_OSS, {FULL, SWA}, 128),
        ("deepseek_v3", DEEPSEEK, {FULL}, None),
        ("qwen3_next", NEXT, {FULL, RECURRENT}, None),
        ("falcon_h1", FALCON, {FULL, RECURRENT}, None),
        ("jamba", {}, {FULL, RECURRENT}, None),
    ],
)
def test_components_follow_from_the_family_and_its_window(
    family: str, fields: dict[str, Any], components: set[Component], window: int | None
) -> None:
    model = model_config_from_hf(config(family, **fields))

    assert model.components == components
    assert model.sliding_window == window


def test_qwen2_has_biases_and_qwen3_norms_of_heads() -> None:
    qwen2 = model_config_from_hf(config("qwen2"))
    qwen3 = model_config_from_hf(config("qwen3", head_dim=128))

    assert (qwen2.attention_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_windows_and_full_attention_take_turns_as_the_family_has_them() -> None:
    def kinds(family: str, **fields: Any) -> list[set[Component]]:
        return [set(kind) for kind in model_config_from_hf(config(family, **fields)).layer_components]

    swa, full = {SWA}, {FULL}
    stated = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert kinds("gemma2", sliding_window=64) == [swa, full, swa, full]
    assert kinds("gpt_oss", **GPT_OSS) == [swa, full, swa, full]
    assert kinds("gemma3_text", sliding_window=64, num_hidden_layers=7) == [swa] * 5 + [full, swa]
    assert kinds("gemma3_text", sliding_window=64, sliding_window_pattern=2) == [swa, full, swa, full]
    assert kinds("gemma3_text", sliding_window=64, layer_types=stated) == [full, swa, swa, full]
    late = kinds("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3)
    assert late == [full, full, full, swa]
    assert kinds("mistral", sliding_window=64) == []  # every layer has what the model has


def test_gemma3_keeps_an_unscaled_rope_for_its_windows_in_old_files_and_new_ones() -> None:
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    for fields in (old, new):
        model = model_config_from_hf(config("gemma3_text", sliding_window=64, **fields))
        assert (model.rope_theta, model.window_rope_theta) == (1e6, 1e4)
        assert model.rope_scaling == RopeScaling(kind="linear", factor=8.0)


def test_gemma_has_caps_scales_and_norms_of_its_own() -> None:
    gemma2 = model_config_from_hf(config("gemma2", sliding_window=64, final_logit_softcapping=20.0))
    gemma3 = model_config_from_hf(config("gemma3_text", sliding_window=64, query_pre_attn_scalar=16))

    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.qk_norm) == (50.0, 20.0, False)
    assert (gemma3.attention_soft_cap, gemma3.logit_soft_cap, gemma3.qk_norm) == (None, None, True)
    assert (gemma2.embedding_scale, gemma3.attention_scale, gemma2.attention_scale) == (8.0, 0.25, 1 / 16)
    assert (gemma2.norm_offset, gemma2.post_norms, gemma2.activation) == (1.0, True, "gelu_tanh")
    assert gemma2.tie_word_embeddings


def test_gpt_oss_has_sinks_biases_experts_and_a_yarn_rope() -> None:
    model = model_config_from_hf(config("gpt_oss", **GPT_OSS))

    assert model.attention_sinks
    assert model.attention_bias
    assert model.attention_out_bias
    assert model.experts == ExpertsConfig(num_experts=8, experts_per_token=2, intermediate_size=128, gate_limit=7.0)
    assert (model.rope_theta, model.rope_scaling.kind, model.rope_scaling.factor) == (150_000.0, "yarn", 32.0)
    assert model.rope_scaling.attention_factor == pytest.approx(1.3465735902799727)


def test_qwen3_moe_has_plain_layers_where_the_file_says_so() -> None:
    model = model_config_from_hf(config("qwen3_moe", **EXPERTS, mlp_only_layers=[3], decoder_sparse_step=2))

    assert model.experts == ExpertsConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=32,
        normalised=False,
        dense_layers=frozenset({0, 2, 3}),
    )


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model_type='mamba'.*falcon_h1.*llama.*qwen3") as caught:
        model_config_from_hf(config("mamba"))
    assert caught.value.field == "model_type"


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], {}])
def test_a_family_that_is_no_name_is_refused(model_type: Any) -> None:
    with pytest.raises(ConfigError, match="model_type"):
        model_config_from_hf({**config("llama"), "model_type": model_type})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "hidden_size", None),
        ("llama", "hidden_size", 0),
        ("llama", "hidden_size", "64"),
        ("llama", "hidden_size", True),
        ("llama", "hidden_size", 65),
        ("llama", "num_key_value_heads", 3),
        ("llama", "rms_norm_eps", -1.0),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "eos_token_id", "</s>"),
        ("llama", "rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("llama", "rope_scaling", "linear"),
        ("llama", "hidden_act", "gelu"),
        ("llama", "mlp_bias", True),
        ("llama", "attention_bias", True),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("llama", "partial_rotary_factor", 0.5),
        ("qwen3", "attention_bias", True),
        ("qwen2", "use_sliding_window", 1),
        ("mistral", "sliding_window", 0),
        ("gemma2", "sliding_window", None),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text", "hidden_activation", "gelu"),
        ("gemma3_text", "layer_types", ["full_attention"] * 3),
        ("gemma3_text", "layer_types", ["full_attention", "linear_attention"] * 2),
        ("gemma3_text", "attn_logit_softcapping", -1),
        ("mistral", "layer_types", ["full_attention"] * 4),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3_moe", "mlp_only_layers", 1),
        ("gpt_oss", "rope_scaling", None),
        ("gpt_oss", "swiglu_alpha", 1.0),
        ("gpt_oss", "num_local_experts", 0),
        ("gpt_oss", "quantization_config", {"quant_method": "mxfp4"}),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "kv_lora_rank", None),
        ("deepseek_v3", "topk_group", 5),
        ("deepseek_v3", "n_routed_experts", 9),
        ("qwen3_next", "attention_bias", True),
        ("qwen3_next", "layer_types", ["linear_attention", "sliding_attention", "full_attention", "full_attention"]),
        ("qwen3_next", "linear_num_value_heads", 3),
        ("qwen3_next", "hidden_act", "gelu"),
        ("falcon_h1", "mamba_proj_bias", True),
        ("falcon_h1", "projectors_bias", True),
        ("falcon_h1", "mamba_d_head", 32),
        ("falcon_h1", "mamba_n_groups", 3),
        ("falcon_h1", "ssm_multipliers", [1.0, 2.0]),
        ("falcon_h1", "time_step_limit", [0.0, "much"]),
    ],
)
def test_a_field_that_cannot_be_served_is_refused_by_name(family: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(config(family, **{**needed(family), field: value}))
    assert caught.value.field == f"config.json {field}"


def test_deepseek_keeps_one_latent_of_every_token() -> None:
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    model = model_config_from_hf(config("deepseek_v3", **DEEPSEEK, rope_scaling={**scaling, "mscale": 1.0}))

    assert model.latent is not None
    assert (model.latent_kv, model.num_kv_heads, model.head_dim, model.rotary_dim) == (True, 1, 40, 8)
    assert (model.latent.latent_dim, model.latent.plain_dim, model.latent.value_dim) == (32, 24, 16)
    assert model.latent.score_scale == pytest.approx(32**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert model.rope_scaling.attention_factor == 1.0
    assert model.experts == ExpertsConfig(
        num_experts=8,
        experts_per_token=3,
        intermediate_size=48,
        dense_layers=frozenset({0}),
        shared_size=96,
        num_groups=4,
        groups_per_token=2,
        scale=2.5,
    )


def test_qwen3_next_has_a_state_in_most_layers_and_keys_and_values_in_the_others() -> None:
    model = model_config_from_hf(config("qwen3_next", **NEXT, num_hidden_layers=8))
    stated = model_config_from_hf(
        config("qwen3_next", **NEXT, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    )

    assert model.layers_with(FULL) == (3, 7)
    assert model.layers_with(RECURRENT) == (0, 1, 2, 4, 5, 6)
    assert (stated.layers_with(RECURRENT), stated.layers_with(FULL)) == ((0,), (1,))
    assert model.rotary_dim == 8  # a quarter of a head
    assert [(array.shape, array.sharded_axis) for array in model.recurrent_state] == [
        ((3, 32), 1),
        ((3, 32), 1),
        ((3, 96), 1),
        ((4, 16, 24), 0),
    ]


def test_falcon_h1_has_both_in_every_layer_and_folds_its_constants() -> None:
    constants = {"attention_in_multiplier": 2.0, "key_multiplier": 0.5, "attention_out_multiplier": 3.0}
    scales = {"ssm_in_multiplier": 2.0, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0], "ssm_out_multiplier": 0.5}
    model = model_config_from_hf(config("falcon_h1", **FALCON, **constants, **scales, time_step_limit=[0.1, 0.9]))
    endless = model_config_from_hf(config("falcon_h1", **FALCON, time_step_limit=[0.0, {"__float__": "Infinity"}]))

    assert model.layers_with(FULL) == model.layers_with(RECURRENT) == (0, 1, 2, 3)
    assert model.attention_scale == pytest.approx(8**-0.5 * 2.0**2 * 0.5)
    assert model.attention_out_scale == 6.0
    assert model.state_space is not None
    assert endless.state_space is not None
    assert model.state_space.scales == StateSpaceScales(gate=2.0, x=4.0, into=6.0, read=8.0, step=10.0, out=0.5)
    assert (model.state_space.least_step, model.state_space.greatest_step) == (0.1, 0.9)
    assert (endless.state_space.least_step, endless.state_space.greatest_step) == (0.0, math.inf)
    assert [(array.shape, array.sharded_axis) for array in model.recurrent_state] == [
        ((3, 96), 1),
        ((3, 32), None),
        ((3, 32), None),
        ((4, 24, 16), 0),
    ]


def test_a_scaling_without_its_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match="factor"):
        model_config_from_hf(config("llama", rope_scaling={"rope_type": "linear"}))


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)

    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        load_model_config(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    assert load_model_config(tmp_path).num_layers == 4
