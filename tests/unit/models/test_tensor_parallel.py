"""The model cut over 1, 2, 4 and 8 CPU devices is the same model. float32, 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config.parallel import padded_kv_heads
from app.errors import ConfigError
from app.tpu.mesh import make_mesh
from tests.support.forced_devices import run_on_eight_devices

ROOT = Path(__file__).parents[3]
SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_eight_devices("tests.support.tensor_parallel_check")


@pytest.mark.parametrize("tp_size", SIZES[1:])
def test_logits_and_stored_pages_equal_those_of_one_device(found: dict[str, Any], tp_size: int) -> None:
    one, many = found["1"], found[str(tp_size)]

    np.testing.assert_allclose(many["logits"], one["logits"], atol=1e-5)
    np.testing.assert_allclose(many["contents"], one["contents"], atol=1e-5)


@pytest.mark.parametrize("tp_size", SIZES)
def test_a_step_writes_in_place_and_sums_twice_a_layer_and_moves_nothing_else(
    found: dict[str, Any], tp_size: int
) -> None:
    result = found[str(tp_size)]

    assert result["old_deleted"]
    assert result["same_place"]
    assert result["shard_shape"] == [13, 4, max(2 // tp_size, 1) * 16]
    assert result["collectives"] == ["all-reduce"] * (0 if tp_size == 1 else 2)


def test_kv_heads_are_shared_out_or_replicated() -> None:
    assert padded_kv_heads(8, 2, 1) == 2
    assert padded_kv_heads(8, 2, 2) == 2
    assert padded_kv_heads(8, 2, 8) == 8


@pytest.mark.parametrize(("heads", "kv_heads", "tp_size"), [(9, 3, 2), (12, 4, 6), (12, 3, 4 * 5)])
def test_sizes_that_do_not_divide_are_refused(heads: int, kv_heads: int, tp_size: int) -> None:
    with pytest.raises(ConfigError, match=str(tp_size)):
        padded_kv_heads(heads, kv_heads, tp_size)


def test_too_few_devices_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"--tp-size=4096 .* cpu devices"):
        make_mesh(4096, "cpu")
