"""Copying one page out of the pool and back reads and writes that page alone, for every page size that tiers allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.config.server_args import ServerArgs
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.providers.target import plan_target
from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.page_carriers import page_programs
from app.tpu.pool_layout import FlatByHead, FlatWide, PoolLayout
from app.tpu.targets import find_target
from tests.support.tpu_matrix import FULLY_COVERED, SMOLLM2

pytestmark = pytest.mark.tpu

BY_HEAD = PoolSpec(num_pages=32767, page_size=1, num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16")
WIDE = replace(BY_HEAD, head_dim=64)


def copies(spec: PoolSpec, layout: PoolLayout) -> list[CompiledFacts]:
    """Backup and restore."""
    mesh = find_target(FULLY_COVERED).mesh(1)
    return [compile_facts(program, mesh) for program in page_programs(spec, mesh, layout)]


def most_accessed(spec: PoolSpec, layout: PoolLayout) -> float:
    """Of the pool, as a fraction."""
    return max(facts.accessed_bytes for facts in copies(spec, layout)) / (spec.page_bytes * (spec.num_pages + 1))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(BY_HEAD, FlatByHead()), (replace(WIDE, page_size=2), FlatWide()), (replace(WIDE, page_size=16), FlatWide())],
)
def test_a_page_is_copied_alone(spec: PoolSpec, layout: PoolLayout) -> None:
    assert most_accessed(spec, layout) < 0.01


def test_a_wide_page_of_one_token_is_not_and_tiers_refuse_it() -> None:
    assert most_accessed(WIDE, FlatWide()) > 1
    fields: dict[str, Any] = {"enable_hierarchical_cache": True, "max_total_tokens": 65536}
    with pytest.raises(ConfigError, match=r"^--page-size=1 is not allowed: 2 or more"):
        plan_target(ServerArgs(page_size=1, **fields), SMOLLM2, find_target(FULLY_COVERED))
    assert plan_target(ServerArgs(page_size=2, **fields), SMOLLM2, find_target(FULLY_COVERED)).host is not None
