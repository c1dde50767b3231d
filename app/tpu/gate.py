"""What every compiled step program must keep, read from the program itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import jax

from app.tpu.compiled import CompiledFacts
from app.tpu.program import Program

MOST_TEMP = 0.1  # of the pool
# Of what the pool grew by. Not zero: the compiler moves small things between memories as the pool leaves room. A copy
# of anything that grows with the pool would be far above it.
MOST_GROWTH = 0.01


def broken_donation(program: Program, facts: CompiledFacts) -> list[str]:
    """-> what is not written in place though it must be."""
    wanted = program.donated_bytes
    # Arrays that do not fill their tiles take more than their elements.
    if facts.num_aliases == len(jax.tree.leaves(program.donated)) and facts.alias_bytes >= wanted:
        return []
    return [f"{facts.name}: writes {facts.alias_bytes:,} bytes in place, not the {wanted:,} that are donated to it"]


def broken_temporaries(
    facts: CompiledFacts, bigger: CompiledFacts, pool_bytes: int, bigger_pool_bytes: int
) -> list[str]:
    """facts, bigger: of one program with pools of `pool_bytes` and `bigger_pool_bytes` a device."""
    broken = []
    if facts.temp_bytes > MOST_TEMP * pool_bytes:
        broken.append(f"{facts.name}: {facts.temp_bytes:,} bytes of temporaries beside a pool of {pool_bytes:,}")
    if bigger.temp_bytes - facts.temp_bytes > MOST_GROWTH * (bigger_pool_bytes - pool_bytes):
        broken.append(f"{facts.name}: temporaries grow with the pool, {facts.temp_bytes:,} to {bigger.temp_bytes:,}")
    return broken


def broken_collectives(facts: CompiledFacts, planned: Mapping[str, int]) -> list[str]:
    """planned: kind -> count of operations in the program's text."""
    if facts.collectives == Counter(planned):
        return []
    return [f"{facts.name}: sends {dict(facts.collectives)} between devices, not {dict(planned)}"]


def broken_fit(facts: CompiledFacts, memory_bytes: int, beside_bytes: int = 0) -> list[str]:
    """Of one device. beside_bytes: what it holds meanwhile that is no argument of the program."""
    needed = facts.total_bytes + beside_bytes
    if needed <= memory_bytes:
        return []
    return [f"{facts.name}: needs {needed:,} bytes of a device that has {memory_bytes:,}"]


def broken_host_memory(facts: CompiledFacts, *, read_bytes: int, left_bytes: int) -> list[str]:
    """What the program must find in host memory, and leave there. In bytes of one device, at least; none if 0.

    The next program waits until this one has moved what it moves.
    """
    broken = []
    for verb, found, wanted in (
        ("reads", facts.host_argument_bytes, read_bytes),
        ("leaves", facts.host_output_bytes, left_bytes),
    ):
        if found < wanted or (found and not wanted):
            broken.append(f"{facts.name}: {verb} {found:,} bytes in host memory, not {wanted:,}")
    return broken
