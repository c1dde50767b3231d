"""An engine for a TPU that is not there: sized as it would be there, its step programs compiled, nothing run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from app.config.model_config import ModelConfig
from app.config.server_args import CHUNKING_OFF, ServerArgs
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.models.layers.attention_choice import AttentionChoice
from app.models.layers.flat_attentions import flat_attention
from app.providers import sizing
from app.providers.step_memory import penalty_table_bytes, step_bytes
from app.runtime.buckets import MIN_CHUNK, MIN_ROWS, bucket
from app.runtime.programs import StepSizes, step_programs
from app.tpu.compiled import compile_facts
from app.tpu.gate import broken_fit
from app.tpu.program import Program
from app.tpu.targets import Target, find_target

STEP = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """What an engine with these settings would be on that TPU, and the programs of its largest step."""

    target: Target
    mesh: Mesh
    model: ModelConfig  # as served
    dtype: str
    attention: AttentionChoice
    spec: PoolSpec
    step_bytes: int  # kept for a step, of one device
    penalty_bytes: int  # of that, what stays for requests with penalties
    programs: tuple[Program, ...]


def plan_target(args: ServerArgs, made_for: ModelConfig, target: Target) -> TargetPlan:
    """Raises ConfigError as starting the engine there would. Compiles nothing."""
    model = sizing.served_model(args, made_for)
    dtype = sizing.computation_dtype(args, "tpu")
    stored = sizing.pool_dtype(args, "tpu", dtype)
    attention = sizing.attention_choice(args, model, "tpu", stored, dtype)
    page = sizing.as_stored(sizing.page_spec(args, model, stored), attention)
    memory, room = args.tp_size * target.memory_bytes, sizing.pool_room("tpu")
    step = step_bytes(args, model, sizing.scheduler_limits(args, model), dtype)
    num_pages = sizing.pool_pages(args, model, page.page_bytes, memory, dtype, room, step)
    spec = sizing.with_pages(page, num_pages)
    mesh = target.mesh(args.tp_size)
    reads = flat_attention(attention.kind, spec, args.tp_size)
    programs = step_programs(model, mesh, spec, reads, dtype, _largest_step(args, model))
    return TargetPlan(
        target=target,
        mesh=mesh,
        model=model,
        dtype=dtype,
        attention=attention,
        spec=spec,
        step_bytes=step // args.tp_size,
        penalty_bytes=penalty_table_bytes(args, model),
        programs=tuple(programs),
    )


def target_facts(args: ServerArgs, made_for: ModelConfig, target_name: str) -> dict[str, Any]:
    """Plain values for JSON. Compiles the largest step: seconds. ConfigError when it does not fit the memory."""
    plan = plan_target(args, made_for, find_target(target_name))
    spec, model = plan.spec, plan.model
    facts = {
        "target": f"{args.tp_size} of {len(plan.target.devices)} devices of {plan.target.name}",
        "device_memory_bytes": plan.target.memory_bytes,
        "dtype": plan.dtype,
        "attention": plan.attention.kind.value,
        "attention_reason": plan.attention.reason,
        "page_size": spec.page_size,
        "pool_pages": spec.num_pages,
        "pool_tokens": spec.num_pages * spec.page_size,
        "pool_bytes": (spec.num_pages + 1) * spec.page_bytes,
        "context_length": model.context_length,
        "step_bytes": plan.step_bytes,
        "penalty_tables_bytes": plan.penalty_bytes,
        "full_contexts": spec.num_pages * spec.page_size // model.context_length,
    }
    for program in plan.programs:
        if program.name in STEP:
            facts |= _step_facts(program, plan)
    return facts


def _step_facts(program: Program, plan: TargetPlan) -> dict[str, Any]:
    """Of one device, with the penalty tables that it may hold beside the program's arguments."""
    try:
        compiled = compile_facts(program, plan.mesh)
    except JaxRuntimeError as error:
        raise ConfigError(
            field="--target", value=plan.target.name, allowed=f"what {program.name} compiles for: {error}"
        ) from error
    name = program.name
    if broken := broken_fit(compiled, plan.target.memory_bytes, plan.penalty_bytes):
        raise ConfigError(field="--target", value=plan.target.name, allowed=f"what this fits: {broken[0]}")
    return {
        f"{name}_needs_bytes": compiled.total_bytes + plan.penalty_bytes,
        f"{name}_temporary_bytes": compiled.temp_bytes,
        f"{name}_sends": [f"{count} {kind}" for kind, count in sorted(compiled.collectives.items())],
        f"{name}_compiled_in": f"{compiled.seconds:.1f} s",
    }


def _largest_step(args: ServerArgs, model: ModelConfig) -> StepSizes:
    max_pages = sizing.pages_of_context(model, args.page_size)
    chunk = model.context_length if args.chunked_prefill_size == CHUNKING_OFF else args.chunked_prefill_size
    return StepSizes(
        num_rows=args.max_running_requests,
        max_pages=max_pages,
        batch=bucket(args.max_running_requests, MIN_ROWS),
        context_pages=max_pages,
        chunk_tokens=bucket(chunk, MIN_CHUNK),
        copied_pages=min(64, max_pages),
    )
