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
from app.models.families.table import weight_bytes
from app.models.layers.attention_choice import AttentionChoice
from app.models.layers.flat_attentions import flat_attention
from app.providers import hybrid, sizing
from app.providers.host_sizing import HostSize, Specs, host_size, tier_demand
from app.providers.step_memory import penalty_table_bytes, step_bytes
from app.providers.tier_report import size_facts
from app.runtime.buckets import MIN_CHUNK, MIN_ROWS, bucket
from app.runtime.programs import StepSizes, hybrid_step_programs, planned_name, step_programs
from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.gate import broken_fit
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.program import Program
from app.tpu.targets import Target, find_target

STEP = ("prefill", "decode")
LAYERS = ("extend_layers", "decode_layers")  # the same where layers differ: some of them in each program


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """What an engine with these settings would be on that TPU, and the programs of its largest step."""

    target: Target
    mesh: Mesh
    model: ModelConfig  # as served
    dtype: str
    attention: AttentionChoice
    spec: PoolSpec  # of full pages
    host: HostSize | None
    pool_bytes: int  # of all pools, over all ranks
    step_bytes: int  # kept for a step, of one device
    penalty_bytes: int  # of that, what stays for requests with penalties
    programs: tuple[Program, ...]

    @property
    def beside_bytes(self) -> int:
        """Of one device, beside the arguments of a step: penalty tables, and copies to and from the host."""
        staging = 0 if self.host is None else self.host.limits.staging_bytes
        return self.penalty_bytes + staging // self.mesh.shape[TENSOR_AXIS]


def plan_target(args: ServerArgs, made_for: ModelConfig, target: Target) -> TargetPlan:
    """Raises ConfigError as starting the engine there would. Compiles nothing."""
    model = sizing.served_model(args, made_for)
    dtype = sizing.computation_dtype(args, "tpu")
    stored = sizing.pool_dtype(args, "tpu", dtype)
    attention = sizing.attention_choice(args, model, "tpu", stored, dtype)
    page = sizing.as_stored(sizing.page_spec(args, model, stored), attention)
    memory, room = args.tp_size * target.memory_bytes, sizing.pool_room("tpu")
    limits = sizing.scheduler_limits(args, model)
    step = step_bytes(args, model, limits, dtype)
    window, state = hybrid.window_page(args, model, page), hybrid.one_snapshot(args, model)
    bytes_a_page = hybrid.bytes_a_page(args, model, page, window, state)
    demand = tier_demand(args, model, "tpu", attention, Specs(page, window, state), limits.chunk_tokens)
    num_pages = sizing.pool_pages(args, model, bytes_a_page, memory, dtype, room, step, demand)
    spec = sizing.with_pages(page, num_pages)
    window = hybrid.window_spec(args, model, window, num_pages, limits.chunk_tokens)
    state = hybrid.state_spec(args, model, state, num_pages)
    mesh, sizes = target.mesh(args.tp_size), _largest_step(args, model)
    if model.is_hybrid:
        kept = hybrid.hybrid_spec(spec, window, state)
        programs = hybrid_step_programs(model, mesh, kept, args.page_size, dtype, sizes)
    else:
        reads = flat_attention(attention.kind, spec, args.tp_size)
        programs = step_programs(model, mesh, spec, reads, dtype, sizes)
    return TargetPlan(
        target=target,
        mesh=mesh,
        model=model,
        dtype=dtype,
        attention=attention,
        spec=spec,
        host=host_size(args, model, "tpu", Specs(spec, window, state), demand),
        pool_bytes=hybrid.pool_bytes(spec, window, state),
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
        "pool_bytes": plan.pool_bytes,
        "context_length": model.context_length,
        "step_bytes": plan.step_bytes,
        "penalty_tables_bytes": plan.penalty_bytes,
        "full_contexts": spec.num_pages * spec.page_size // model.context_length,
        **({} if plan.host is None else size_facts(plan.host, spec.page_size)),
    }
    for program in plan.programs:
        if program.name in STEP:
            facts |= _step_facts(program, plan)
        elif planned_name(program.name) in LAYERS:
            facts |= _layer_facts(program, plan)
    return facts


def _step_facts(program: Program, plan: TargetPlan) -> dict[str, Any]:
    """Of one device, with what it may hold beside the program's arguments."""
    compiled = _compiled(program, plan)
    if broken := broken_fit(compiled, plan.target.memory_bytes, plan.beside_bytes):
        raise ConfigError(field="--target", value=plan.target.name, allowed=f"what this fits: {broken[0]}")
    return _facts(compiled, compiled.total_bytes + plan.beside_bytes)


def _layer_facts(program: Program, plan: TargetPlan) -> dict[str, Any]:
    """Of one device, with all that it holds meanwhile: weights and pools of other layers too."""
    compiled = _compiled(program, plan)
    ranks = plan.mesh.shape[TENSOR_AXIS]
    held = (weight_bytes(plan.model, plan.dtype) + plan.pool_bytes) // ranks + plan.beside_bytes
    needed = held + compiled.temp_bytes
    if needed > plan.target.memory_bytes:
        allowed = f"what this fits: {program.name}: needs {needed:,} bytes of a device of {plan.target.memory_bytes:,}"
        raise ConfigError(field="--target", value=plan.target.name, allowed=allowed)
    return _facts(compiled, needed)


def _compiled(program: Program, plan: TargetPlan) -> CompiledFacts:
    try:
        return compile_facts(program, plan.mesh)
    except JaxRuntimeError as error:
        raise ConfigError(
            field="--target", value=plan.target.name, allowed=f"what {program.name} compiles for: {error}"
        ) from error


def _facts(compiled: CompiledFacts, needed_bytes: int) -> dict[str, Any]:
    name = compiled.name
    return {
        f"{name}_needs_bytes": needed_bytes,
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
    )
