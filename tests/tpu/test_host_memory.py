"""Where pages are when they leave the device, compiled for TPU.

The runtime gathers pages into device arrays, which it hands to `device_put`: that copies beside whatever the device
computes. So the programs that gather and scatter must not touch host memory themselves, since the next program would
wait for it; and what a carrier asks `device_put` for must be host memory on that chip, which a program
with such results shows.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from app.config.model_config import StateArray
from app.core.ports import PoolSpec, StateSpec
from app.core.transfers import OfEachPool
from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.gate import broken_host_memory
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.page_carriers import ArraysCarrier, hybrid_page_carriers, hybrid_page_programs, page_carriers
from app.tpu.pool_layout import FlatByHead
from app.tpu.program import Program
from app.tpu.targets import find_target
from tests.support.tpu_matrix import FULLY_COVERED, TARGETS

pytestmark = pytest.mark.tpu

FULL = PoolSpec(num_pages=512, page_size=16, num_layers=2, num_kv_heads=4, head_dim=128, dtype="bfloat16")
STATES = StateSpec(
    num_snapshots=30,
    num_rows=8,
    num_layers=2,
    arrays=(StateArray(shape=(8, 128, 128), sharded_axis=0), StateArray(shape=(2048, 3), sharded_axis=0)),
)
EVERYTHING = HybridSpec(full=FULL, window=FULL, states=STATES)
RANKS = 2


def mesh_of(target: str) -> Mesh:
    return find_target(target).mesh(RANKS)


def carriers(mesh: Mesh) -> dict[str, ArraysCarrier]:
    flat = page_carriers(FULL, mesh, FlatByHead()).pages
    kinds: OfEachPool[Any] = hybrid_page_carriers(EVERYTHING, mesh, FULL.num_pages)
    return {"flat": flat, "full": kinds.pages, "window": kinds.window_pages, "states": kinds.states}


def moved(source: Any, target: Any, mesh: Mesh) -> CompiledFacts:
    """One page from where `source` is to where `target` is, shapes both."""
    function = jax.jit(lambda page: page, out_shardings=tuple(array.sharding for array in target))
    return compile_facts(Program(name="moved", function=function, arguments=(source,)), mesh)


@pytest.mark.parametrize("target", TARGETS)
def test_a_page_goes_to_host_memory_and_comes_back_from_it(target: str) -> None:
    mesh = mesh_of(target)
    for carrier in carriers(mesh).values() if target == FULLY_COVERED else [carriers(mesh)["states"]]:
        share = carrier.page_bytes // RANKS
        out, back = moved(carrier.device_page, carrier.page, mesh), moved(carrier.page, carrier.device_page, mesh)
        assert broken_host_memory(out, read_bytes=0, left_bytes=share) == []
        assert broken_host_memory(back, read_bytes=share, left_bytes=0) == []


def test_gathering_and_scattering_leave_host_memory_alone() -> None:
    mesh = mesh_of(FULLY_COVERED)
    broken = []
    for program in hybrid_page_programs(EVERYTHING, mesh):
        broken += broken_host_memory(compile_facts(program, mesh), read_bytes=0, left_bytes=0)
    assert broken == []


def test_a_page_that_stays_on_the_device_is_reported() -> None:
    mesh = mesh_of(FULLY_COVERED)
    carrier = carriers(mesh)["full"]
    share = carrier.page_bytes // RANKS

    facts = moved(carrier.device_page, carrier.device_page, mesh)

    assert broken_host_memory(facts, read_bytes=0, left_bytes=share) == [
        f"moved: leaves 0 bytes in host memory, not {share:,}"
    ]


def test_a_backup_that_computing_waits_for_is_reported() -> None:
    """The copy to the host as a part of the program that gathers."""
    mesh = mesh_of(FULLY_COVERED)
    carrier = carriers(mesh)["full"]
    backup = hybrid_page_programs(EVERYTHING, mesh)[0]
    to_host = tuple(array.sharding for array in carrier.page)
    waiting = jax.jit(lambda *arguments: backup.function(*arguments, **backup.statics), out_shardings=[to_host] * 8)

    facts = compile_facts(Program(name="backup", function=waiting, arguments=backup.arguments), mesh)

    (broken,) = broken_host_memory(facts, read_bytes=0, left_bytes=0)
    assert broken.startswith("backup: leaves ")
