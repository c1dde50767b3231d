"""The programs that the TPU gate compiles are those that a runtime calls: same functions, shapes, types, shardings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.config.server_args import ServerArgs
from app.containers import Container
from app.core.ports import PoolSpec
from app.core.sampling import SamplingParams
from app.models.flat_programs import FlatPrograms
from app.models.flat_runner import FlatModelRunner
from app.models.layer_runs import LayersInARow
from app.models.layers.attention_choice import AttentionChoice, AttentionKind
from app.models.layers.gather_attention import GatherAttention
from app.providers.testing import Override, overridden
from app.runtime import programs
from app.runtime.programs import PLANNED_COLLECTIVES, StepSizes, step_programs
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from app.tpu.mesh import make_mesh
from app.tpu.program import Program
from tests.support.compiling import compiled_programs
from tests.support.tiny_llama import files_of, tiny_llama

# Sizes of no other test, so that none of its programs was compiled before.
MODEL = tiny_llama(vocab_size=269, context_length=136, num_kv_heads=2, head_dim=32)
SIZES = StepSizes(num_rows=7, max_pages=17, batch=8, context_pages=16, chunk_tokens=64)
ARGS = ServerArgs(page_size=8, max_total_tokens=1024, max_running_requests=7, chunked_prefill_size=64, device="cpu")
MOVING = {"backup", "restore"}  # only an engine with a host tier calls them, which this is not
ALLOCATING = {"broadcast_in_dim", "convert_element_type"}  # the penalty tables, when the first request needs them
EVERYTHING = {"temperature": 0.7, "top_p": 0.5, "logprobs": 3, "presence_penalty": 0.5}


def flat(model: FlatPrograms) -> dict[str, Override]:
    """A container over a flat pool, with `model` as its programs."""
    attention = AttentionChoice(kind=AttentionKind.GATHER, reason="a test wants it")
    return {
        "attention": lambda _: providers.Object(attention),
        "model_runner": lambda container: providers.ThreadSafeSingleton(
            FlatModelRunner, MODEL, container.checkpoint, model
        ),
    }


def run_steps(container: Container, first_token: int, **sampling: Any) -> None:
    """A step that computes seven prompts, then steps that decode all seven."""
    requests = [
        Request(
            request_id=f"{first_token} {row}",
            prompt_token_ids=np.full(33 if row == 0 else 3, first_token + row, np.int32),
            sampling=SamplingParams(max_tokens=5, ignore_eos=True, **sampling),
        )
        for row in range(7)
    ]
    generate_all(container.scheduler(), requests)


def compile_ahead(program: Program) -> None:
    """As `Program.lower`, but not for a mesh that jax is told of: of the cache of compiled programs that is a key."""
    program.function.lower(*program.arguments, **program.statics).compile()


def test_a_step_calls_the_listed_programs_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # given: everything listed, of the very functions that the runtime calls, is compiled and was never called
    mesh, spec = make_mesh(1, "cpu"), spec_of_pool()
    attention = GatherAttention(spec)
    model = FlatPrograms(MODEL, mesh, spec, attention, LayersInARow(), "float32")
    monkeypatch.setattr(programs, "FlatPrograms", lambda *_: model)
    listed = step_programs(MODEL, mesh, spec, attention, "float32", SIZES)
    assert [program.name for program in listed] == list(PLANNED_COLLECTIVES)
    listed = [program for program in listed if program.name not in MOVING]
    with compiled_programs() as compiled:
        for program in listed:
            compile_ahead(program)
    assert len(compiled) == 2 * len(listed)  # traced and compiled
    before = Counter({program.function: program.function._cache_size() for program in listed})

    # when
    with overridden(ARGS, **files_of(MODEL), **flat(model)) as container:
        assert container.pool_spec() == spec
        container.runtime()
        with compiled_programs() as compiled:
            run_steps(container, 0)
            run_steps(container, 100, **EVERYTHING)

    # then
    assert set(compiled) - ALLOCATING - {f"jit({name})" for name in ALLOCATING} == set()
    for function, variants in Counter(program.function for program in listed).items():
        assert function._cache_size() - before[function] >= variants, f"not called: {function}"


def spec_of_pool() -> PoolSpec:
    return PoolSpec(num_pages=128, page_size=8, num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32")
