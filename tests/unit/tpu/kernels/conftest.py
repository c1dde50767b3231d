"""Kernels are for TPU: here Pallas' TPU interpreter runs them, which imitates DMA, semaphores and memory spaces on CPU.

It costs time for every byte of a pool, so pools are tiny. Memory that nobody wrote reads as NaN there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield
    pltpu.reset_tpu_interpret_mode_state()  # a kernel that raised leaves its memory behind


# A clock has this many places, and each copy draws one; two copies that drew the same seem to be ordered. The default
# is a single place, with which no race between copies is ever found. Three pairs that race escape once in 10**8 runs.
CLOCK_PLACES = 512


@pytest.fixture
def races(capsys: pytest.CaptureFixture[str]) -> Callable[..., bool]:
    """`races(function, *arrays)`: whether the function's kernels have accesses that nothing orders."""

    def run(function: Callable[..., Any], *arrays: Any) -> bool:
        params = pltpu.InterpretParams(detect_races=True, vector_clock_size=CLOCK_PLACES)
        with pltpu.force_tpu_interpret_mode(params):
            jax.block_until_ready(jax.jit(lambda *args: function(*args))(*arrays))
        return "RACE DETECTED" in capsys.readouterr().out

    return run
