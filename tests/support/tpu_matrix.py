"""The models and the TPUs that the step programs are compiled for. Two layers deep, all of which are alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from app.config.model_config import ModelConfig
from app.config.parallel import padded_kv_heads
from app.core.ports import PoolSpec
from app.models.layer_runs import layer_run_for
from app.models.layers.attention_choice import AttentionChoice, choose_attention
from app.models.layers.flat_attentions import flat_attention
from app.runtime.programs import PLANNED_COLLECTIVES, StepSizes, step_programs
from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.gate import broken_collectives, broken_donation, broken_fit, broken_temporaries
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.program import Program
from app.tpu.targets import find_target

FULLY_COVERED = "v5e:2x2"
TARGETS = (FULLY_COVERED, "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
STEP = ("prefill", "decode")
WITH_POOL = (*STEP, "backup", "restore")  # the programs that know of the model
PAGES, MORE_PAGES = 16384, 24576
SIZES = StepSizes(num_rows=256, max_pages=512, batch=64, context_pages=256, chunk_tokens=512)


def model(num_heads: int, num_kv_heads: int, head_dim: int, **fields: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_layers": 2,
        "context_length": 8192,
    }
    shape |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return ModelConfig(**{**shape, **fields})


SMOLLM2 = model(
    9, 3, 64, vocab_size=49152, hidden_size=576, intermediate_size=1536, tie_word_embeddings=True, rope_theta=1e5
)
MODELS = {
    "32 heads, 8 KV heads of 128": (model(32, 8, 128), 4),
    "8 heads, 4 KV heads of 128": (model(8, 4, 128, attention_bias=True, qk_norm=True), 4),
    "32 heads, 8 KV heads of 64": (model(32, 8, 64), 4),
    "SmolLM2: 9 heads, 3 KV heads of 64": (SMOLLM2, 1),
}
# One for each size of head, which is what attention differs by.
OFTEN = ("8 heads, 4 KV heads of 128", "SmolLM2: 9 heads, 3 KV heads of 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program of one model on one TPU."""

    target: str
    model: str
    program: str

    def __str__(self) -> str:
        return f"{self.target} {self.model} {self.program}".replace(" ", "_")


def quick_cases() -> list[Case]:
    """Everything on the first target, the step of two models on the others."""
    return [
        case for case in full_cases() if case.target == FULLY_COVERED or (case.program in STEP and case.model in OFTEN)
    ]


def full_cases() -> list[Case]:
    """What knows of the model for every model, the rest for one: it depends on nothing that they differ by."""
    first = next(iter(MODELS))
    return [
        Case(target=target, model=name, program=program)
        for target in TARGETS
        for name in MODELS
        for program in PLANNED_COLLECTIVES
        if program in WITH_POOL or name == first
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    facts: CompiledFacts
    pool_bytes: int  # on one device
    broken: list[str]  # gates


def choice_for(config: ModelConfig, tp_size: int, dtype: str = "bfloat16") -> AttentionChoice:
    return choose_attention(
        platform="tpu",
        num_kv_heads=padded_kv_heads(config.num_heads, config.num_kv_heads, tp_size),
        head_dim=config.head_dim,
        tp_size=tp_size,
        pool_dtype=dtype,
        dtype=dtype,
    )


def spec_for(config: ModelConfig, tp_size: int, num_pages: int, page_size: int = 16) -> PoolSpec:
    attention = choice_for(config, tp_size)
    return PoolSpec(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=config.num_layers,
        num_kv_heads=padded_kv_heads(config.num_heads, config.num_kv_heads, tp_size),
        head_dim=config.head_dim,
        dtype="bfloat16",
        extra_kv_heads=attention.extra_kv_heads,
        extra_head_dim=attention.extra_head_dim,
    )


def program_of(name: str, config: ModelConfig, spec: PoolSpec, mesh: Mesh, sizes: StepSizes = SIZES) -> Program:
    tp_size = mesh.shape[TENSOR_AXIS]
    attention = flat_attention(choice_for(config, tp_size).kind, spec, tp_size)
    programs = {each.name: each for each in step_programs(config, mesh, spec, attention, "bfloat16", sizes)}
    return programs[name]


def planned_collectives(name: str, config: ModelConfig, mesh: Mesh) -> Counter[str]:
    if mesh.shape[TENSOR_AXIS] == 1:
        return Counter()
    return PLANNED_COLLECTIVES[name].in_text(layer_run_for(mesh).layers_in_text(config.num_layers))


def run(case: Case) -> Compiled:
    """Compile and try every gate; what has the pool among its arguments is compiled with two sizes of it."""
    config, tp_size = MODELS[case.model]
    target = find_target(case.target)
    mesh = target.mesh(tp_size)
    spec = spec_for(config, tp_size, PAGES)
    program = program_of(case.program, config, spec, mesh)
    facts = compile_facts(program, mesh)
    pool_bytes = _pool_bytes(spec, tp_size)
    planned = planned_collectives(case.program, config, mesh)
    broken = broken_donation(program, facts) + broken_collectives(facts, planned)
    broken += broken_fit(facts, target.memory_bytes)
    if case.program in WITH_POOL:
        more = replace(spec, num_pages=MORE_PAGES)
        bigger = compile_facts(program_of(case.program, config, more, mesh), mesh)
        broken += broken_temporaries(facts, bigger, pool_bytes, _pool_bytes(more, tp_size))
    return Compiled(facts=facts, pool_bytes=pool_bytes, broken=broken)


def _pool_bytes(spec: PoolSpec, tp_size: int) -> int:
    """On one device."""
    return (spec.num_pages + 1) * spec.page_bytes // tp_size
