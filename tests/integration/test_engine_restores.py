"""Requests whose prefix is on the host: they wait for it in the queue, and nobody else waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from app.errors import OutOfPagesError
from app.providers.testing import failing_runner
from app.scheduling.engine import generate_all
from app.scheduling.launching import PATIENCE_S
from app.scheduling.request import Request
from app.scheduling.restoring import MAX_RESTORES
from app.tpu.failing_runner import InjectedFailure
from tests.integration.test_engine_boundary import Meter, metered_parts, watch_runtime
from tests.support.engine import RuntimeSpy
from tests.support.scripted_tiers import TieredEngine, tiered

OpenTiered = Callable[..., TieredEngine]

A = np.random.default_rng(1).integers(0, 256, 40).tolist()
B = np.random.default_rng(2).integers(0, 256, 40).tolist()
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])


@pytest.fixture
def open_tiered() -> Iterator[OpenTiered]:
    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(tiered(**fields))


def finish(rig: TieredEngine) -> None:
    """Until nothing is left to do; poison in every loose page shows whoever read one."""
    rig.engine.poison_free_pages()
    rig.engine.drain()
    rig.engine.check_replies()
    assert rig.tiers.expected == {}


@OVERLAP
@pytest.mark.parametrize("steps_to_land", [1, 2, 5])
def test_a_prefix_on_the_host_is_a_hit_once_it_has_landed(
    open_tiered: OpenTiered, overlap: bool, steps_to_land: int
) -> None:
    # given
    rig = open_tiered(disable_overlap=not overlap)
    rig.host(A)
    rig.copies.steps_to_land = steps_to_land

    # when
    request_id = rig.engine.add([*A, 7], max_tokens=6)
    finish(rig)

    # then
    output = rig.engine.outputs[request_id]
    assert output.cached_tokens == 40
    assert output.cached_by_tier == {"device": 0, "host": 40, "storage": 0}
    assert rig.tiers.num_begun == 1


@OVERLAP
def test_others_run_while_one_waits_for_its_prefix(open_tiered: OpenTiered, overlap: bool) -> None:
    """The one whose prefix comes back late does not delay the request behind it, and is not lost."""
    # given
    rig = open_tiered(disable_overlap=not overlap)
    rig.host(A)
    rig.copies.steps_to_land = 8

    # when
    slow = rig.engine.add([*A, 7], max_tokens=3)
    quick = rig.engine.add([1, 2, 3], max_tokens=3)
    rig.engine.step(6)

    # then
    assert quick in rig.engine.outputs
    assert slow not in rig.engine.outputs
    assert rig.engine.scheduler.progress()[0].status == "waiting"
    finish(rig)
    assert rig.engine.outputs[slow].restored_tokens.host == 40


def test_a_row_is_planned_only_on_pages_that_have_landed(open_tiered: OpenTiered) -> None:
    """Until the end is told, no plan names a page of the restore."""
    # given
    rig = open_tiered()
    rig.host(A)
    rig.copies.steps_to_land = 6
    spy = RuntimeSpy(rig.engine.runtime)
    rig.engine.add([5] * 20, max_tokens=30)
    rig.engine.add([*A, 7], max_tokens=3)

    # when
    seen = 0
    for _ in range(6):
        rig.engine.step()
        coming = set(rig.tiers.in_flight_ids().pages.tolist())
        seen += bool(coming)
        named = {page for plan in spy.plans for admission in plan.admissions for page in admission.prefix_pages}
        handed_out = {page for prepared in spy.prepared for page in prepared.pages.tolist()}
        assert not coming & (named | handed_out)
    assert seen > 3
    finish(rig)


def test_the_order_of_arrival_holds_when_the_prefix_has_landed(open_tiered: OpenTiered) -> None:
    """One row: whoever came first gets it, though those behind could have had it meanwhile."""
    # given
    rig = open_tiered(max_running_requests=1)
    rig.host(A, B)
    rig.copies.steps_to_land = 4
    names = [rig.engine.add([*A, 7], max_tokens=2), rig.engine.add([1, 2], max_tokens=9)]
    names.append(rig.engine.add([*B, 7], max_tokens=2))

    # when
    ended = []
    while rig.engine.scheduler.has_work():
        ended += [output.request_id for output in rig.engine.step()]

    # then
    assert ended == names


def test_who_waits_for_storage_is_passed_over_and_keeps_its_place(open_tiered: OpenTiered) -> None:
    # given
    rig = open_tiered(max_running_requests=1)
    rig.tiers.held.add("first")
    rig.tiers.num_queued = 1
    rig.engine.add([1, 2, 3], "first", max_tokens=2)
    for name in ("second", "third"):
        rig.engine.add([4, 5, 6], name, max_tokens=3)

    # when
    while "second" not in rig.engine.outputs:
        rig.engine.step()
    rig.tiers.held.clear()
    finish(rig)

    # then
    assert list(rig.engine.outputs) == ["second", "first", "third"]


def test_those_behind_leave_the_room_that_was_promised(open_tiered: OpenTiered) -> None:
    """What the restored request needs besides is still there when its prefix has landed."""
    # given: 32 pages, 10 of them for the restore and 4 for the rest of the first; those behind take 6 each at first
    rig = open_tiered(max_total_tokens=128)
    rig.host(A)
    rig.copies.steps_to_land = 8
    first = rig.engine.add([*A, *range(12)], max_tokens=2)
    behind = {rig.engine.add([index + 50] * 20, max_tokens=30) for index in range(3)}

    # when
    while first not in rig.engine.outputs:
        rig.engine.step()

    # then: it did not have to wait for one of them to end
    assert not behind & rig.engine.outputs.keys()
    assert rig.engine.scheduler.num_retractions == 0
    finish(rig)


@OVERLAP
def test_a_full_pool_makes_the_restore_wait_and_nobody_give_way(open_tiered: OpenTiered, overlap: bool) -> None:
    # given: running rows hold so much that the hosted prefix does not fit beside them
    rig = open_tiered(max_total_tokens=96, disable_overlap=not overlap, cache_type="radix_cache")
    rig.host(A)
    running = rig.engine.add([9] * 48, max_tokens=20)
    rig.engine.step(5)
    late = rig.engine.add([*A, 7], max_tokens=2)

    # when
    while running not in rig.engine.outputs:
        rig.engine.step()
        assert late not in rig.engine.outputs

    # then
    finish(rig)
    assert rig.engine.scheduler.num_retractions == 0
    assert rig.engine.outputs[late].restored_tokens.host == 40


@OVERLAP
def test_a_running_row_outlasts_a_restore_that_took_the_last_pages(open_tiered: OpenTiered, overlap: bool) -> None:
    """The row needs a page that a late restore holds: it neither ends for capacity nor gives way, and goes on after."""
    # given: 16 pages: 2 of the row at first, 11 of the restore and its end, and what the row grows into
    rig = open_tiered(max_total_tokens=64, disable_overlap=not overlap)
    rig.host(A)
    rig.copies.steps_to_land = 60
    row = rig.engine.add([3] * 5, max_tokens=40)
    rig.engine.step(2)
    late = rig.engine.add([*A, 7], max_tokens=2)

    # when
    rig.engine.step(40)

    # then: it is as far as its pages go
    assert rig.tiers.in_flight
    assert not {row, late} & rig.engine.outputs.keys()
    (progress,) = [each for each in rig.engine.scheduler.progress() if each.request_id == row]
    assert progress.output_tokens >= 10
    finish(rig)
    assert {rig.engine.outputs[each].finish_reason for each in (row, late)} == {"length"}
    assert rig.engine.scheduler.num_retractions == 0


def test_a_restore_in_parts_brings_everything(open_tiered: OpenTiered) -> None:
    rig = open_tiered()
    rig.host(A)
    rig.tiers.max_pages = 4

    output = rig.engine.serve([*A, 7], max_tokens=4)

    assert rig.tiers.num_begun == 3
    assert output.restored_tokens.host == 40
    finish(rig)


def test_what_is_on_the_device_is_not_restored(open_tiered: OpenTiered) -> None:
    """Usage by tier, of a request that finds a part of its prefix in each."""
    rig = open_tiered()
    rig.host(A)
    rig.engine.serve(A[:20], max_tokens=1)

    output = rig.engine.serve([*A, 7], max_tokens=4)

    assert output.cached_by_tier == {"device": 20, "host": 20, "storage": 0}
    finish(rig)


def test_a_copy_that_always_fails_keeps_nobody_waiting_for_ever(open_tiered: OpenTiered) -> None:
    rig = open_tiered()
    rig.host(A)
    rig.copies.fail_all = True

    output = rig.engine.serve([*A, 7], max_tokens=4)

    assert (output.cached_tokens, output.finish_reason) == (0, "length")
    assert rig.tiers.num_begun == MAX_RESTORES
    finish(rig)


# -- abort, retraction, refusal, failure -----------------------------------------------------------------------------


@OVERLAP
@pytest.mark.parametrize("at", range(6))
def test_an_abort_at_any_point_of_a_restore_loses_nothing(open_tiered: OpenTiered, at: int, overlap: bool) -> None:
    """What lands for a request that is gone is cached all the same."""
    # given
    rig = open_tiered(disable_overlap=not overlap)
    rig.host(A)
    rig.copies.steps_to_land = 3
    gone = rig.engine.add([*A, 7], max_tokens=3)
    other = rig.engine.add([1, 2, 3], max_tokens=12)
    rig.engine.step(at)

    # when
    rig.engine.scheduler.abort(gone)
    rig.engine.check()
    finish(rig)

    # then
    assert rig.engine.outputs[other].finish_reason == "length"
    if at:
        assert rig.engine.outputs[gone].finish_reason == "abort"
        assert rig.engine.serve([*A, 8], max_tokens=1).cached_by_tier["device"] == 40
    assert rig.tiers.expected == {}


@pytest.mark.parametrize("at", range(1, 12))
def test_a_retraction_beside_a_restore_is_harmless(open_tiered: OpenTiered, at: int) -> None:
    """Whoever gives way is announced to the tiers anew, and may itself be restored."""
    # given
    rig = open_tiered(max_total_tokens=128)
    rig.host(A)
    rig.copies.steps_to_land = 4
    spy = RuntimeSpy(rig.engine.runtime)
    for index in range(2):
        rig.engine.add([*A[:16], index], max_tokens=12)
    rig.engine.add([*A, 7], max_tokens=4)
    rig.engine.step(at)
    rig.back_up(A[:16])

    # when
    spy.refusals.append(OutOfPagesError(need=9, free=1))
    rig.engine.step()
    rig.engine.check()

    # then
    finish(rig)
    assert {output.finish_reason for output in rig.engine.outputs.values()} == {"length"}


@OVERLAP
def test_a_refused_plan_with_a_restore_is_planned_again_without_it(open_tiered: OpenTiered, overlap: bool) -> None:
    """Nobody who runs gives way to a restore; it is begun again with a later plan."""
    # given
    rig = open_tiered(disable_overlap=not overlap)
    rig.host(A)
    spy = RuntimeSpy(rig.engine.runtime)
    for index in range(2):
        rig.engine.add([index] * 6, max_tokens=20)
    rig.engine.step(3)
    late = rig.engine.add([*A, 7], max_tokens=2)
    spy.refusals.append(OutOfPagesError(need=9, free=1))
    spy.calls.clear()

    # when
    rig.engine.step()

    # then
    assert spy.calls == ["prepare", "prepare", "execute"]
    assert (rig.tiers.num_refused_plans, rig.tiers.num_begun) == (1, 1)
    assert not rig.tiers.in_flight
    assert not rig.tiers.begun
    finish(rig)
    assert rig.engine.scheduler.num_retractions == 0
    assert rig.tiers.num_begun == 2
    assert rig.engine.outputs[late].restored_tokens.host == 40


@OVERLAP
@pytest.mark.parametrize("at_dispatch", [True, False])
@pytest.mark.parametrize("step", [4, 6, 8])
def test_a_device_failure_while_restoring(open_tiered: OpenTiered, step: int, at_dispatch: bool, overlap: bool) -> None:
    """What was on its way is lost, what is on the host is not: the request is restored into the new pool."""
    # given: hosting takes programs 0 to 2
    failure = InjectedFailure(step=step, at_dispatch=at_dispatch)
    rig = open_tiered(
        overrides={"model_runner": failing_runner(failure)},
        disable_overlap=not overlap,
    )
    generation = rig.engine.runtime.identity.generation
    rig.host(A)
    rig.copies.steps_to_land = 6
    rig.engine.add([1, 2, 3], max_tokens=12)
    rig.engine.step()
    waiting = rig.engine.add([*A, 7], max_tokens=4)

    # when
    finish(rig)

    # then
    assert rig.engine.runtime.identity.generation == generation + 1
    assert rig.engine.outputs[waiting].finish_reason == "length"
    assert rig.engine.outputs[waiting].restored_tokens.host == 40
    assert rig.tiers.num_begun == 2


# -- plans without rows, and the boundary ----------------------------------------------------------------------------


def test_who_waits_alone_asks_once_for_each_end_and_wait(open_tiered: OpenTiered) -> None:
    """No row can run: each plan without rows waits, and there are no more of them than it takes to land."""
    # given
    rig = open_tiered()
    rig.host(A)
    rig.copies.steps_to_land = 7

    # when
    rig.engine.add([*A, 7], max_tokens=1)
    before_row = 0
    while not any(rig.copies.rows):
        rig.engine.step()
        before_row += 1

    # then
    assert rig.copies.waits == [PATIENCE_S] * 7
    assert before_row == 8
    finish(rig)


def test_a_plan_that_only_brings_a_restore_does_not_wait_beside_a_running_step(open_tiered: OpenTiered) -> None:
    # given: a request whose end is in flight, so that the next plan has no row
    rig = open_tiered()
    rig.host(A)
    rig.engine.add([1, 2, 3], max_tokens=1)
    rig.engine.step()
    rig.engine.add([*A, 7], max_tokens=1)

    # when
    rig.engine.step()

    # then
    assert rig.copies.waits == [0.0]
    finish(rig)


def test_nothing_is_sent_without_rows_while_nothing_moves(open_tiered: OpenTiered) -> None:
    rig = open_tiered()
    rig.host(A)
    rig.engine.serve([1, 2, 3], max_tokens=3)

    rig.engine.step(5)

    assert rig.copies.waits == [0.0]  # the last releases


@OVERLAP
def test_a_step_costs_two_calls_whatever_is_restored(open_tiered: OpenTiered, overlap: bool) -> None:
    # given
    meter = Meter()
    rig = open_tiered(
        overrides=metered_parts(meter), disable_overlap=not overlap, check_invariants=False, max_total_tokens=160
    )
    rig.host(A, B)
    rig.copies.steps_to_land = 3
    meter.calls.clear()
    watch_runtime(meter, rig.engine.runtime)
    for index in range(4):
        rig.engine.add([*A[: 40 - 4 * index], index], max_tokens=5)
        rig.engine.add([*B[: 4 + 8 * index], index], max_tokens=9)

    # when
    busy = 0
    while rig.engine.scheduler.has_work():
        before = meter.calls["runtime.prepare_batch"], meter.calls["runtime.execute_batch"]
        rig.engine.step()
        made = meter.calls["runtime.prepare_batch"] - before[0], meter.calls["runtime.execute_batch"] - before[1]
        busy += made == (1, 1)

        # then
        assert made in ((0, 0), (1, 1))
    assert busy > 10
    assert rig.tiers.num_begun > 1
    assert {call for call in meter.calls if call.startswith("runtime.")} == {
        "runtime.prepare_batch",
        "runtime.execute_batch",
    }
    rig.engine.check_replies()


def test_steps_are_timed_for_the_tiers(open_tiered: OpenTiered) -> None:
    """Every step with rows that was read is told, with what it computed."""
    rig = open_tiered(chunked_prefill_size=16)

    rig.engine.serve(range(40), max_tokens=4)

    prompt_tokens = [each[0] for each in rig.tiers.steps]
    assert sum(prompt_tokens) == 40
    assert sum(each[1] for each in rig.tiers.steps) >= 3
    assert all(0 < seconds < 600 for *_, seconds in rig.tiers.steps)
    assert len(rig.tiers.steps) == sum(rows > 0 for rows in rig.copies.rows)


def test_what_is_left_to_move_is_moved_when_all_are_answered(open_tiered: OpenTiered) -> None:
    """A command line that has its answers still brings what was on its way to an end."""
    # given: an aborted request's restore
    rig = open_tiered()
    rig.host(A)
    rig.copies.steps_to_land = 9
    rig.engine.add([*A, 7], "gone", max_tokens=1)
    rig.engine.step()
    rig.engine.scheduler.abort("gone")

    # when
    (output,) = generate_all(
        rig.engine.scheduler, [Request(request_id="last", prompt_token_ids=np.arange(3, dtype=np.int32))]
    )

    # then
    assert output.finish_reason == "length"
    assert not rig.engine.scheduler.has_background_work()
    assert not rig.tiers.in_flight


def test_the_ledger_shows_what_is_being_restored(open_tiered: OpenTiered) -> None:
    rig = open_tiered()
    rig.host(A)
    rig.copies.steps_to_land = 5
    rig.engine.add([*A, 7], max_tokens=1)

    rig.engine.step()

    assert rig.engine.scheduler.ledger()["restoring"] == 10
    counts = rig.engine.adapter.page_counts()
    assert (counts.restoring, counts.held_by_requests) == (10, 0)
    assert sum(counts) == rig.engine.adapter.capacity
    finish(rig)


def test_a_page_of_a_restore_that_is_lost_is_missed(open_tiered: OpenTiered) -> None:
    rig = open_tiered(check_invariants=False)
    rig.host(A)
    rig.copies.steps_to_land = 3
    rig.engine.add([*A, 7], max_tokens=1)
    rig.engine.step()
    moving: Any = next(iter(rig.tiers.in_flight.values()))
    pages, moving.pages = moving.pages, moving.pages[1:]

    with pytest.raises(Exception, match="leaked"):
        rig.engine.scheduler.check_integrity()

    moving.pages = pages
    finish(rig)
