"""What a compiled program tells about itself: memory, what it writes in place, what it sends between devices."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from app.tpu.program import Program

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter|ragged-all-to-all)"
    r"(?:-start)?\("
)
_ALIAS = re.compile(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFacts:
    """Bytes are of one device."""

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of arguments that outputs are written into
    num_aliases: int  # such arguments
    temp_bytes: int  # beside arguments and outputs
    host_argument_bytes: int = 0  # of the device's host, not counted above
    host_output_bytes: int = 0
    accessed_bytes: int  # as XLA estimates; the body of a loop counts once
    collectives: Counter[str] = field(default_factory=Counter)  # operations in the text; a loop's body counts once
    seconds: float  # that lowering and compiling took

    @property
    def total_bytes(self) -> int:
        """What a device needs while the program runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def compile_facts(program: Program, mesh: Mesh) -> CompiledFacts:
    """Compile for the devices of `mesh`. Raises what the compiler raises, JaxRuntimeError if memory is too small."""
    started = time.perf_counter()
    compiled = program.lower(mesh).compile()
    return read_facts(program.name, compiled, time.perf_counter() - started)


def read_facts(name: str, compiled: jax.stages.Compiled, seconds: float) -> CompiledFacts:
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    cost = compiled.cost_analysis() or {}
    return CompiledFacts(
        name=name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        num_aliases=len(_ALIAS.findall(text.partition("\n")[0])),
        temp_bytes=memory.temp_size_in_bytes,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_output_bytes=memory.host_output_size_in_bytes,
        accessed_bytes=int(cost.get("bytes accessed", 0)),
        collectives=Counter(_COLLECTIVE.findall(text)),
        seconds=seconds,
    )
