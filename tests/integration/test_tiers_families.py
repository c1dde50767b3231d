"""Every model family through every tier: ids and distributions are those of the cold twin, wherever the prefix was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forced_devices import run_on_eight_devices
from tests.support.golden_models import served_goldens
from tests.support.served_tiers import check_ways, served_ways

FAMILIES = served_goldens()
OFTEN = ("gemma3_text",)  # the others take longer to compile, or are served over two devices below
OVER_TWO = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1")


@pytest.mark.parametrize(
    "family",
    [family if family in OFTEN else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
def test_a_prefix_from_any_tier_changes_neither_ids_nor_distributions(family: str, tmp_path: Path) -> None:
    check_ways(served_ways(family, tmp_path))


@pytest.mark.parametrize(
    "family", [family if family == "llama" else pytest.param(family, marks=pytest.mark.slow) for family in OVER_TWO]
)
def test_nor_does_it_over_two_devices(family: str) -> None:
    check_ways(run_on_eight_devices("tests.support.served_tiers_check", family, "2"))
