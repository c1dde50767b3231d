"""The pool that sizing promises fits beside a real model's weights and its largest step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.errors import ConfigError
from app.models.families.table import weight_bytes
from app.providers.target import STEP, plan_target, target_facts
from app.tpu.compiled import compile_facts
from app.tpu.gate import broken_fit
from app.tpu.targets import find_target
from tests.support.tpu_matrix import SMOLLM2, model

pytestmark = pytest.mark.tpu

SMOLLM2_135M = replace(SMOLLM2, num_layers=30)
LLAMA_8B = model(32, 8, 128, num_layers=32, vocab_size=128256, hidden_size=4096, intermediate_size=14336)
QWEN3_32B = model(64, 8, 128, num_layers=64, vocab_size=151936, hidden_size=5120, intermediate_size=25600, qk_norm=True)


@pytest.mark.parametrize(
    ("config", "target", "tp_size"),
    [
        pytest.param(SMOLLM2_135M, "v5e:2x2", 1, id="SmolLM2-135M"),
        pytest.param(LLAMA_8B, "v5e:2x2", 4, id="Llama-3.1-8B"),
        pytest.param(QWEN3_32B, "v6e:2x2", 4, id="Qwen3-32B"),
    ],
)
@pytest.mark.parametrize("name", [*STEP, "sample_everything"])
def test_the_largest_step_fits_beside_the_pool_in_what_is_kept_for_it(
    config: ModelConfig, target: str, tp_size: int, name: str
) -> None:
    plan = plan_target(ServerArgs(tp_size=tp_size), config, find_target(target))
    program = next(program for program in plan.programs if program.name == name)

    facts = compile_facts(program, plan.mesh)

    assert broken_fit(facts, plan.target.memory_bytes, plan.penalty_bytes) == []
    weights_and_pool = weight_bytes(config, plan.dtype) + (plan.spec.num_pages + 1) * plan.spec.page_bytes
    assert weights_and_pool > 0.85 * tp_size * plan.target.memory_bytes  # the memory is used
    if name in STEP:
        beside = facts.total_bytes - weights_and_pool // tp_size + plan.penalty_bytes
    else:
        beside = facts.total_bytes  # its arguments are the logits and the penalty tables
    assert beside < plan.step_bytes


def test_what_is_told_about_a_target_is_what_was_compiled() -> None:
    told = target_facts(ServerArgs(max_total_tokens=65536), SMOLLM2, "v5e:2x2")

    assert told["target"] == "1 of 4 devices of v5e:2x2"
    assert (told["pool_tokens"], told["context_length"], told["full_contexts"]) == (65536, 8192, 8)
    assert told["attention"] == "gather"
    assert told["decode_sends"] == []
    assert told["pool_bytes"] < told["decode_needs_bytes"] < told["device_memory_bytes"]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigError, match="--context-length"):
        plan_target(ServerArgs(tp_size=1), LLAMA_8B, find_target("v5e:2x2"))


def test_a_target_that_the_compiler_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--target='v5e:7x9'"):
        find_target("v5e:7x9")
