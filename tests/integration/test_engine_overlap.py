"""One step ahead: what is decided while a step runs never reaches a reply or the cache too early, too late or twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from app.core.keys import RadixKey
from app.errors import OutOfPagesError, OutOfRequestSlotsError
from tests.support.engine import Engine, RuntimeSpy, cold_tokens

OpenEngine = Callable[..., Engine]


def probe(engine: Engine, tokens: list[int]) -> int:
    """How many of `tokens` are cached."""
    return engine.adapter.probe(RadixKey.of(np.array([*tokens, 0], np.int32)))


def dispatched_decodes(spy: RuntimeSpy) -> int:
    return sum(plan.decode_slots.size for plan in spy.plans)


# -- rule (a) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_end_that_is_known_leaves_the_row_out(engine: OpenEngine, max_tokens: int) -> None:
    """(a) max_tokens and context length are known when planning: no step is wasted on them."""
    opened = engine()
    spy = RuntimeSpy(opened.runtime)

    opened.serve(range(6), max_tokens=max_tokens)
    full = opened.serve(range(125), max_tokens=50)  # the context is 128

    assert len(full.token_ids) == 3
    assert dispatched_decodes(spy) == max_tokens - 1 + 2


@pytest.mark.parametrize("prompt_length", [5, 6, 7, 8])
def test_a_surplus_token_is_dropped_and_its_page_returned(engine: OpenEngine, prompt_length: int) -> None:
    """(a) A stop is seen one step late. Wherever the surplus token falls in its page, nothing of it is left."""
    # given
    opened = engine(page_size=4)
    spy = RuntimeSpy(opened.runtime)
    prompt = np.arange(prompt_length, dtype=np.int32)
    tokens = cold_tokens(prompt, 4)

    # when
    output = opened.serve(prompt, max_tokens=50, stop_token_ids=(tokens[2],))

    # then: a fourth token was computed, and is nowhere
    assert dispatched_decodes(spy) == 3
    assert output.token_ids == tokens[:3]
    assert output.finish_reason == "stop"
    assert probe(opened, [*prompt.tolist(), *tokens]) == (prompt_length + 2) // 4 * 4
    assert opened.cached_pages == (prompt_length + 2) // 4
    opened.check_idle()


# -- rule (b) -----------------------------------------------------------------------------------------------------


def test_pages_are_published_when_their_step_was_read(engine: OpenEngine) -> None:
    """(b) Settled tokens only: a dispatched chunk is in nobody's cache before its completion is read."""
    opened = engine(chunked_prefill_size=8, page_size=4)
    prompt = list(range(24))
    opened.add(prompt, max_tokens=4)

    seen = []
    for _ in range(4):
        opened.step()
        seen.append(probe(opened, prompt))

    assert seen == [0, 8, 16, 24]
    opened.drain()
    opened.check_replies()


def test_output_is_published_without_the_last_token(engine: OpenEngine) -> None:
    """(b) The last token's KV is not written: only the tokens before it can be cached."""
    opened = engine(page_size=4)

    output = opened.serve(range(6), max_tokens=6)

    assert probe(opened, [*range(6), *output.token_ids]) == 8


def test_a_release_travels_behind_the_steps_that_were_dispatched(engine: OpenEngine) -> None:
    """(b) A row that ended while a step with it runs is given back by the next plan, not before."""
    opened = engine(max_running_requests=2)
    spy = RuntimeSpy(opened.runtime)
    tokens = cold_tokens(np.arange(6, dtype=np.int32), 3)
    opened.add(range(6), max_tokens=50, stop_token_ids=(tokens[2],))
    opened.add(range(10, 16), max_tokens=20)

    opened.drain()

    slot = int(spy.prepared[0].admitted_slots[0])
    last = max(index for index, plan in enumerate(spy.plans) if slot in plan.decode_slots)
    released = [index for index, plan in enumerate(spy.plans) if slot in plan.release_slots]
    assert released == [last + 1]
    opened.check_replies()


