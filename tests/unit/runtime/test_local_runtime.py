"""The boundary's contract: all or nothing, in order, and nothing stale gets in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.core.batch import NO_TOKEN, BatchPlan, PageRewrite
from app.core.handles import CacheExtentRef
from app.core.sampling import SamplingParams
from app.errors import (
    BatchOrderError,
    DoubleFreeError,
    OutOfPagesError,
    OutOfRequestSlotsError,
    OwnershipError,
    RequestError,
    RuntimeClosedError,
    StaleHandleError,
)
from tests.support.engine import CONTEXT_LENGTH, VOCAB_SIZE, cold_tokens
from tests.support.runtime import GREEDY, RuntimeRig, ints, opened_runtime

PAGE_SIZE, PAGES, ROWS = 4, 32, 4
PROMPT = np.arange(10, 20, dtype=np.int32)
OTHER = np.arange(50, 57, dtype=np.int32)


@pytest.fixture
def rig() -> Iterator[RuntimeRig]:
    with opened_runtime(page_size=PAGE_SIZE, max_total_tokens=PAGES * PAGE_SIZE, max_running_requests=ROWS) as rig:
        yield rig
        rig.runtime.check_integrity()


# -- what a step answers ------------------------------------------------------------------------------------------


def test_a_step_answers_with_rows_pages_and_what_is_left(rig: RuntimeRig) -> None:
    prepared = rig.runtime.prepare_batch(rig.prompt_plan(PROMPT, OTHER))

    assert prepared.admitted_slots.size == 2
    assert prepared.page_offsets.tolist() == [0, 3, 5]
    assert prepared.pages.size == 5
    assert (prepared.pages_left, prepared.slots_left) == (PAGES - 5, ROWS - 2)
    assert prepared.pages.dtype == prepared.admitted_slots.dtype == np.int32

    completion = rig.runtime.execute_batch(prepared).wait()

    assert completion.token_ids.tolist() == [cold_tokens(PROMPT, 1)[0], cold_tokens(OTHER, 1)[0]]
    assert completion.failure is None


def test_tokens_feed_the_next_step_on_the_device(rig: RuntimeRig) -> None:
    prepared, first = rig.run(rig.prompt_plan(PROMPT, OTHER))
    _, second = rig.run(rig.decode_plan(prepared, PROMPT.size, OTHER.size))
    _, third = rig.run(rig.decode_plan(prepared, PROMPT.size + 1, OTHER.size + 1))

    got = np.stack([first.token_ids, second.token_ids, third.token_ids]).T.tolist()
    assert got == [cold_tokens(PROMPT, 3), cold_tokens(OTHER, 3)]


def test_a_row_that_reaches_no_end_samples_nothing(rig: RuntimeRig) -> None:
    builder = rig.builder()
    slot = builder.admit(CacheExtentRef.of(rig.runtime.identity, ints()), PROMPT, PROMPT.size, GREEDY)
    builder.extend(slot, 0, 0, PROMPT[:4], samples=False)

    prepared, completion = rig.run(builder.build())

    assert completion.token_ids.tolist() == [NO_TOKEN]

    builder = rig.builder()
    builder.extend(int(prepared.admitted_slots[0]), int(prepared.admitted_generations[0]), 4, PROMPT[4:], samples=True)
    _, completion = rig.run(builder.build())

    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 1)


def test_a_cached_prefix_is_read_through_its_pages(rig: RuntimeRig) -> None:
    first, _ = rig.run(rig.prompt_plan(PROMPT))
    cached = first.pages[:2]

    _, completion = rig.run(rig.prompt_plan(PROMPT, prefix=cached))

    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 1)


def test_a_rewritten_row_reads_the_other_pages(rig: RuntimeRig) -> None:
    first, _ = rig.run(rig.prompt_plan(PROMPT))
    second, _ = rig.run(rig.prompt_plan(PROMPT))
    slot, generation = int(second.admitted_slots[0]), int(second.admitted_generations[0])
    rig.port.free(second.pages[:2])
    builder = rig.builder()
    builder.rewrite(PageRewrite(slot=slot, generation=generation, first_page_index=0, pages=first.pages[:2]))
    builder.decode(second.admitted_slots, second.admitted_generations, ints(PROMPT.size))

    _, completion = rig.run(builder.build())

    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 2)[1:]
    assert rig.rows.row_pages(slot)[:2].tolist() == first.pages[:2].tolist()


def test_a_plan_without_rows_carries_what_was_decided(rig: RuntimeRig) -> None:
    prepared, _ = rig.run(rig.prompt_plan(PROMPT))
    rig.port.free(prepared.pages)

    after, completion = rig.run(rig.release_plan(prepared))

    assert completion.token_ids.size == 0
    assert (after.pages_left, after.slots_left) == (PAGES, ROWS)
    with pytest.raises(StaleHandleError):
        rig.runtime.prepare_batch(rig.decode_plan(prepared, PROMPT.size))


def test_frees_and_releases_of_a_plan_serve_its_own_rows(rig: RuntimeRig) -> None:
    long = np.arange(PAGES * PAGE_SIZE, dtype=np.int32)
    prepared, _ = rig.run(rig.prompt_plan(*[long[:8]] * (ROWS - 1), long[: PAGES * PAGE_SIZE - 8 * (ROWS - 1)]))
    assert (prepared.pages_left, prepared.slots_left) == (0, 0)
    rig.port.free(prepared.pages)

    plan = rig.prompt_plan(long)
    release = rig.release_plan(prepared)
    plan = replace(plan, release_slots=release.release_slots, release_generations=release.release_generations)
    after, completion = rig.run(plan)

    assert after.pages_left == 0
    assert completion.token_ids.tolist() == cold_tokens(long, 1)


# -- all or nothing -----------------------------------------------------------------------------------------------


def test_a_plan_that_needs_too_many_pages_leaves_no_trace(rig: RuntimeRig) -> None:
    prepared, _ = rig.run(rig.prompt_plan(PROMPT))
    rig.port.free(prepared.pages)
    before = rig.snapshot()
    plan = rig.prompt_plan(*[np.arange(50, dtype=np.int32)] * 3, sampling=SamplingParams(seed=1, temperature=1.0))
    release = rig.release_plan(prepared)

    with pytest.raises(OutOfPagesError) as refusal:
        rig.runtime.prepare_batch(
            replace(plan, release_slots=release.release_slots, release_generations=release.release_generations)
        )

    assert (refusal.value.need, refusal.value.free) == (39, PAGES)
    assert rig.snapshot() == before


def test_a_plan_that_needs_too_many_rows_leaves_no_trace(rig: RuntimeRig) -> None:
    rig.run(rig.prompt_plan(PROMPT))
    before = rig.snapshot()

    with pytest.raises(OutOfRequestSlotsError) as refusal:
        rig.runtime.prepare_batch(rig.prompt_plan(*[OTHER] * ROWS))

    assert (refusal.value.need, refusal.value.free) == (ROWS, ROWS - 1)
    assert rig.snapshot() == before


def _twice(plan: BatchPlan) -> BatchPlan:
    return replace(
        plan,
        decode_slots=np.repeat(plan.decode_slots, 2),
        decode_generations=np.repeat(plan.decode_generations, 2),
        decode_positions=np.repeat(plan.decode_positions, 2),
    )


def _released_too(plan: BatchPlan) -> BatchPlan:
    return replace(plan, release_slots=plan.decode_slots, release_generations=plan.decode_generations)


WRONG_PLANS: dict[str, tuple[Callable[[BatchPlan, Any], BatchPlan], type[Exception]]] = {
    "a generation that is over": (
        lambda plan, _: replace(plan, decode_generations=plan.decode_generations - 1),
        StaleHandleError,
    ),
    "a generation to come": (
        lambda plan, _: replace(plan, decode_generations=plan.decode_generations + 1),
        StaleHandleError,
    ),
    "a row that is free": (lambda plan, _: replace(plan, decode_slots=ints(ROWS - 1)), StaleHandleError),
    "a row that does not exist": (lambda plan, _: replace(plan, decode_slots=ints(ROWS)), StaleHandleError),
    "a negative row": (lambda plan, _: replace(plan, decode_slots=ints(-1)), StaleHandleError),
    "a row twice": (lambda plan, _: _twice(plan), OwnershipError),
    "a row that it releases": (lambda plan, _: _released_too(plan), OwnershipError),
    "a release twice": (
        lambda plan, held: replace(
            plan,
            decode_slots=ints(),
            decode_generations=ints(),
            decode_positions=ints(),
            release_slots=np.repeat(held.admitted_slots, 2),
            release_generations=np.repeat(held.admitted_generations, 2),
        ),
        OwnershipError,
    ),
    "a position beyond the row": (
        lambda plan, _: replace(plan, decode_positions=ints(CONTEXT_LENGTH)),
        RequestError,
    ),
    "a position before it": (lambda plan, _: replace(plan, decode_positions=ints(-1)), RequestError),
    "a page freed that is held": (lambda plan, held: replace(plan, free_pages=held.pages[:1]), DoubleFreeError),
    "a rewrite of pages that the row lacks": (
        lambda plan, held: replace(plan, rewrites=(_rewrite(held, first=2, pages=held.pages[:2]),)),
        OwnershipError,
    ),
    "a rewrite to a page that nobody holds": (
        lambda plan, held: replace(plan, rewrites=(_rewrite(held, first=0, pages=ints(PAGES)),)),
        StaleHandleError,
    ),
    "a rewrite of a row that is over": (
        lambda plan, held: replace(
            plan, rewrites=(replace(_rewrite(held, first=0, pages=held.pages[:1]), generation=0),)
        ),
        StaleHandleError,
    ),
}


def _rewrite(held: Any, *, first: int, pages: np.ndarray) -> PageRewrite:
    return PageRewrite(
        slot=int(held.admitted_slots[0]),
        generation=int(held.admitted_generations[0]),
        first_page_index=first,
        pages=pages,
    )


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_plan_that_names_what_is_not_its_own_leaves_no_trace(rig: RuntimeRig, name: str) -> None:
    prepared, _ = rig.run(rig.prompt_plan(PROMPT))
    change, error = WRONG_PLANS[name]
    before = rig.snapshot()

    with pytest.raises(error):
        rig.runtime.prepare_batch(change(rig.decode_plan(prepared, PROMPT.size), prepared))

    assert rig.snapshot() == before
    _, completion = rig.run(rig.decode_plan(prepared, PROMPT.size))
    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 2)[1:]


WRONG_PROMPTS: dict[str, tuple[Callable[[BatchPlan], BatchPlan], type[Exception]]] = {
    "a token that the model has not": (
        lambda plan: replace(plan, extend_token_ids=np.full(PROMPT.size, VOCAB_SIZE, np.int32)),
        RequestError,
    ),
    "a negative token": (lambda plan: replace(plan, extend_token_ids=PROMPT - 100), RequestError),
    "fewer tokens than lengths": (lambda plan: replace(plan, extend_token_ids=PROMPT[:-1]), RequestError),
    "a chunk of no tokens": (lambda plan: replace(plan, extend_lengths=ints(0)), RequestError),
    "an admission that is not there": (lambda plan: replace(plan, extend_slots=ints(-2)), StaleHandleError),
    "one admission twice": (
        lambda plan: replace(
            plan,
            extend_slots=ints(-1, -1),
            extend_generations=ints(0, 0),
            extend_starts=ints(0, 5),
            extend_lengths=ints(5, 5),
            extend_samples=np.array([False, True]),
        ),
        OwnershipError,
    ),
    "a prefix page that nobody holds": (
        lambda plan: replace(plan, admissions=(replace(plan.admissions[0], prefix_pages=ints(PAGES)),)),
        StaleHandleError,
    ),
    "history with a token that the model has not": (
        lambda plan: replace(
            plan,
            admissions=(
                replace(
                    plan.admissions[0],
                    token_ids=np.full(3, VOCAB_SIZE, np.int32),
                    sampling=SamplingParams(seed=0, presence_penalty=1.0),
                ),
            ),
        ),
        RequestError,
    ),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_a_prompt_that_cannot_be_taken_leaves_no_trace(rig: RuntimeRig, name: str) -> None:
    change, error = WRONG_PROMPTS[name]
    rig.run(rig.prompt_plan(OTHER))
    before = rig.snapshot()

    with pytest.raises(error):
        rig.runtime.prepare_batch(change(rig.prompt_plan(PROMPT)))

    assert rig.snapshot() == before


def test_a_prefix_that_was_freed_is_refused(rig: RuntimeRig) -> None:
    """Pages freed and not yet applied are nobody's: no row may start with them."""
    first, _ = rig.run(rig.prompt_plan(PROMPT))
    rig.port.free(first.pages)

    with pytest.raises(StaleHandleError):
        rig.runtime.prepare_batch(rig.prompt_plan(PROMPT, prefix=first.pages[:2]))


