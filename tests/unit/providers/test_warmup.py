"""What is compiled before requests are taken: by whom, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jax.errors import JaxRuntimeError

from app.caches.tiers.ports import NO_TIERS
from app.config.server_args import Warmup
from app.errors import ConfigError
from app.providers.report import engine_facts
from app.providers.testing import overridden
from app.providers.warmup import level_of_batch, level_of_server, warm_up
from app.scheduling.limits import SchedulerLimits
from tests.support.engine import server_args

LIMITS = SchedulerLimits(max_running_requests=2, context_length=64, chunk_tokens=16, vocab_size=10)


@pytest.mark.parametrize(
    ("warmup", "on_cpu", "on_tpu", "batch"),
    [
        ("auto", "copies", "decode", "copies"),
        ("copies", "copies", "copies", "copies"),
        ("none", "none", "none", "none"),
        ("decode", "decode", "decode", "decode"),
        ("all", "all", "all", "all"),
    ],
)
def test_auto_is_decode_for_a_server_on_tpu(warmup: Warmup, on_cpu: str, on_tpu: str, batch: str) -> None:
    assert (level_of_server(warmup, "cpu"), level_of_server(warmup, "tpu")) == (on_cpu, on_tpu)
    assert level_of_batch(warmup) == batch


@pytest.mark.parametrize(
    ("warmup", "at_start", "later"),
    [
        ("auto", [], ["decode steps of 2 shapes", "prompts of 2 shapes"]),
        ("decode", ["decode steps of 2 shapes"], ["prompts of 2 shapes"]),
        ("all", ["decode steps of 2 shapes", "prompts of 2 shapes"], []),
    ],
)
def test_the_report_says_what_a_server_compiles_at_its_start_and_what_later(
    warmup: Warmup, at_start: list[str], later: list[str]
) -> None:
    with overridden(server_args(warmup=warmup, context_length=100), fake=True) as container:
        facts = engine_facts(container)

    assert [part for part in facts["compiled_at_start"] if "shapes" in part] == at_start
    assert [part for part in facts["compiled_when_needed"] if "shapes" in part] == later
    assert len(facts["compiled_at_start"] + facts["compiled_when_needed"]) == 5
    assert facts["buckets_rows"] == [2, 4]
    assert facts["buckets_context_tokens"] == [100]


class FailingRuntime:
    """A runtime whose second step fails."""

    def __init__(self, message: str) -> None:
        self._message = message

    def warm_up(self, _level: str, _chunk_tokens: int) -> Iterator[tuple[str, float]]:
        yield "one", 0.0
        raise JaxRuntimeError(self._message)


def test_memory_that_does_not_suffice_is_a_matter_of_settings() -> None:
    runtime: Any = FailingRuntime("RESOURCE_EXHAUSTED: out of memory: needs 17 GB")

    with pytest.raises(ConfigError, match=r"--warmup='decode' .*lower --mem-fraction-static.* needs 17 GB"):
        list(warm_up(runtime, "decode", LIMITS, NO_TIERS))


def test_other_failures_are_raised_as_they_are() -> None:
    runtime: Any = FailingRuntime("INTERNAL: a compiler's bug")

    with pytest.raises(JaxRuntimeError, match="INTERNAL"):
        list(warm_up(runtime, "decode", LIMITS, NO_TIERS))


@pytest.mark.parametrize(("warmup", "at_start"), [("auto", True), ("copies", True), ("decode", True), ("none", False)])
def test_with_tiers_their_copies_are_compiled_at_the_start(warmup: Warmup, at_start: bool) -> None:
    args = server_args(
        warmup=warmup, context_length=100, cache_type="unified_radix_cache", enable_hierarchical_cache=True
    )
    with overridden(args, fake=True) as container:
        facts = engine_facts(container)

    assert ("copies between tiers" in facts["compiled_at_start"]) is at_start
    assert ("copies between tiers" in facts["compiled_when_needed"]) is not at_start


def test_restores_are_weighed_from_the_start_by_what_copies_took_in_warming_up() -> None:
    args = server_args(cache_type="unified_radix_cache", enable_hierarchical_cache=True, context_length=64)
    with overridden(args, fake=True) as container:
        tiers = container.tree_cache().tiers
        assert tiers.counters().rates.restored_bytes_per_s is None

        list(warm_up(container.runtime(), "copies", LIMITS, tiers))

        assert tiers.counters().rates.restored_bytes_per_s == container.runtime().restored_bytes_per_s()
        assert tiers.counters().rates.restored_bytes_per_s > 0


def test_without_tiers_copies_are_nothing() -> None:
    with overridden(server_args(context_length=64), fake=True) as container:
        steps = list(warm_up(container.runtime(), "copies", LIMITS, container.tree_cache().tiers))
    assert steps == []
