"""The programs of models whose layers keep different things, compiled for a TPU: in place, lean, sending as planned.

One model for each kind of state, as wide as real ones are and a pattern of layers deep.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.models.hf_config import model_config_from_hf
from app.providers.target import LAYERS, TargetPlan, plan_target, target_facts
from app.runtime.programs import PLANNED_IN_HYBRIDS, planned_name
from app.tpu.compiled import compile_facts
from app.tpu.gate import broken_collectives, broken_donation, broken_temporaries
from app.tpu.program import Program
from app.tpu.targets import find_target

pytestmark = pytest.mark.tpu

COMMON = {"vocab_size": 32768, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "eos_token_id": 1}
MODELS: dict[str, dict[str, object]] = {
    "window": {
        **COMMON,
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "recurrent": {
        **COMMON,
        "model_type": "qwen3_next",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
    },
    "latent": {
        **COMMON,
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "hidden_act": "silu",
    },
}
COPIES = tuple(f"{way}_{kind}" for way in ("backup", "restore") for kind in ("full", "window", "states"))
ARGS = ServerArgs(tp_size=2, max_total_tokens=262_144, max_running_requests=32, context_length=4096)
MORE = replace(ARGS, max_total_tokens=393_216)


def planned(args: ServerArgs, config: ModelConfig) -> TargetPlan:
    return plan_target(args, config, find_target("v5e:2x2"))


def same_program(plan: TargetPlan, name: str) -> Program:
    return next(program for program in plan.programs if program.name == name)


@pytest.mark.parametrize("section", ["decode", pytest.param("extend", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_every_program_of_a_hybrid_model_keeps_every_gate(kind: str, section: str) -> None:
    config = model_config_from_hf(MODELS[kind])
    plan, bigger = planned(ARGS, config), planned(MORE, config)
    broken = []
    for program in plan.programs:
        layers = planned_name(program.name)
        beside = ("state_copy", "window_table_rows", *COPIES) if section == "decode" else ()
        if layers not in (f"{section}_layers", *beside):
            continue  # of every model: tried in test_programs.py
        facts = compile_facts(program, plan.mesh)
        broken += broken_donation(program, facts)
        broken += broken_collectives(facts, PLANNED_IN_HYBRIDS[layers].in_text(_depth(program)))
        if layers in (*LAYERS, *COPIES):
            more = compile_facts(same_program(bigger, program.name), bigger.mesh)
            ranks = ARGS.tp_size
            broken += broken_temporaries(facts, more, plan.pool_bytes // ranks, bigger.pool_bytes // ranks)
    assert broken == []


def test_every_listed_program_is_planned() -> None:
    for fields in MODELS.values():
        for program in planned(ARGS, model_config_from_hf(fields)).programs:
            assert planned_name(program.name) in PLANNED_IN_HYBRIDS


@pytest.mark.slow
def test_doctor_tells_what_a_hybrid_model_needs() -> None:
    told = target_facts(replace(ARGS, tp_size=1), model_config_from_hf(MODELS["window"]), "v5e:2x2")
    needed = [value for name, value in told.items() if name.startswith("extend_") and name.endswith("_needs_bytes")]
    assert needed
    assert all(told["pool_bytes"] < value < told["device_memory_bytes"] for value in needed)


def _depth(program: Program) -> int:
    """Layers in the program's text: `..._layers_FIRST_to_LAST`."""
    first, _, last = program.name.partition("_layers_")[2].partition("_to_")
    return int(last) - int(first) + 1 if last else 0