# -- order --------------------------------------------------------------------------------------------------------


def test_a_prepared_batch_is_executed_once(rig: RuntimeRig) -> None:
    prepared, _ = rig.run(rig.prompt_plan(PROMPT))

    with pytest.raises(BatchOrderError, match="before"):
        rig.runtime.execute_batch(prepared)
    with pytest.raises(BatchOrderError, match="before"):
        rig.runtime.discard_batch(prepared)


def test_prepared_batches_are_executed_in_order(rig: RuntimeRig) -> None:
    first = rig.runtime.prepare_batch(rig.prompt_plan(PROMPT))
    second = rig.runtime.prepare_batch(rig.prompt_plan(OTHER))

    with pytest.raises(BatchOrderError, match="earlier"):
        rig.runtime.execute_batch(second)

    one, two = rig.runtime.execute_batch(first), rig.runtime.execute_batch(second)
    assert one.wait().token_ids.tolist() == cold_tokens(PROMPT, 1)
    assert two.wait().token_ids.tolist() == cold_tokens(OTHER, 1)


def test_one_earlier_step_may_be_unread_and_no_more(rig: RuntimeRig) -> None:
    prepared = rig.runtime.prepare_batch(rig.prompt_plan(PROMPT))
    first = rig.runtime.execute_batch(prepared)
    second = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.decode_plan(prepared, PROMPT.size)))
    third = rig.runtime.prepare_batch(rig.decode_plan(prepared, PROMPT.size + 1))

    with pytest.raises(BatchOrderError, match="wait"):
        rig.runtime.execute_batch(third)

    first.wait()
    last = rig.runtime.execute_batch(third)
    assert [step.wait().token_ids[0] for step in (first, second, last)] == cold_tokens(PROMPT, 3)


