"""Pages of data-parallel ranks side by side in one array, each under ids of its own: no rank sees another's.

Serving with --dp-size above 1 is not built. What it will stand on is that the pool's functions and attention, which
know nothing of ranks, serve such an array inside `shard_map` without moving anything between devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forced_devices import run_on_eight_devices

ROOT = Path(__file__).parents[3]
MESHES = ["2x4", "4x2", "8x1"]  # data x tensor
DTYPES = ["float32", "uint16"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_eight_devices("tests.support.data_parallel_check")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_writes_reads_and_attends_as_it_would_alone(found: dict[str, Any], mesh: str, dtype: str) -> None:
    """Field report H29: buffers that are global while slots are per rank. Equal ids here are different pages."""
    result = found[f"{mesh} {dtype}"]

    assert result["pages_equal"]
    assert result["read_equal"]
    assert result["attention_error"] < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_is_moved_between_ranks_and_pages_are_written_in_place(
    found: dict[str, Any], mesh: str, dtype: str
) -> None:
    result = found[f"{mesh} {dtype}"]

    assert result["collectives"] == {"write": [], "read": [], "attend": []}
    assert result["same_place"]
    assert result["old_deleted"]


@pytest.mark.parametrize("mesh", MESHES)
def test_ids_that_count_through_all_ranks_would_move_pages(found: dict[str, Any], mesh: str) -> None:
    assert found[f"{mesh} float32"]["collectives_of_global_ids"]
