"""The gates over programs that CPU compiles: silent about a sound program, they name what is wrong with others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.gate import broken_collectives, broken_donation, broken_fit, broken_host_memory, broken_temporaries
from app.tpu.mesh import make_mesh
from app.tpu.program import Program, from_host, replicated

FACTS = CompiledFacts(
    name="step",
    argument_bytes=1000,
    output_bytes=600,
    alias_bytes=500,
    num_aliases=1,
    temp_bytes=50,
    accessed_bytes=0,
    collectives=Counter({"all-reduce": 2}),
    seconds=0.0,
)


def write_program(donate: tuple[int, ...]) -> Program:
    """Adds to a few elements of an array of 4 KiB."""
    array = replicated(make_mesh(1, "cpu"), (1024,), np.float32)

    def write(array: jax.Array, places: jax.Array) -> jax.Array:
        return array.at[places].add(jnp.float32(1))

    arguments = (array, from_host((4,), np.int32))
    return Program(name="write", function=jax.jit(write, donate_argnums=donate), arguments=arguments, donated=(array,))


def test_a_program_that_writes_what_is_donated_in_place_is_sound() -> None:
    program = write_program(donate=(0,))

    facts = compile_facts(program, make_mesh(1, "cpu"))

    assert facts.alias_bytes == program.donated_bytes == 4096
    assert facts.num_aliases == 1
    assert broken_donation(program, facts) == []


def test_a_program_that_should_write_in_place_and_does_not_is_reported() -> None:
    program = write_program(donate=())

    broken = broken_donation(program, compile_facts(program, make_mesh(1, "cpu")))

    assert broken == ["write: writes 0 bytes in place, not the 4,096 that are donated to it"]


def test_temporaries_may_be_a_tenth_of_the_pool() -> None:
    assert broken_temporaries(FACTS, FACTS, pool_bytes=500, bigger_pool_bytes=1000) == []
    assert broken_temporaries(FACTS, FACTS, pool_bytes=499, bigger_pool_bytes=1000) == [
        "step: 50 bytes of temporaries beside a pool of 499"
    ]


def test_temporaries_must_not_grow_with_the_pool() -> None:
    slightly, more = replace(FACTS, temp_bytes=55), replace(FACTS, temp_bytes=56)

    assert broken_temporaries(FACTS, slightly, pool_bytes=500, bigger_pool_bytes=1000) == []
    assert broken_temporaries(FACTS, more, pool_bytes=500, bigger_pool_bytes=1000) == [
        "step: temporaries grow with the pool, 50 to 56"
    ]


def test_collectives_must_be_those_that_are_planned_neither_more_nor_fewer() -> None:
    assert broken_collectives(FACTS, {"all-reduce": 2}) == []
    for planned in ({}, {"all-reduce": 1}, {"all-reduce": 3}, {"all-reduce": 2, "all-gather": 1}):
        assert broken_collectives(FACTS, planned) == [f"step: sends {{'all-reduce': 2}} between devices, not {planned}"]


def test_what_a_program_needs_counts_what_it_writes_in_place_once() -> None:
    assert FACTS.total_bytes == 1000 + 600 - 500 + 50
    assert broken_fit(FACTS, 1150) == []
    assert broken_fit(FACTS, 1149) == ["step: needs 1,150 bytes of a device that has 1,149"]


def test_what_a_program_reads_and_leaves_in_host_memory_is_what_it_must() -> None:
    moving = replace(FACTS, host_argument_bytes=64, host_output_bytes=32)

    assert broken_host_memory(moving, read_bytes=64, left_bytes=32) == []
    assert broken_host_memory(FACTS, read_bytes=0, left_bytes=0) == []
    assert broken_host_memory(moving, read_bytes=65, left_bytes=0) == [
        "step: reads 64 bytes in host memory, not 65",
        "step: leaves 32 bytes in host memory, not 0",
    ]
