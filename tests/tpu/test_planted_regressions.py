"""Each gate reports the mistake that it is there for, planted into the real decode program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.gate import broken_collectives, broken_donation, broken_fit, broken_temporaries
from app.tpu.kv_pool import write_tokens
from app.tpu.program import Program, from_host
from app.tpu.targets import find_target
from tests.support.tpu_matrix import (
    FULLY_COVERED,
    MORE_PAGES,
    PAGES,
    SMOLLM2,
    model,
    planned_collectives,
    program_of,
    spec_for,
)

pytestmark = pytest.mark.tpu

CONFIG, TP_SIZE = model(8, 4, 128), 4


def decode_program(num_pages: int = PAGES) -> tuple[Program, Any]:
    mesh = find_target(FULLY_COVERED).mesh(TP_SIZE)
    return program_of("decode", CONFIG, spec_for(CONFIG, TP_SIZE, num_pages), mesh), mesh


def test_a_pool_that_is_not_donated_is_reported() -> None:
    program, mesh = decode_program()
    undonated = replace(program, function=jax.jit(lambda *arguments: program.function(*arguments)))

    broken = broken_donation(undonated, compile_facts(undonated, mesh))

    assert broken == [f"decode: writes 0 bytes in place, not the {program.donated_bytes:,} that are donated to it"]


def test_an_operation_between_devices_that_nobody_planned_is_reported() -> None:
    program, mesh = decode_program()

    def gathering(*arguments: Any) -> Any:
        buffers, logits = program.function(*arguments)
        page = jax.lax.with_sharding_constraint(buffers.pages[1], NamedSharding(mesh, PartitionSpec()))
        return buffers, logits, page

    facts = compile_facts(replace(program, function=jax.jit(gathering, donate_argnums=1)), mesh)
    planned = planned_collectives("decode", CONFIG, mesh)

    broken = broken_collectives(facts, planned)

    assert facts.collectives["all-gather"] > planned["all-gather"]
    assert len(broken) == 1
    assert "'all-reduce': 3" in broken[0]


def scanned(num_pages: int) -> tuple[CompiledFacts, int]:
    """One write a layer into a pool that a scan takes apart and puts together again. -> facts, bytes of the pool."""
    mesh = find_target(FULLY_COVERED).mesh(1)
    shape = (2, num_pages + 1, 16, 1024)
    pool = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(pool: jax.Array, pages: jax.Array, values: jax.Array) -> jax.Array:
        def write(carried: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carried, write_tokens(layer, pages, pages % 16, carried)

        return jax.lax.scan(write, values, pool)[1]

    arguments = (pool, from_host((64,), jnp.int32), from_host((64, 1024), jnp.bfloat16))
    program = Program(name="scanned", function=jax.jit(step, donate_argnums=0), arguments=arguments, donated=(pool,))
    return compile_facts(program, mesh), program.donated_bytes


def test_a_pool_that_a_scan_takes_apart_is_reported_though_it_is_donated() -> None:
    facts, pool_bytes = scanned(PAGES)
    bigger, bigger_bytes = scanned(MORE_PAGES)

    broken = broken_temporaries(facts, bigger, pool_bytes, bigger_bytes)

    assert facts.alias_bytes == pool_bytes  # what donation alone would show
    assert [message.partition(":")[2].split()[0] for message in broken] == [f"{facts.temp_bytes:,}", "temporaries"]


def test_a_pool_bigger_than_the_chip_is_refused_by_the_compiler_and_reported_by_the_gate() -> None:
    target = find_target(FULLY_COVERED)
    mesh = target.mesh(1)
    fitting = spec_for(SMOLLM2, 1, PAGES)
    too_big = replace(fitting, num_pages=target.memory_bytes // fitting.page_bytes)

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_facts(program_of("decode", SMOLLM2, too_big, mesh), mesh)
    facts = compile_facts(program_of("decode", SMOLLM2, fitting, mesh), mesh)
    assert broken_fit(facts, target.memory_bytes) == []
    assert broken_fit(facts, facts.total_bytes - 1) == [
        f"decode: needs {facts.total_bytes:,} bytes of a device that has {facts.total_bytes - 1:,}"
    ]
