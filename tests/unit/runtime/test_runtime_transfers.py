"""Transfers beside steps: the order of copies and compute, what plans may ask for, and a device that fails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from app.core.batch import BatchPlan
from app.core.handles import CacheExtentRef
from app.core.transfers import Fetch, Lookup, PageIds, PageKeys, TransferPlan
from app.errors import ConfigError, OutOfPagesError
from app.providers.testing import failing_runner
from app.runtime.dispatch import StepDispatcher
from app.tpu.failing_runner import InjectedFailure
from app.tpu.page_carriers import ArraysCarrier
from app.tpu.slow_copies import SlowCopies
from app.tpu.tier_copies import DeviceCopies
from tests.support.engine import cold_tokens
from tests.support.runtime import GREEDY, RuntimeRig, opened_runtime
from tests.support.scripted_lane import ScriptedLane
from tests.support.tier_rig import PAGE_SIZE, LandedCopies, TierRig, opened_tiers

PROMPT = np.arange(10, 22, dtype=np.int32)  # three pages
LONGER = np.append(PROMPT, np.arange(90, 95, dtype=np.int32))
OTHER = np.arange(50, 62, dtype=np.int32)


def computed(rig: TierRig, prompt: np.ndarray = PROMPT) -> PageIds:
    """Pages with the KV of a prompt, of no row any more."""
    prepared, _ = rig.run(rig.prompt_plan(prompt))
    rig.run(rig.release_plan(prepared))
    return PageIds(prepared.pages)


def with_transfers(rig: TierRig, plan: BatchPlan, **transfers: Any) -> BatchPlan:
    return replace(plan, transfers=rig.transfers(**transfers))


def answers_after(rig: TierRig, prefix: PageIds) -> None:
    """A longer prompt over these cached pages is answered as its cold twin."""
    prepared, completion = rig.run(rig.prompt_plan(LONGER, prefix=prefix.pages))
    rig.note(completion)
    assert completion.token_ids.tolist() == cold_tokens(LONGER, 1)
    rig.run(rig.release_plan(prepared))


# -- order --------------------------------------------------------------------------------------------------------


def test_a_backup_of_pages_that_the_same_plan_gives_to_another_row_holds_what_they_held() -> None:
    with opened_tiers(max_total_tokens=4 * PAGE_SIZE) as rig:
        # given: of four pages, three are cached
        source = computed(rig)

        # when: one plan frees them, backs them up, and gives them to another prompt
        rig.free_device(source)
        backup = rig.backup(source)
        prepared, completion = rig.run(with_transfers(rig, rig.prompt_plan(OTHER), backups=(backup,)))
        rig.note(completion)
        assert np.intersect1d(prepared.pages, source.pages).size
        assert completion.token_ids.tolist() == cold_tokens(OTHER, 1)

        # then
        (target,) = prepared.transfers.backups
        rig.until(backup.number)
        rig.free_device(PageIds(prepared.pages))
        restore = rig.restore(target)
        rig.run(rig.release_plan(prepared))
        prepared, _ = rig.move(restores=(restore,))
        rig.until(restore.number)
        (back,) = prepared.transfers.restores
        _, completion = rig.run(rig.prompt_plan(PROMPT[:9], prefix=back.pages[:2]))
        assert completion.token_ids.tolist() == cold_tokens(PROMPT[:9], 1)
        rig.check()


def test_a_backup_is_gathered_before_its_step_is_dispatched_and_copied_after_it(mocker: Any) -> None:
    events: list[str] = []

    def noting(owner: Any, verb: str) -> None:
        called = getattr(owner, verb)

        def note(*args: Any, **named: Any) -> Any:
            events.append(verb)
            return called(*args, **named)

        mocker.patch.object(owner, verb, note)

    with opened_tiers() as rig:
        source = computed(rig)
        backup = rig.backup(source)
        for owner, verb in ((ArraysCarrier, "gather"), (StepDispatcher, "run"), (DeviceCopies, "to_host")):
            noting(owner, verb)
        _, completion = rig.run(with_transfers(rig, rig.prompt_plan(OTHER), backups=(backup,)))
        rig.note(completion)
        rig.until(backup.number)

        assert events[:3] == ["gather", "run", "to_host"]
        assert events.count("to_host") == 1


@pytest.mark.parametrize("polls", [0, 5])
def test_restored_pages_read_right_in_the_step_after_their_end(polls: int) -> None:
    with opened_tiers(copies=partial(SlowCopies, late={0: polls, 1: polls})) as rig:
        source = computed(rig)
        host = rig.backed_up(source)
        rig.pool.poison(source.pages)
        rig.free_device(source)
        restore = rig.restore(host)

        prepared, _ = rig.move(restores=(restore,))
        rig.until(restore.number)

        answers_after(rig, prepared.transfers.restores[0])
        rig.check()


def test_window_pages_and_snapshots_are_restored_for_a_prefix_to_be_used() -> None:
    with opened_tiers(hybrid_model=True) as rig:
        # given: a prompt's pages of every kind, and the snapshot at its end
        prepared, _ = rig.run(replace(rig.prompt_plan(PROMPT), snapshots=np.ones(1, np.bool_)))
        source = PageIds(prepared.pages, prepared.window_pages, prepared.snapshot_slots)
        rig.run(rig.release_plan(prepared))

        # when: they leave and come back
        host = rig.backed_up(source)
        rig.pool.poison(source.pages)
        rig.pool.poison_window(source.window_pages)
        rig.pool.poison_states(source.states)
        rig.free_device(source)
        restore = rig.restore(host)
        prepared, _ = rig.move(restores=(restore,))
        rig.until(restore.number)
        (back,) = prepared.transfers.restores

        # then
        builder = rig.builder()
        extent = CacheExtentRef.of(rig.runtime.identity, back.pages)
        (state,) = back.states.tolist()
        slot = builder.admit(extent, LONGER, LONGER.size, GREEDY, prefix_window_pages=back.window_pages, state=state)
        builder.extend(slot, 0, PROMPT.size, LONGER[PROMPT.size :], samples=True)
        _, completion = rig.run(builder.build())
        assert completion.token_ids.tolist() == cold_tokens(LONGER, 1)
        rig.check()


def test_poison_in_a_page_after_its_gather_reaches_no_host_copy() -> None:
    with opened_tiers(copies=partial(SlowCopies, late={0: 9})) as rig:
        source = computed(rig)
        before = rig.device_bytes(source)
        backup = rig.backup(source)
        prepared, _ = rig.move(backups=(backup,))
        rig.pool.poison(source.pages)
        rig.until(backup.number)
        assert rig.host_bytes(prepared.transfers.backups[0]) == before


def test_a_step_in_flight_is_in_the_copy_and_the_copys_own_step_is_not() -> None:
    with opened_tiers() as rig:
        # given: a row whose last page has room
        held, _ = rig.run(rig.prompt_plan(PROMPT[:9]))
        last = PageIds(held.pages[2:])
        before = rig.device_bytes(last)

        # when: a step writes into it and is not waited for; the next one backs it up and writes into it as well
        first = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.decode_plan(held, 9)))
        backup = rig.backup(last)
        plan = with_transfers(rig, rig.decode_plan(held, 10), backups=(backup,))
        prepared = rig.runtime.prepare_batch(plan)
        second = rig.runtime.execute_batch(prepared)
        for handle in (first, second):
            rig.note(handle.wait())
        rig.until(backup.number)

        # then
        (copied,), (now,) = rig.host_bytes(prepared.transfers.backups[0]), rig.device_bytes(last)
        assert len({before[0], copied, now}) == 3
        answered = [first.wait().token_ids[0], second.wait().token_ids[0]]
        assert answered == cold_tokens(PROMPT[:9], 3)[1:]
        differing = np.flatnonzero(np.frombuffer(copied, np.float32) != np.frombuffer(now, np.float32))
        assert set(differing % PAGE_SIZE) == {2}  # the token of the copy's own step
        rig.check()


def test_a_landed_restore_is_not_written_before_its_plan_is_executed() -> None:
    """A step that was prepared before, and is dispatched later, still reads what the page held."""
    with opened_tiers(max_total_tokens=6 * PAGE_SIZE, copies=LandedCopies) as rig:
        source = computed(rig)
        host = rig.backed_up(source)
        held, _ = rig.run(rig.prompt_plan(OTHER[:11]))
        unread = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.plan()))

        # given: a step that reads the row's pages, prepared; then the row ends and its pages go to a restore
        decode = rig.runtime.prepare_batch(rig.decode_plan(held, 11))
        rig.free_device(PageIds(held.pages))
        restore = rig.restore(host)
        later = rig.runtime.prepare_batch(with_transfers(rig, rig.release_plan(held), restores=(restore,)))
        (back,) = later.transfers.restores
        assert np.intersect1d(back.pages, held.pages).size

        # when: its copy has landed, and an earlier step is read before either is executed
        rig.note(unread.wait())
        first, second = rig.runtime.execute_batch(decode), rig.runtime.execute_batch(later)
        assert first.wait().token_ids.tolist() == cold_tokens(OTHER[:11], 2)[1:]
        rig.note(first.wait())
        rig.note(second.wait())
        rig.until(restore.number)

        # then
        rig.free_device(source)
        answers_after(rig, back)
        rig.check()


def test_restores_and_backups_beside_decoding_change_nothing_of_it() -> None:
    with opened_tiers() as rig:
        source = computed(rig)
        held, first = rig.run(rig.prompt_plan(OTHER))
        tokens, unread = [int(first.token_ids[0])], []
        host: list[PageIds] = []
        for step in range(12):
            plan = rig.decode_plan(held, OTHER.size + step)
            moving: dict[str, Any] = {"backups": (rig.backup(source),)} if step % 2 else {}
            if host:
                moving["restores"] = (rig.restore(host[-1]),)
            prepared = rig.runtime.prepare_batch(with_transfers(rig, plan, **moving))
            unread.append(rig.runtime.execute_batch(prepared))
            for back in prepared.transfers.restores:
                rig.until_read(unread, tokens)
                rig.until(*[restore.number for restore in moving["restores"]])
                assert rig.device_bytes(back) == rig.device_bytes(source)
                rig.free_device(back)
            for target in prepared.transfers.backups:
                assert target is not None
                rig.until_read(unread, tokens)
                rig.until(*[backup.number for backup in moving["backups"]])
                host.append(target)
            while len(unread) > 1:
                rig.read(unread, tokens)
            while len(host) > 2:
                rig.free_host(host.pop(0))
        rig.until_read(unread, tokens)
        assert tokens == cold_tokens(OTHER, 13)
        rig.check()


# -- what a plan may ask for --------------------------------------------------------------------------------------


def test_a_runtime_without_a_host_tier_refuses_transfers() -> None:
    with opened_runtime() as rig:
        builder = rig.builder()
        builder.transfer(TransferPlan(lookups=(Lookup(number=1, keys=PageKeys(), deadline_s=1.0),)))
        with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
            rig.runtime.prepare_batch(builder.build())
        builder.transfer(TransferPlan())
        assert rig.run(builder.build())[1].transfers == ()


@pytest.mark.parametrize("kind", range(3))
def test_device_pages_of_restores_are_counted_with_those_of_rows(kind: int) -> None:
    with opened_tiers(hybrid_model=True, host_pages=40, max_recurrent_snapshots=8) as rig:
        capacity = rig.device_allocators[kind].capacity
        all_but_two = [0, 0, 0]
        all_but_two[kind] = capacity - 2
        rig.allocate(*all_but_two)
        one = [0, 0, 0]
        one[kind] = 1
        host = rig.host.allocate(rig.counts(*one))
        rig.host.put(host, rig.any_contents(*one))
        before = (rig.snapshot(), rig.host.num_free(), rig.free_counts())

        # then: the restores of one plan take two, and rows take one
        restores = tuple(rig.restore(host) for _ in range(3 if kind == 2 else 2))
        plan = rig.prompt_plan(PROMPT[:3]) if kind < 2 else rig.plan()
        with pytest.raises(OutOfPagesError) as refused:
            rig.runtime.prepare_batch(with_transfers(rig, plan, restores=restores))
        assert (refused.value.need, refused.value.free) == (3, 2)
        assert before == (rig.snapshot(), rig.host.num_free(), rig.free_counts())

        prepared = rig.runtime.prepare_batch(with_transfers(rig, plan, restores=restores[:1]))
        rig.runtime.discard_batch(prepared)
        assert before[1:] == (rig.host.num_free(), rig.free_counts())
        assert rig.tiers.counters().restore.num_transfers == 0
        rig.check()


def test_snapshots_of_rows_take_what_restores_leave() -> None:
    with opened_tiers(hybrid_model=True, max_recurrent_snapshots=2) as rig:
        source = rig.allocate(0, 0, 1)
        host = rig.backed_up(source)
        plan = replace(rig.prompt_plan(PROMPT), snapshots=np.ones(1, np.bool_))
        prepared = rig.runtime.prepare_batch(with_transfers(rig, plan, restores=(rig.restore(host),)))
        assert prepared.transfers.restores[0].states.size == 1
        assert prepared.snapshot_slots.tolist() == [0]
        assert prepared.states_left == 0


def test_a_discarded_batch_gives_back_what_its_transfers_reserved() -> None:
    lane = ScriptedLane(is_held=True)
    with opened_tiers(lane=lane) as rig:
        source = computed(rig)
        host = rig.backed_up(source)
        before = (rig.free_counts(), rig.host.num_free())
        plan = with_transfers(
            rig,
            rig.prompt_plan(OTHER),
            backups=(rig.backup(source),),
            restores=(rig.restore(host),),
            fetches=(Fetch(number=50, keys=PageKeys(pages=(b"a",)), deadline_s=1.0),),
        )

        rig.runtime.discard_batch(rig.runtime.prepare_batch(plan))

        assert before == (rig.free_counts(), rig.host.num_free())
        for _ in range(400):  # until the copy that was given up is over
            assert rig.move()[1].transfers == ()
            if rig.tiers.counters().staging_bytes == 0:
                break
        assert rig.tiers.counters().staging_bytes == 0
        # the same numbers may be tried again
        prepared, completion = rig.run(plan)
        rig.note(completion)
        rig.until(*[backup.number for backup in plan.transfers.backups])
        assert prepared.transfers.fetches[0] is not None
        rig.check()


def test_a_plan_without_rows_does_not_wait_for_the_device() -> None:
    """Its completion is there although the step before it has not run."""
    with opened_tiers(overrides=failing(1, at_dispatch=False)) as rig:
        held, _ = rig.run(rig.prompt_plan(PROMPT))
        running = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.decode_plan(held, PROMPT.size)))
        empty = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.plan()))
        assert empty.done()
        assert empty.wait().failure is None
        assert running.wait().failure is not None


# -- a device that fails ------------------------------------------------------------------------------------------


def failing(step: int, *, at_dispatch: bool) -> dict[str, Any]:
    failure = InjectedFailure(step=step, at_dispatch=at_dispatch)
    return {"model_runner": failing_runner(failure)}


@pytest.mark.parametrize("at_dispatch", [pytest.param(True, id="at dispatch"), pytest.param(False, id="running")])
def test_a_failing_device_ends_what_moves_and_keeps_the_host(at_dispatch: bool) -> None:
    lane = ScriptedLane(is_held=True)
    never = partial(SlowCopies, never={1, 2})
    with opened_tiers(lane=lane, copies=never, overrides=failing(1, at_dispatch=at_dispatch)) as rig:
        # given: host pages; a backup, a restore and a fetch under way
        source = computed(rig)
        host = rig.backed_up(source)
        content = rig.host_bytes(host)
        fetch = Fetch(number=90, keys=PageKeys(pages=(b"a",)), deadline_s=9.0)
        slow, restore = rig.backup(source), rig.restore(host)
        rig.move(backups=(slow,), restores=(restore,), fetches=(fetch,))
        assert not {slow.number, restore.number, 90} & rig.ended.keys()

        # when: a step fails, with transfers of its own, and another batch is prepared
        own = rig.backup(source)
        lost = rig.runtime.prepare_batch(with_transfers(rig, rig.prompt_plan(OTHER), backups=(own,)))
        waiting_lookup = Lookup(number=91, keys=PageKeys(pages=(b"a",)), deadline_s=9.0)
        waiting = rig.restore(host)
        rig.runtime.prepare_batch(rig.plan(restores=(waiting,), lookups=(waiting_lookup,)))
        completion = rig.runtime.execute_batch(lost).wait()

        # then: that completion tells the ends of everything that needed the pool, and of what was never launched
        assert completion.failure is not None
        assert completion.identity == rig.runtime.identity != lost.identity
        rig.note(completion)
        failed = {slow.number, restore.number, own.number, waiting.number, waiting_lookup.number}
        assert {number for number, end in rig.ended.items() if end.failure == "failed"} == failed
        assert 90 not in rig.ended
        assert rig.host_bytes(host) == content
        rig.check()

        # and: the host serves the new pool; storage goes on; copies that hang stay counted
        lane.release()
        again = rig.restore(host)
        prepared, _ = rig.move(restores=(again,))
        assert [end.failure for end in rig.until(again.number, 90)] == [None, None]
        answers_after(rig, prepared.transfers.restores[0])
        assert rig.tiers.counters().staging_bytes > 0
        rig.check()


def test_a_restore_that_was_written_by_the_step_that_fails_has_failed() -> None:
    with opened_tiers(overrides=failing(1, at_dispatch=True), copies=LandedCopies) as rig:
        source = computed(rig)
        host = rig.backed_up(source)
        restore = rig.restore(host)
        _, completion = rig.run(with_transfers(rig, rig.prompt_plan(OTHER), restores=(restore,)))

        assert completion.failure is not None
        assert [(end.number, end.failure) for end in completion.transfers] == [(restore.number, "failed")]
        assert rig.allocator.num_free == rig.allocator.capacity
        rig.check()


def test_what_an_earlier_step_computed_is_read_with_the_ends_that_came_later() -> None:
    with opened_tiers(overrides=failing(2, at_dispatch=True), copies=partial(SlowCopies, never={1})) as rig:
        source = computed(rig)
        host = rig.backed_up(source)
        held, earlier = left_running(rig)
        slow = rig.backup(source)
        later = with_transfers(rig, rig.decode_plan(held, OTHER.size), backups=(slow,))
        failed = rig.runtime.execute_batch(rig.runtime.prepare_batch(later))

        first, second = earlier.wait(), failed.wait()

        assert first.failure is None
        assert first.token_ids.tolist() == cold_tokens(OTHER, 1)
        assert second.failure is not None
        ends = [*first.transfers, *second.transfers]
        assert [(end.number, end.failure) for end in ends] == [(slow.number, "failed")]
        assert rig.host.get(host)
        rig.check()


def left_running(rig: RuntimeRig) -> tuple[Any, Any]:
    """A prompt's step that nobody has waited for."""
    prepared = rig.runtime.prepare_batch(rig.prompt_plan(OTHER))
    return prepared, rig.runtime.execute_batch(prepared)


def test_a_restore_that_breaks_the_pool_fails_the_step_that_is_read() -> None:
    with opened_tiers(broken_scatters=1) as rig:
        source = computed(rig)
        host = rig.backed_up(source)
        restore = rig.restore(host)
        held, _ = rig.run(rig.prompt_plan(OTHER))
        generation = rig.runtime.identity.generation

        plan = with_transfers(rig, rig.decode_plan(held, OTHER.size), restores=(restore,))
        completions = [rig.run(plan)[1]]
        while not completions[-1].failure:
            completions.append(rig.run(rig.plan(wait_s=0.01))[1])

        assert completions[-1].identity.generation == generation + 1
        assert [end.failure for end in completions[-1].transfers] == ["failed"]
        again = rig.restore(host)
        prepared, _ = rig.move(restores=(again,))
        rig.until(again.number)
        answers_after(rig, prepared.transfers.restores[0])
        rig.check()
