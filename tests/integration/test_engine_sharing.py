"""Who goes first, and who waits for whose prefix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from app.core.keys import Namespace
from tests.support.engine import Engine, RuntimeSpy

OpenEngine = Callable[..., Engine]
SHARED = np.random.default_rng(5).integers(0, 256, 64).tolist()


# -- in-batch prefix sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [8, 16, 128])
def test_a_shared_prefix_is_computed_once(engine: OpenEngine, chunk: int, overlap: bool) -> None:
    """Eight requests at once with a prefix of 64 tokens that nobody has cached."""
    opened = engine(
        chunked_prefill_size=chunk, max_running_requests=8, max_total_tokens=512, disable_overlap=not overlap
    )
    spy = RuntimeSpy(opened.runtime)
    for index in range(8):
        opened.add([*SHARED, index, index], max_tokens=4)

    opened.drain()

    assert spy.prompt_tokens == 64 + 8 * 2
    assert [opened.outputs[f"r{index}"].cached_tokens for index in range(8)] == [0] + [64] * 7
    opened.check_replies()


def test_nobody_waits_for_less_than_a_page(engine: OpenEngine) -> None:
    """With nothing to gain all of them start in the first step."""
    opened = engine(chunked_prefill_size=64)
    for index in range(4):
        opened.add([1, 2, 3, 10 + index], max_tokens=3)

    opened.step()

    assert opened.scheduler.num_running == 4


def test_a_page_that_ends_with_the_prompt_is_not_waited_for(engine: OpenEngine) -> None:
    """A match never covers the last token, so two equal prompts of one page have nothing to give each other."""
    opened = engine(chunked_prefill_size=64)
    opened.add(range(4), max_tokens=3)
    opened.add(range(4), max_tokens=3)

    opened.step()

    assert opened.scheduler.num_running == 2
    opened.drain()
    opened.check_replies()
    opened.check_idle()


def test_other_tenants_are_not_waited_for(engine: OpenEngine) -> None:
    """H12: equal tokens under another salt are another prefix."""
    opened = engine(chunked_prefill_size=256, max_total_tokens=512)
    for salt in (None, "", "a", "b"):
        opened.add([*SHARED, 1], namespace=Namespace(salt=salt), max_tokens=3)

    opened.step()

    assert opened.scheduler.num_running == 4
    opened.drain()
    assert {output.cached_tokens for output in opened.outputs.values()} == {0}
    opened.check_replies()


def test_nobody_waits_without_prefix_reuse(engine: OpenEngine) -> None:
    """Off with chunk_cache: waiting would gain nothing."""
    opened = engine(cache_type="chunk_cache", chunked_prefill_size=512, max_total_tokens=512)
    for index in range(4):
        opened.add([*SHARED, index], max_tokens=3)

    opened.step()

    assert opened.scheduler.num_running == 4
    opened.drain()
    opened.check_replies()


def test_those_who_need_nothing_of_it_overtake_the_waiting(engine: OpenEngine) -> None:
    opened = engine(chunked_prefill_size=128, max_total_tokens=512)
    opened.add([*SHARED, 1], "computes", max_tokens=3)
    opened.add([*SHARED, 2], "waits", max_tokens=3)
    opened.add([9, 9, 9], "other", max_tokens=3)

    opened.step()

    assert {seq.request_id for seq in opened.scheduler._waiting} == {"waits"}
    assert opened.scheduler.num_running == 2
    opened.drain()
    assert opened.outputs["waits"].cached_tokens == 64
    opened.check_replies()


def test_waiting_is_bounded(engine: OpenEngine) -> None:
    """A peer that never gets on, because others take the chunk budget, is not waited for without end."""
    opened = engine(chunked_prefill_size=4, max_running_requests=4, max_total_tokens=1024)
    rng = np.random.default_rng(0)
    opened.add([*SHARED, 1], "peer", max_tokens=2)
    opened.add([*SHARED, 2], "waits", max_tokens=2)
    for _ in range(400):
        if opened.scheduler.num_waiting < 3:
            opened.add(rng.integers(0, 256, 12), max_tokens=2)
        opened.step()
        if "waits" in opened.outputs:
            break

    assert "waits" in opened.outputs
    opened.drain()
    opened.check_replies()


def test_a_chain_of_growing_prompts_shares_what_it_can_without_waiting_long(engine: OpenEngine) -> None:
    """Each prompt is the one before and four tokens more, so each waits for the one before; not for a long chain."""
    opened = engine(chunked_prefill_size=64, max_running_requests=8, max_total_tokens=512)
    spy = RuntimeSpy(opened.runtime)
    for pages in range(1, 9):
        opened.add([*SHARED[: 4 * pages], 7], max_tokens=2)

    opened.drain(max_steps=12)

    assert spy.prompt_tokens < sum(4 * pages + 1 for pages in range(1, 9))
    opened.check_replies()


# -- order ---------------------------------------------------------------------------------------------------------


def warm_and_queue(engine: OpenEngine, policy: str) -> Engine:
    """One row; three prompts wait behind a running one, the later the longer their cached prefix."""
    opened = engine(schedule_policy=policy, max_running_requests=1, chunked_prefill_size=128, max_total_tokens=512)
    opened.serve(SHARED, max_tokens=1)
    opened.add([200] * 5, "first", max_tokens=4)
    opened.step()
    opened.add([201] * 30, "none", max_tokens=2)
    opened.add([*SHARED[:16], 1, 2], "short", max_tokens=2)
    opened.add([*SHARED[:48], 1, 2], "long", max_tokens=2)
    opened.add([*SHARED[:48], 3, 4], "long too", max_tokens=2)
    opened.drain()
    opened.check_replies()
    return opened


def test_fcfs_serves_in_order_of_arrival(engine: OpenEngine) -> None:
    opened = warm_and_queue(engine, "fcfs")

    assert list(opened.outputs) == ["r0", "first", "none", "short", "long", "long too"]


def test_lpm_serves_the_longest_cached_prefix_first(engine: OpenEngine) -> None:
    opened = warm_and_queue(engine, "lpm")

    assert list(opened.outputs) == ["r0", "first", "long", "long too", "short", "none"]


def test_lpm_without_prefix_reuse_is_fcfs(engine: OpenEngine) -> None:
    opened = engine(schedule_policy="lpm", cache_type="chunk_cache", max_running_requests=1)
    for index in range(4):
        opened.add([*SHARED[:8], index], max_tokens=2)

    assert list(opened.drain()) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_retracted_request_comes_back_to_its_place(engine: OpenEngine, policy: str) -> None:
    """It arrived before those who wait, so it goes before them again."""
    opened = engine(schedule_policy=policy, max_total_tokens=48, max_running_requests=2)
    spy = RuntimeSpy(opened.runtime)
    opened.add([1] * 12, "old", max_tokens=24)
    opened.add([2] * 12, "young", max_tokens=24)
    opened.step(2)
    for index in range(3):
        opened.add([10 + index] * 12, f"late{index}", max_tokens=2)

    opened.drain()

    admitted = [int(admission.token_ids[0]) for plan in spy.plans for admission in plan.admissions]
    assert opened.scheduler.num_retractions
    assert [prompt for prompt in admitted if prompt != 2] == [1, 10, 11, 12]
    assert admitted.index(10) > max(index for index, prompt in enumerate(admitted) if prompt == 2)
    opened.check_replies()


def test_the_first_that_does_not_fit_is_not_overtaken(engine: OpenEngine) -> None:
    """Small late requests cannot starve a big one: nobody is admitted past it."""
    opened = engine(max_total_tokens=96, max_running_requests=4, chunked_prefill_size=128)
    opened.add([1] * 40, "runs", max_tokens=20)
    opened.step()
    opened.add([2] * 70, "big", max_tokens=2)
    for index in range(3):
        opened.add([10 + index] * 3, f"small{index}", max_tokens=2)
    opened.step(3)
    assert opened.scheduler.num_waiting == 4

    opened.drain()

    assert next(iter(opened.outputs)) == "runs"
    opened.check_replies()
