"""Requests that wait for a row while their prefix is brought back: behind the steps of those that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from app.errors import OutOfPagesError
from app.scheduling.ahead import LOOK_AHEAD
from tests.support.engine import RuntimeSpy
from tests.support.scripted_tiers import TieredEngine, tiered

OpenTiered = Callable[..., TieredEngine]

PREFIXES = [np.random.default_rng(seed).integers(0, 256, 40).tolist() for seed in range(6)]
A, B = PREFIXES[:2]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])


@pytest.fixture
def open_tiered() -> Iterator[OpenTiered]:
    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(tiered(**fields))


def finish(rig: TieredEngine) -> list[str]:
    """Until nothing is left to do. -> requests in order of ending."""
    ended: list[str] = []
    rig.engine.poison_free_pages()
    while rig.engine.scheduler.has_work():
        ended += [output.request_id for output in rig.engine.step()]
        rig.engine.check()
    rig.engine.check_replies()
    assert rig.tiers.expected == {}
    return ended


@OVERLAP
def test_the_next_in_the_queue_are_restored_while_every_row_is_taken(open_tiered: OpenTiered, overlap: bool) -> None:
    """When the row is free they are admitted as ordinary hits: no step goes by without a row."""
    # given
    rig = open_tiered(max_running_requests=1, disable_overlap=not overlap)
    rig.host(A, B)
    rig.copies.steps_to_land = 3
    running = rig.engine.add([1, 2, 3], max_tokens=20)
    rig.engine.step()
    waiting = [rig.engine.add([*prefix, 7], max_tokens=3) for prefix in (A, B)]

    # when
    rig.engine.step(8)

    # then
    assert running not in rig.engine.outputs
    assert rig.tiers.num_begun == 2
    assert not rig.tiers.in_flight
    assert finish(rig) == [running, *waiting]
    assert rig.tiers.num_begun == 2
    assert [rig.engine.outputs[each].cached_by_tier["host"] for each in waiting] == [40, 40]
    assert all(rig.copies.rows[:-1])  # the last plan only releases


def test_they_are_restored_while_one_prompt_takes_the_whole_budget(open_tiered: OpenTiered) -> None:
    # given
    rig = open_tiered(chunked_prefill_size=8)
    rig.host(A)
    rig.engine.add([5] * 60, max_tokens=1)
    waiting = rig.engine.add([*A, 7], max_tokens=1)

    # when
    rig.engine.step(3)

    # then
    assert (rig.tiers.num_begun, len(rig.tiers.in_flight)) == (1, 0)
    assert rig.engine.scheduler.num_running == 1
    finish(rig)
    assert rig.engine.outputs[waiting].restored_tokens.host == 40


def test_only_the_first_in_order_of_priority_are_restored_ahead(open_tiered: OpenTiered) -> None:
    # given
    rig = open_tiered(max_running_requests=1, max_total_tokens=512)
    rig.host(*PREFIXES)
    rig.engine.add([1, 2, 3], max_tokens=30)
    rig.engine.step()
    names = [
        rig.engine.add([*prefix, 7], max_tokens=2, priority=-index)  # the later, the sooner
        for index, prefix in enumerate(PREFIXES)
    ]

    # when
    rig.engine.step(5)

    # then
    restored = [name for name in names if rig.tiers.restored_tokens(name).host]
    assert restored == names[-LOOK_AHEAD:]
    assert rig.tiers.num_begun == LOOK_AHEAD
    assert finish(rig)[1:] == names[::-1]


@OVERLAP
def test_running_rows_get_a_page_in_every_step_beside_slow_restores(open_tiered: OpenTiered, overlap: bool) -> None:
    """With room for it or without: who runs neither pauses nor gives way."""
    # given: 24 pages, the row ends with 16 of them
    rig = open_tiered(max_running_requests=1, max_total_tokens=96, disable_overlap=not overlap)
    rig.host(A, B)
    rig.copies.steps_to_land = 9
    row = rig.engine.add([3] * 10, max_tokens=50)
    rig.engine.step(2)
    waiting = [rig.engine.add([*prefix, 7], max_tokens=2) for prefix in (A, B)]

    # when
    tokens = []
    while row not in rig.engine.outputs:
        rig.engine.step()
        tokens += [each.output_tokens for each in rig.engine.scheduler.progress() if each.request_id == row]

    # then
    assert set(np.diff(tokens).tolist()) == {1}
    assert rig.engine.scheduler.num_retractions == 0
    assert rig.tiers.num_begun >= 1
    finish(rig)
    assert {rig.engine.outputs[each].finish_reason for each in waiting} == {"length"}


def test_what_has_landed_is_given_up_when_a_running_row_needs_the_room(open_tiered: OpenTiered) -> None:
    """It is restored once more when a row is free, and nobody had to give way."""
    # given: 24 pages, of which the row takes up to 17
    rig = open_tiered(max_running_requests=1, max_total_tokens=96)
    rig.host(A)
    row = rig.engine.add([3] * 6, max_tokens=60)
    rig.engine.step(2)
    waiting = rig.engine.add([*A, 7], max_tokens=2)
    rig.engine.step(3)
    assert rig.engine.scheduler.ledger()["cached_evictable"] == 10

    # when
    ended = finish(rig)

    # then
    assert ended == [row, waiting]
    assert rig.engine.scheduler.num_retractions == 0
    assert rig.tiers.num_begun == 2
    assert rig.engine.outputs[waiting].restored_tokens.host > 0


def test_prefixes_restored_ahead_never_keep_the_first_in_the_queue_out(open_tiered: OpenTiered) -> None:
    # given: 32 pages; behind a cold request of 20 are two whose prefixes take 10 each
    rig = open_tiered(max_running_requests=1, max_total_tokens=128)
    rig.host(A, B)
    rig.engine.add([1, 2], "row", max_tokens=12)
    rig.engine.step()
    rig.engine.add([9] * 78, "cold", max_tokens=2)
    for name, prefix in (("a", A), ("b", B)):
        rig.engine.add([*prefix, 7], name, max_tokens=2)

    # when
    rig.engine.step(4)
    assert rig.engine.cached_pages == 20

    # then
    assert finish(rig) == ["row", "cold", "a", "b"]
    assert rig.engine.scheduler.num_retractions == 0


def test_nothing_behind_one_that_does_not_fit_is_restored_ahead(open_tiered: OpenTiered) -> None:
    """The first in the queue gets the room as it comes."""
    # given: 20 pages, 8 of them the row's, and one page a row of growth kept
    rig = open_tiered(max_running_requests=1, max_total_tokens=80)
    rig.host(A, B[:8])
    row = rig.engine.add([3] * 28, max_tokens=5)
    rig.engine.step()
    first = rig.engine.add([*A, 7], max_tokens=2)
    second = rig.engine.add([*B[:8], 7], max_tokens=2)

    # when
    rig.engine.step(2)

    # then
    assert rig.tiers.num_begun == 0
    assert finish(rig) == [row, first, second]


@OVERLAP
def test_a_refused_plan_is_planned_again_without_restores_ahead(open_tiered: OpenTiered, overlap: bool) -> None:
    # given
    rig = open_tiered(max_running_requests=1, disable_overlap=not overlap)
    rig.host(A)
    spy = RuntimeSpy(rig.engine.runtime)
    rig.engine.add([3] * 6, max_tokens=20)
    rig.engine.step(3)
    waiting = rig.engine.add([*A, 7], max_tokens=2)
    spy.refusals.append(OutOfPagesError(need=9, free=1))
    spy.calls.clear()

    # when
    rig.engine.step()

    # then
    assert spy.calls == ["prepare", "prepare", "execute"]
    assert (rig.tiers.num_refused_plans, rig.tiers.num_begun) == (1, 1)
    assert not rig.tiers.in_flight
    finish(rig)
    assert rig.engine.scheduler.num_retractions == 0
    assert rig.tiers.num_begun == 2
    assert rig.engine.outputs[waiting].restored_tokens.host == 40


@OVERLAP
@pytest.mark.parametrize("at", range(5))
def test_an_abort_at_any_point_of_a_restore_ahead_loses_nothing(
    open_tiered: OpenTiered, at: int, overlap: bool
) -> None:
    # given
    rig = open_tiered(max_running_requests=1, disable_overlap=not overlap)
    rig.host(A, B)
    rig.copies.steps_to_land = 2
    rig.engine.add([1, 2, 3], "row", max_tokens=8)
    rig.engine.add([*A, 7], "gone", max_tokens=3)
    rig.engine.add([*B, 7], "next", max_tokens=3)
    rig.engine.step(at)

    # when
    rig.engine.scheduler.abort("gone")
    rig.engine.check()

    # then
    assert finish(rig) == ["gone", "row", "next"]
    assert rig.engine.outputs["next"].restored_tokens.host == 40


def test_a_queue_that_was_looked_at_is_not_looked_at_again(open_tiered: OpenTiered) -> None:
    """A step costs no look at the host for those who just wait on."""
    # given
    rig = open_tiered(max_running_requests=1)
    rig.host(A)
    rig.engine.add([1, 2, 3], max_tokens=30)
    rig.engine.step()
    for prompt in ([*A, 7], [9] * 10, [8] * 10):
        rig.engine.add(prompt, max_tokens=1)
    rig.engine.step(5)
    asked = 0
    restorable = rig.tiers.restorable

    def counted(*args: object) -> object:
        nonlocal asked
        asked += 1
        return restorable(*args)

    rig.tiers.restorable = counted

    # when
    rig.engine.step(5)

    # then
    assert asked == 0
    finish(rig)
