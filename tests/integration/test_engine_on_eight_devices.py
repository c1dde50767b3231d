"""The whole engine on 1, 2 and 8 CPU devices of one process: same plans, same answers, pages written in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.forced_devices import run_on_eight_devices

ROOT = Path(__file__).parents[2]
SIZES = [1, 2, 8]
# float32: sums over ranks are taken in another order. bfloat16: a sum that differs may round to the next number.
POOLS = {"float32": ("float32", 1e-4), "bfloat16": ("uint16", 2e-2)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_eight_devices("tests.support.eight_devices")


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("tp_size", SIZES)
def test_the_pool_stays_where_it_is_through_prefill_and_decode(found: dict[str, Any], tp_size: int, dtype: str) -> None:
    result = found[f"{tp_size} {dtype}"]
    stored_as, _ = POOLS[dtype]

    assert (result["stored_as"], result["devices"], result["tp_rank"]) == (stored_as, tp_size, 0)
    computing = [step for step in result["steps"] if step["decodes"] or step["prompt_tokens"]]
    assert any(step["prompt_tokens"] and not step["decodes"] for step in computing)
    assert any(step["decodes"] and not step["prompt_tokens"] for step in computing)
    assert all(step["same_place"] for step in result["steps"])
    assert all(step["old_deleted"] for step in computing)


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("tp_size", SIZES[1:])
def test_tokens_and_logprobs_do_not_depend_on_the_number_of_devices(
    found: dict[str, Any], tp_size: int, dtype: str
) -> None:
    one, many = found[f"1 {dtype}"], found[f"{tp_size} {dtype}"]
    _, tolerance = POOLS[dtype]

    assert many["tokens"] == one["tokens"]
    np.testing.assert_allclose(many["logprobs"], one["logprobs"], atol=tolerance)
    assert sum(one["cached"]) > 0


@pytest.mark.parametrize("tp_size", SIZES[1:])
def test_ranks_of_one_process_are_planned_for_together(found: dict[str, Any], tp_size: int) -> None:
    """Field report H14: two ranks enter a layer with batches a page apart: each planned from its own free space.

    The part that exists today: tensor-parallel ranks have one control plane, which counts pages over all of them; a
    plan is made once whatever the number of ranks, and is the same for any. There is no host tier to load back from.
    """
    one, many = found["1 float32"], found[f"{tp_size} float32"]

    assert many["calls"] == one["calls"]
    assert many["plans"] == one["plans"]
    assert many["cached"] == one["cached"]