def test_a_discarded_batch_gives_back_what_it_reserved(rig: RuntimeRig) -> None:
    held, _ = rig.run(rig.prompt_plan(PROMPT))
    before = rig.snapshot()

    prepared = rig.runtime.prepare_batch(rig.prompt_plan(OTHER, OTHER))
    rig.runtime.discard_batch(prepared)

    after = rig.snapshot()
    assert sorted(after.pop("free")) == sorted(before.pop("free"))
    assert np.greater_equal(after.pop("generations"), before.pop("generations")).all()
    pages, kept = after.pop("pages"), before.pop("pages")
    assert pages[int(held.admitted_slots[0])] == kept[int(held.admitted_slots[0])]
    assert after == before
    with pytest.raises(BatchOrderError):
        rig.runtime.execute_batch(prepared)
    with pytest.raises(StaleHandleError):
        rig.runtime.prepare_batch(rig.decode_plan(prepared, OTHER.size, OTHER.size))


def test_a_discarded_decode_can_be_planned_again(rig: RuntimeRig) -> None:
    prompt = np.arange(8, dtype=np.int32)  # whole pages: the next token needs a new one
    held, _ = rig.run(rig.prompt_plan(prompt))

    rig.runtime.discard_batch(rig.runtime.prepare_batch(rig.decode_plan(held, prompt.size)))
    prepared, completion = rig.run(rig.decode_plan(held, prompt.size))

    assert prepared.pages.size == 1
    assert completion.token_ids.tolist() == cold_tokens(prompt, 2)[1:]