def twins(engine: OpenEngine) -> tuple[Engine, RuntimeSpy]:
    """Two requests that computed one prompt at once: there was no page to be gained by waiting. The steps are read."""
    opened = engine(chunked_prefill_size=64, page_size=4)
    spy = RuntimeSpy(opened.runtime)
    for request_id in ("a", "b"):
        opened.add(range(4), request_id, max_tokens=20)
    opened.step(2)
    return opened, spy


def test_a_rewrite_travels_with_the_next_plan(engine: OpenEngine) -> None:
    """(b) The second to publish reads the first's page from the next plan on, and its own goes back with that plan."""
    opened, spy = twins(engine)
    first, second = spy.prepared[0].pages.tolist()
    assert not any(plan.rewrites for plan in spy.plans)

    opened.step()

    (rewrite,) = spy.plans[-1].rewrites
    assert (rewrite.slot, rewrite.first_page_index) == (spy.prepared[0].admitted_slots[1], 0)
    assert rewrite.pages.tolist() == [first]
    assert spy.plans[-1].free_pages.tolist() == [second]
    opened.drain()
    opened.check_replies()


@pytest.mark.parametrize("evicted", [False, True])
def test_a_rewrite_of_a_row_that_ended_is_forgotten(engine: OpenEngine, evicted: bool) -> None:
    """(b) Nobody reads that row again, and the pages that it would have read may be gone."""
    opened, spy = twins(engine)

    opened.scheduler.abort("b")
    if evicted:
        opened.scheduler.abort("a")
        opened.adapter.make_room(opened.adapter.reachable())
    opened.step()

    assert not spy.plans[-1].rewrites
    opened.drain()
    opened.check_replies()


# -- rule (c) -----------------------------------------------------------------------------------------------------


def squeezed(engine: OpenEngine) -> Engine:
    """Two requests of which the younger one must give way, in flight, while the older one decodes."""
    opened = engine(max_total_tokens=32, page_size=4, cache_type="chunk_cache")
    opened.add(range(8), "old", max_tokens=20)
    opened.add(range(10, 18), "young", max_tokens=20)
    return opened


def test_a_retracted_row_keeps_the_token_that_it_is_owed(engine: OpenEngine) -> None:
    """(c)"""
    opened = squeezed(engine)
    scheduler = opened.scheduler
    while not scheduler.num_retractions:
        slot = scheduler._sequences["young"].slot
        known, total = int(scheduler._table.known[slot]), int(scheduler._table.total[slot])
        opened.step()
    sequence = scheduler._sequences["young"]

    # One token was in flight; the step in which it was retracted has read it.
    assert total == known + 1
    assert not sequence.owed
    assert len(sequence.output) == total - 8
    assert sequence.output == cold_tokens(np.arange(10, 18, dtype=np.int32), len(sequence.output))
    opened.drain()
    opened.check_replies()


