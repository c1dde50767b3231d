"""The device fails: what ran is over with a clear error, what waits is served, and nothing of the old pool gets in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.core.keys import RadixKey
from app.errors import StaleHandleError
from app.providers.testing import Override, failing_runner
from app.tpu.failing_runner import InjectedFailure
from tests.support.engine import Engine

OpenEngine = Callable[..., Engine]

KINDS = [pytest.param(True, id="at dispatch"), pytest.param(False, id="while it runs")]
OVERLAP = [pytest.param(True, id="overlap"), pytest.param(False, id="one at a time")]


def failing(step: int, at_dispatch: bool) -> dict[str, Override]:
    """A model whose program number `step` fails."""
    failure = InjectedFailure(step=step, at_dispatch=at_dispatch)
    return {"model_runner": failing_runner(failure)}


def check_failed_over(engine: Engine, generation: int) -> None:
    """One generation more; running requests failed saying why; all others have the cold twin's output."""
    engine.drain()
    engine.check_idle()
    engine.check_replies()
    assert engine.runtime.identity.generation == generation + 1
    failed = [output for output in engine.outputs.values() if output.finish_reason == "error"]
    assert failed
    for output in failed:
        assert output.error
        assert "injected" in output.error or "Out of memory" in output.error, output.error


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("at_dispatch", KINDS)
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9, 12])
def test_running_requests_fail_and_waiting_ones_are_served(
    engine: OpenEngine, step: int, at_dispatch: bool, overlap: bool
) -> None:
    """Programs 0.. are the chunks of long prompts, then steps that decode, or both; two rows for five requests."""
    # given
    opened = engine(
        overrides=failing(step, at_dispatch),
        disable_overlap=not overlap,
        max_running_requests=2,
        chunked_prefill_size=8,
    )
    generation = opened.runtime.identity.generation
    for index in range(5):
        opened.add([*range(12), index, index], max_tokens=3 + index)

    # then
    check_failed_over(opened, generation)
    assert sum(output.finish_reason == "length" for output in opened.outputs.values()) >= 3


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("at_dispatch", KINDS)
@pytest.mark.parametrize(
    "kind", [{"window": 6}, {"recurrent": True}, {"window": 6, "recurrent": True}], ids=["swa", "recurrent", "all"]
)
def test_so_it_is_with_windows_and_states(
    engine: OpenEngine, kind: dict[str, Any], at_dispatch: bool, overlap: bool
) -> None:
    """Steps that are read after the pool was lost move no window, and their snapshots go."""
    snapshots = {"recurrent_track_interval": 8, "max_recurrent_snapshots": 24} if "recurrent" in kind else {}
    for step in (0, 3, 6, 9):
        opened = engine(
            **kind,
            **snapshots,
            cache_type=None,
            overrides=failing(step, at_dispatch),
            disable_overlap=not overlap,
            max_running_requests=2,
            chunked_prefill_size=8,
        )
        generation = opened.runtime.identity.generation
        for index in range(5):
            opened.add([*range(20), index, index], max_tokens=6 + index)

        check_failed_over(opened, generation)


@pytest.mark.parametrize("at_dispatch", KINDS)
def test_the_request_alone_fails_and_the_next_is_served(engine: OpenEngine, at_dispatch: bool) -> None:
    """Without a second step in flight."""
    opened = engine(overrides=failing(0, at_dispatch))
    generation = opened.runtime.identity.generation

    assert opened.serve([1, 2, 3], max_tokens=4).finish_reason == "error"
    assert opened.serve([1, 2, 3], max_tokens=4).finish_reason == "length"

    check_failed_over(opened, generation)


@pytest.mark.parametrize("at_dispatch", KINDS)
def test_what_the_step_before_produced_stands(engine: OpenEngine, at_dispatch: bool) -> None:
    """A second step in flight fails: the request that ended in the first has its whole output."""
    # given: programs 0 (both prompts), 1, 2 (both decode), 3 (the long one alone) fails
    opened = engine(overrides=failing(3, at_dispatch), chunked_prefill_size=64)
    generation = opened.runtime.identity.generation
    opened.add(range(10), "short", max_tokens=3)
    opened.add(range(20, 30), "long", max_tokens=12)

    # then
    check_failed_over(opened, generation)
    assert opened.outputs["short"].finish_reason == "length"
    assert len(opened.outputs["short"].token_ids) == 3
    assert opened.outputs["long"].finish_reason == "error"
    assert len(opened.outputs["long"].token_ids) == 3


@pytest.mark.parametrize("at_dispatch", KINDS)
def test_nothing_of_the_lost_pool_is_reused(engine: OpenEngine, at_dispatch: bool) -> None:
    """Old receipts are refused, the cache is empty, and poison in every free page changes nothing."""
    # given: a cached prefix, and a lock on it from outside
    opened = engine(overrides=failing(6, at_dispatch))
    prompt = list(range(20))
    opened.serve(prompt, max_tokens=2)
    cache = opened.container.tree_cache()
    key = RadixKey.of(np.array([*prompt, 1], np.int32))
    receipt = cache.lock(cache.match(key))
    generation = opened.runtime.identity.generation

    # when
    opened.serve([*prompt, 1], max_tokens=8)

    # then
    assert opened.runtime.identity.generation == generation + 1
    with pytest.raises(StaleHandleError):
        cache.unlock(receipt)
    assert opened.cached_pages == 0
    opened.poison_free_pages()
    assert opened.serve([*prompt, 1], max_tokens=8).cached_tokens == 0
    check_failed_over(opened, generation)


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("at_dispatch", KINDS)
def test_a_retracted_request_whose_token_is_lost_is_served_all_the_same(
    engine: OpenEngine, at_dispatch: bool, overlap: bool
) -> None:
    """Rule (c) meets the failure: the token that is owed never comes, and the request is computed again."""
    survivors = 0
    for step in range(4, 22, 3):
        opened = engine(
            overrides=failing(step, at_dispatch),
            disable_overlap=not overlap,
            max_total_tokens=40,
            cache_type="chunk_cache",
        )
        generation = opened.runtime.identity.generation
        for index in range(3):
            opened.add([index, 1, 2, 3, 4], max_tokens=14)

        check_failed_over(opened, generation)

        survivors += sum(output.finish_reason == "length" for output in opened.outputs.values())
        assert opened.scheduler.num_retractions > 0 or step < 14
    assert survivors > 3


@pytest.mark.parametrize("at_dispatch", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_abort_beside_the_failure_is_harmless(engine: OpenEngine, at_dispatch: bool, when: str) -> None:
    """A step that failed as it was dispatched is not read yet when the client gives up: pages and locks are stale."""
    opened = engine(overrides=failing(2, at_dispatch))
    generation = opened.runtime.identity.generation
    opened.add(range(20), "running", max_tokens=10)
    opened.add(range(30, 40), "other", max_tokens=10)
    opened.step(2)
    if when == "before":
        opened.scheduler.abort("running")
    opened.step()

    opened.check()
    opened.scheduler.abort("running")
    opened.check()

    check_failed_over(opened, generation)


def test_one_failure_is_told_once(engine: OpenEngine) -> None:
    """Two steps in flight, both lost: one terminal reply each, one new generation."""
    opened = engine(overrides=failing(3, False), max_running_requests=4)
    generation = opened.runtime.identity.generation
    for index in range(4):
        opened.add([index], max_tokens=12)

    opened.drain()

    assert {output.finish_reason for output in opened.outputs.values()} == {"error"}
    assert opened.runtime.identity.generation == generation + 1