def test_frees_releases_and_rewrites_of_a_discarded_batch_stay(rig: RuntimeRig) -> None:
    first, _ = rig.run(rig.prompt_plan(PROMPT))
    second, _ = rig.run(rig.prompt_plan(PROMPT))
    gone, _ = rig.run(rig.prompt_plan(OTHER))
    rig.port.free(second.pages[:2])
    rig.port.free(gone.pages)
    builder = rig.builder()
    builder.rewrite(_rewrite(second, first=0, pages=first.pages[:2]))
    builder.release(gone.handle(0))

    rig.runtime.discard_batch(rig.runtime.prepare_batch(builder.build()))

    assert rig.port.recorded_frees().size == 0
    assert rig.rows.num_free == ROWS - 2
    # Whoever gets the freed pages writes them, and the rewritten row does not notice.
    rig.run(rig.prompt_plan(np.arange(100, 108, dtype=np.int32)))
    _, completion = rig.run(rig.decode_plan(second, PROMPT.size))
    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 2)[1:]


def test_discarding_a_batch_does_not_disturb_one_prepared_before_it(rig: RuntimeRig) -> None:
    """Its rewrites must not be overwritten by pages that the earlier batch appends, nor its reservations be applied."""
    first, _ = rig.run(rig.prompt_plan(PROMPT[:8]))
    second, _ = rig.run(rig.prompt_plan(PROMPT[:8]))
    earlier = rig.runtime.prepare_batch(rig.decode_plan(second, 8))
    rig.port.free(second.pages[:1])
    builder = rig.builder()
    builder.rewrite(_rewrite(second, first=0, pages=first.pages[:1]))
    builder.decode(second.admitted_slots, second.admitted_generations, ints(9))
    later = rig.runtime.prepare_batch(builder.build())

    rig.runtime.discard_batch(later)
    completion = rig.runtime.execute_batch(earlier).wait()
    rig.run(rig.prompt_plan(np.arange(100, 104, dtype=np.int32)))
    _, last = rig.run(rig.decode_plan(second, 9))

    assert [completion.token_ids[0], last.token_ids[0]] == cold_tokens(PROMPT[:8], 3)[1:]


