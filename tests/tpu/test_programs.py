"""The programs that a runtime calls, compiled for real TPUs: in place, lean, and sending only what is planned."""

from __future__ import annotations

import pytest

from app.runtime.programs import PLANNED_COLLECTIVES, step_programs
from app.tpu.targets import find_target
from tests.support.tpu_matrix import (
    FULLY_COVERED,
    MODELS,
    PAGES,
    SIZES,
    Case,
    choice_for,
    flat_attention,
    quick_cases,
    run,
    spec_for,
)

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("case", quick_cases(), ids=str)
def test_the_compiled_program_keeps_every_gate(case: Case) -> None:
    assert run(case).broken == []


def test_every_program_of_a_step_has_its_planned_collectives() -> None:
    config, tp_size = next(iter(MODELS.values()))
    spec = spec_for(config, tp_size, PAGES)
    attention = flat_attention(choice_for(config, tp_size).kind, spec, tp_size)
    mesh = find_target(FULLY_COVERED).mesh(tp_size)

    listed = step_programs(config, mesh, spec, attention, "bfloat16", SIZES)

    assert [program.name for program in listed] == list(PLANNED_COLLECTIVES)