def test_a_retracted_row_is_not_admitted_before_its_token_was_read(engine: OpenEngine) -> None:
    """(c) Retracted while planning a step, in flight: that very plan must not admit it again, though a row is free."""
    opened = squeezed(engine)
    spy = RuntimeSpy(opened.runtime)
    while not opened.scheduler.num_retractions:
        opened.step()

    plan = spy.plans[-1]
    assert not plan.admissions
    opened.drain()
    again = next(plan for plan in spy.plans[len(spy.plans) // 4 :] if plan.admissions)
    known = again.admissions[0].token_ids
    assert known[:8].tolist() == list(range(10, 18))
    assert known[8:].tolist() == cold_tokens(np.arange(10, 18, dtype=np.int32), known.size - 8)
    assert again.admissions[0].prompt_length == 8
    opened.check_replies()


def test_an_owed_token_may_end_its_request(engine: OpenEngine) -> None:
    """(c) The token that arrives after retraction is a stop, or the last one: the request ends while it waits."""
    reference = cold_tokens(np.arange(10, 18, dtype=np.int32), 20)
    probe_engine = squeezed(engine)
    while not probe_engine.scheduler.num_retractions:
        probe_engine.step()
    length = len(probe_engine.scheduler._sequences["young"].output)

    for ends in ({"max_tokens": length}, {"max_tokens": 20, "stop_token_ids": (reference[length - 1],)}):
        opened = engine(max_total_tokens=32, page_size=4, cache_type="chunk_cache")
        opened.add(range(8), "old", max_tokens=20)
        opened.add(range(10, 18), "young", **ends)
        while "young" not in opened.outputs:
            opened.step()

        assert opened.outputs["young"].token_ids == reference[:length]
        assert opened.scheduler.num_waiting == 0
        opened.drain()
        opened.check_replies()


def test_an_aborted_row_drops_the_token_in_flight(engine: OpenEngine) -> None:
    """(c) Nothing is sent after the terminal reply."""
    opened = engine()
    opened.add(range(6), "a", max_tokens=20)
    opened.step(4)
    known = int(opened.scheduler._table.known.max()) - 6

    opened.scheduler.abort("a")
    ended = opened.step()
    rest = opened.step(3)

    assert [(output.request_id, output.finish_reason) for output in ended] == [("a", "abort")]
    assert len(ended[0].token_ids) == known
    assert rest == []
    opened.check_replies()


def test_a_retracted_request_may_be_aborted_while_it_is_owed_a_token(engine: OpenEngine) -> None:
    """(c) Retracted by a refused prepare and aborted before that step is read."""
    opened = squeezed(engine)
    opened.step(3)
    spy = RuntimeSpy(opened.runtime)

    def refuse_and_abort(plan: object) -> object:
        opened.scheduler.abort("young")
        return spy.prepare_batch(plan)

    spy.refusals.append(OutOfPagesError(need=1, free=0))
    planner = opened.scheduler._launcher._planner
    retract = planner.retract_last

    def retract_then_abort() -> bool:
        done = retract()
        assert opened.scheduler._sequences["young"].owed
        opened.scheduler.abort("young")
        return done

    planner.retract_last = retract_then_abort
    opened.step()

    assert opened.outputs["young"].finish_reason == "abort"
    planner.retract_last = retract
    opened.drain()
    opened.check_replies()


# -- rule (d) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [OutOfPagesError(need=9, free=1), OutOfRequestSlotsError(need=2, free=1)])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_a_refused_plan_retracts_the_youngest_and_is_prepared_again_once(
    engine: OpenEngine, cache_type: str, overlap: bool, refusal: Exception
) -> None:
    """(d) At every step of a run, one refusal: nobody notices but the youngest, and it only waits longer."""
    for at in range(0, 12, 2):
        opened = engine(cache_type=cache_type, disable_overlap=not overlap, chunked_prefill_size=8)
        spy = RuntimeSpy(opened.runtime)
        for index in range(3):
            opened.add([*range(9), index], max_tokens=20)
        opened.step(at)
        before = opened.scheduler.num_retractions
        running = opened.scheduler.num_running
        calls = len(spy.calls)

        spy.refusals.append(refusal)
        opened.step()

        assert spy.calls[calls : calls + 2] == ["prepare", "prepare"]
        assert opened.scheduler.num_retractions - before == (1 if running > 1 else 0)
        opened.drain()
        opened.check_replies()
        opened.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_refused_twice_runs_nothing_and_loses_nothing(engine: OpenEngine, overlap: bool) -> None:
    """(d) While something is in flight the picture may change: the engine reads it and plans anew."""
    opened = engine(disable_overlap=not overlap, chunked_prefill_size=8)
    spy = RuntimeSpy(opened.runtime)
    for index in range(3):
        opened.add([*range(9), index], max_tokens=8)
    opened.step(3)

    refusals = [OutOfPagesError(need=9, free=1), OutOfPagesError(need=9, free=1)]
    spy.refusals.extend(refusals)
    if overlap:
        opened.step()
    else:
        with pytest.raises(OutOfPagesError):
            opened.step()

    opened.check()
    opened.drain()
    opened.check_replies()


def test_control_evicts_in_the_plan_that_needs_the_room(engine: OpenEngine) -> None:
    """(d) A full cache is no reason for a refusal: budgets count what can be evicted."""
    opened = engine(max_total_tokens=64, page_size=4)
    for index in range(6):
        opened.serve([index] * 12, max_tokens=1)
    spy = RuntimeSpy(opened.runtime)
    assert opened.adapter.available() < 4

    opened.serve([50] * 40, max_tokens=8)

    assert spy.calls.count("prepare") == spy.calls.count("execute")
    opened.check_replies()