def test_an_earlier_batch_cannot_be_discarded_under_a_later_one(rig: RuntimeRig) -> None:
    first = rig.runtime.prepare_batch(rig.prompt_plan(PROMPT))
    second = rig.runtime.prepare_batch(rig.prompt_plan(OTHER))

    with pytest.raises(BatchOrderError, match="on top"):
        rig.runtime.discard_batch(first)

    rig.runtime.discard_batch(second)
    rig.runtime.discard_batch(first)
    assert rig.allocator.num_free == PAGES


def test_a_row_reused_by_a_later_batch_keeps_its_sampling_until_then(rig: RuntimeRig) -> None:
    """Batches may be prepared ahead: the newcomer's parameters must not reach the step prepared before it."""
    held, first = rig.run(rig.prompt_plan(PROMPT))
    decode = rig.runtime.prepare_batch(rig.decode_plan(held, PROMPT.size))
    plan = rig.prompt_plan(OTHER, sampling=SamplingParams(seed=1, temperature=1.0, logit_bias={7: 100.0}))
    release = rig.release_plan(held)
    newcomer = rig.runtime.prepare_batch(
        replace(plan, release_slots=release.release_slots, release_generations=release.release_generations)
    )
    assert newcomer.admitted_slots.tolist() == held.admitted_slots.tolist()

    second = rig.runtime.execute_batch(decode).wait()
    third = rig.runtime.execute_batch(newcomer).wait()

    assert [first.token_ids[0], second.token_ids[0]] == cold_tokens(PROMPT, 2)
    assert third.token_ids.tolist() == [7]


# -- generations --------------------------------------------------------------------------------------------------


def test_a_plan_of_another_identity_is_refused(rig: RuntimeRig) -> None:
    plan = rig.prompt_plan(PROMPT)
    runtime_id, generation = plan.identity

    for identity in ((runtime_id, generation + 1), (runtime_id, generation - 1), ("somebody else", generation)):
        with pytest.raises(StaleHandleError):
            rig.runtime.prepare_batch(replace(plan, identity=type(plan.identity)(*identity)))


def test_an_extent_of_another_identity_never_gets_into_a_plan(rig: RuntimeRig) -> None:
    stale = CacheExtentRef.of(rig.runtime.identity._replace(generation=0), ints(1))

    with pytest.raises(StaleHandleError):
        rig.builder().admit(stale, PROMPT, PROMPT.size, GREEDY)


def test_closing_and_opening_again_makes_everything_stale(rig: RuntimeRig) -> None:
    held, _ = rig.run(rig.prompt_plan(PROMPT))
    waiting = rig.runtime.prepare_batch(rig.prompt_plan(OTHER))
    old = rig.runtime.identity
    plan = rig.decode_plan(held, PROMPT.size)

    rig.runtime.close()
    rig.runtime.open()

    assert rig.runtime.identity == old._replace(generation=old.generation + 1)
    assert (rig.allocator.num_free, rig.rows.num_free) == (PAGES, ROWS)
    with pytest.raises(StaleHandleError):
        rig.runtime.prepare_batch(plan)
    with pytest.raises(StaleHandleError):
        rig.runtime.prepare_batch(replace(plan, identity=rig.runtime.identity))
    with pytest.raises(StaleHandleError):
        rig.runtime.execute_batch(waiting)
    rig.runtime.discard_batch(waiting)  # the pool that it reserved from is gone: nothing to give back
    with pytest.raises(StaleHandleError):
        CacheExtentRef.of(old, held.pages).check(rig.runtime.identity)
    _, completion = rig.run(rig.prompt_plan(PROMPT))
    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 1)


def test_a_closed_runtime_refuses_every_call(rig: RuntimeRig) -> None:
    plan = rig.prompt_plan(PROMPT)
    prepared = rig.runtime.prepare_batch(plan)

    rig.runtime.close()
    rig.runtime.close()

    for call in (rig.runtime.execute_batch, rig.runtime.discard_batch):
        with pytest.raises(RuntimeClosedError):
            call(prepared)
    with pytest.raises(RuntimeClosedError):
        rig.runtime.prepare_batch(plan)


def test_closing_waits_for_the_steps_that_run(rig: RuntimeRig) -> None:
    handle = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.prompt_plan(PROMPT)))

    rig.runtime.close()

    assert handle.done()
    assert handle.wait().token_ids.tolist() == cold_tokens(PROMPT, 1)


def test_opening_an_open_runtime_changes_nothing(rig: RuntimeRig) -> None:
    held, _ = rig.run(rig.prompt_plan(PROMPT))

    rig.runtime.open()

    _, completion = rig.run(rig.decode_plan(held, PROMPT.size))
    assert completion.token_ids.tolist() == cold_tokens(PROMPT, 2)[1:]


def test_a_row_of_another_runtime_is_refused_before_it_is_planned(rig) -> None:
    prepared, _ = rig.run(rig.prompt_plan(PROMPT))
    foreign = prepared.handle(0)._replace(runtime_id="another")

    with pytest.raises(StaleHandleError, match="another"):
        rig.builder().release(foreign)

    rig.run(rig.release_plan(prepared))
    assert rig.rows.num_free == ROWS
