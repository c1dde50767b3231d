"""Engines of models with sliding windows and recurrent states: what is cached, retired or cloned changes no answer.

The fake model adds every difference between window pages, states and full pages to its answer, and everything that
nobody owns is overwritten after each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from app.errors import ConfigError
from tests.support.engine import Engine, RuntimeSpy, cold_tokens, opened

KINDS: dict[str, dict[str, Any]] = {
    "swa": {"window": 6},
    "recurrent": {"recurrent": True, "recurrent_track_interval": 8},
    "swa+recurrent": {"window": 6, "recurrent": True, "recurrent_track_interval": 8},
}
CACHES = ("unified_radix_cache", "chunk_cache")
RNG = np.random.default_rng(7)
STEM = RNG.integers(0, 256, 60).astype(np.int32)


def run(engine: Engine, max_steps: int = 400) -> int:
    """To the end, with every invariant checked and everything loose overwritten after each step. -> steps."""
    for num_steps in range(max_steps):
        if not engine.scheduler.has_work():
            engine.check_replies()
            return num_steps
        engine.step()
        engine.check()
        engine.poison_free_pages()
    raise AssertionError(f"no end after {max_steps} steps")


def ask(engine: Engine, prompt: Iterable[int], max_tokens: int = 4, **sampling: Any) -> tuple[list[int], int]:
    """-> the answer, and the prompt tokens that were cached."""
    request_id = engine.add(prompt, max_tokens=max_tokens, **sampling)
    run(engine)
    output = engine.outputs[request_id]
    return output.token_ids, output.cached_tokens


# Windows smaller than, equal to and larger than page and chunk.
PLACES = [
    *(("unified_radix_cache", *sizes) for sizes in ((4, 3), (4, 4), (4, 9), (1, 5), (16, 6), (4, 16), (4, 40))),
    ("chunk_cache", 4, 9),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cache_type", "page_size", "window"), PLACES)
def test_cold_hit_branch_and_second_hit_give_the_cold_twins_answer(kind, cache_type, page_size, window) -> None:
    fields = {**KINDS[kind], "recurrent_track_interval": max(8, page_size)}
    if "window" in fields:
        fields["window"] = window
    with opened(cache_type=cache_type, page_size=page_size, max_total_tokens=320, **fields) as engine:
        ask(engine, STEM[:45])
        ask(engine, [*STEM[:45], 1])
        ask(engine, [*STEM[:45], 1])
        ask(engine, [*STEM[:21], 2, 2])
        _, cached = ask(engine, [*STEM[:45], 3, 3], max_tokens=20)
        if cache_type == "unified_radix_cache":
            assert cached >= 32, "whole pages, and whole intervals, of what was there"
        else:
            assert cached == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_hits_at_the_last_turns_boundary(kind: str) -> None:
    with opened(cache_type="unified_radix_cache", **KINDS[kind]) as engine:
        history = STEM[:20].tolist()
        for turn in range(3):
            answer, cached = ask(engine, history, max_tokens=13)
            if turn:
                # The last answer's last token was never computed; snapshots are 8 apart, pages 4 tokens.
                assert cached >= len(history) - 3 - 1 - (8 if "recurrent" in kind else 4)
            history = [*history, *answer, 5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("overlap", [True, False])
def test_too_many_requests_for_the_pool_take_turns_and_are_answered_right(kind, cache_type, overlap) -> None:
    fields = {**KINDS[kind], "max_recurrent_snapshots": 3} if "recurrent" in kind else KINDS[kind]
    with opened(
        cache_type=cache_type, max_total_tokens=128, disable_overlap=not overlap, swa_full_tokens_ratio=0.2, **fields
    ) as engine:
        for index in range(7):
            engine.add([*STEM[: 5 + 6 * index], index], max_tokens=30)
        run(engine, max_steps=1000)
        assert engine.scheduler.num_retractions > 0 or cache_type == "chunk_cache"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_type", CACHES)
def test_an_abort_at_any_step_leaves_nothing_behind(kind: str, cache_type: str) -> None:
    with opened(cache_type=cache_type, **KINDS[kind]) as engine:
        for steps in range(0, 12, 1 if cache_type == "unified_radix_cache" else 4):
            doomed = engine.add([*STEM[:37], steps], max_tokens=9)
            other = engine.add(STEM[: 30 + steps], max_tokens=6)
            for _ in range(steps):
                engine.step()
                engine.check()
                engine.poison_free_pages()
            engine.scheduler.abort(doomed)
            run(engine)
            assert engine.outputs[other].finish_reason == "length"
        engine.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_match_without_admission_changes_nothing_that_outlives_it(kind: str) -> None:
    # Field case: a state slot that a mere match had taken was lost when the request was cancelled in the queue.
    with opened(cache_type="unified_radix_cache", max_running_requests=1, **KINDS[kind]) as engine:
        ask(engine, STEM[:40])
        engine.add(STEM[:9], max_tokens=40)
        engine.step(2)
        ledgers = [engine.adapter.ledger(), engine.adapter.window_ledger(), engine.adapter.snapshot_ledger()]
        for index in range(20):
            engine.scheduler.abort(engine.add([*STEM[:40], index], max_tokens=3))
        after = [engine.adapter.ledger(), engine.adapter.window_ledger(), engine.adapter.snapshot_ledger()]
        for before, now in zip(ledgers, after, strict=True):
            assert {name: pages.tolist() for name, pages in before.items()} == {
                name: pages.tolist() for name, pages in now.items()
            }


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("max_running_requests", [1, 4])
def test_the_smallest_window_pool_serves_everyone_in_the_end(cache_type: str, max_running_requests: int) -> None:
    # Field case: a budget that let a chunk take all window pages that were left, though rows need one page more.
    with opened(
        cache_type=cache_type,
        window=6,
        chunked_prefill_size=4,
        swa_full_tokens_ratio=1e-6,
        max_running_requests=max_running_requests,
    ) as engine:
        assert engine.container.window_spec().num_pages < engine.adapter.capacity / 3
        for index in range(6):
            engine.add([*STEM[: 4 * index + 13], index], max_tokens=17)
        run(engine, max_steps=1500)


@pytest.mark.parametrize("num_pages", [8, 9, 12])
def test_mixed_arrivals_over_any_small_window_pool_never_stall(num_pages: int) -> None:
    def small(container: Any) -> Any:
        from dataclasses import replace

        from dependency_injector import providers

        return providers.Object(replace(container.window_page(), num_pages=num_pages))

    with opened(cache_type="chunk_cache", window=6, chunked_prefill_size=8, overrides={"window_spec": small}) as engine:
        rng = np.random.default_rng(num_pages)
        for _ in range(40):
            length = 4 * int(rng.integers(1, 12)) + 1  # one token after a page
            engine.add([*STEM[:length]], max_tokens=int(rng.integers(1, 20)))
            engine.step(int(rng.integers(1, 5)))
            engine.check()
        run(engine, max_steps=1500)
        assert {output.finish_reason for output in engine.outputs.values()} == {"length"}


@pytest.mark.parametrize(("max_total_tokens", "more_steps"), [(240, 9), (320, 0)])
def test_a_tree_runs_as_many_rows_at_once_as_no_tree(max_total_tokens: int, more_steps: int) -> None:
    """Prompts of one to two windows, short answers, nothing shared, in pools that they fill.

    An answer reserves no window pages that it cannot reach.
    """
    num_steps = {}
    for cache_type in CACHES:
        sizes = {"window": 16, "max_running_requests": 6, "max_total_tokens": max_total_tokens}
        with opened(cache_type=cache_type, **sizes) as engine:
            rng = np.random.default_rng(7)
            for _ in range(24):
                engine.add(rng.integers(0, 256, 30), max_tokens=5)
            num_steps[cache_type] = run(engine)
            assert engine.scheduler.num_retractions == 0
    assert num_steps["unified_radix_cache"] <= num_steps["chunk_cache"] + more_steps


def test_window_pages_held_by_a_long_answer_do_not_grow_with_it() -> None:
    with opened(cache_type="chunk_cache", window=6, context_length=400, max_total_tokens=400) as engine:
        engine.add(STEM[:30], max_tokens=200)
        held = []
        while engine.scheduler.has_work():
            engine.step()
            held.append(engine.adapter.window_ledger()["requests"].size)
        assert max(held[10:]) <= 4, "six tokens lie in at most three pages of four, and one more is being filled"


def test_a_state_that_consumed_a_dropped_token_is_never_published() -> None:
    with opened(cache_type="unified_radix_cache", recurrent=True, recurrent_track_interval=4) as engine:
        for length in range(9, 18, 2):
            prompt = [*STEM[:length], 200 + length]
            tokens = cold_tokens(np.array(prompt, np.int32), 12)
            for end in range(1, 9):
                answer, _ = ask(engine, prompt, max_tokens=12, stop_token_ids=(tokens[end],))
                # The step behind the stop has already run on: what it left must not be found.
                ask(engine, [*prompt, *answer, 9, 9], max_tokens=3)


def test_snapshots_are_taken_where_a_chunk_or_a_decode_reaches_the_interval() -> None:
    with opened(
        cache_type="unified_radix_cache", recurrent=True, recurrent_track_interval=8, chunked_prefill_size=20
    ) as engine:
        spy = RuntimeSpy(engine.runtime)
        ask(engine, STEM[:27], max_tokens=20)
        points = []
        for plan in spy.plans:
            ends = np.concatenate([plan.decode_positions + 1, plan.extend_starts + plan.extend_lengths])
            points += ends[plan.snapshots].tolist()
            assert (ends[~plan.snapshots] % 8 != 0).all()
        # A chunk ends at the last point that it crosses: 16 of 20, then 24.
        assert points == [16, 24, 32, 40]


def test_snapshots_run_out_quietly_and_the_oldest_go_first() -> None:
    with opened(
        cache_type="unified_radix_cache", recurrent=True, recurrent_track_interval=8, max_recurrent_snapshots=2
    ) as engine:
        for index in range(5):
            ask(engine, [index, *STEM[:24]], max_tokens=2)
        assert engine.adapter.snapshot_ledger()["cached_evictable"].size == 2
        _, cached = ask(engine, [4, *STEM[:24], 1])
        assert cached == 24
        _, cached = ask(engine, [0, *STEM[:24], 1])
        assert cached == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_runtime_that_was_closed_and_opened_again_serves_from_an_empty_cache(kind: str) -> None:
    with opened(cache_type="unified_radix_cache", **KINDS[kind]) as engine:
        ask(engine, STEM[:40])
        engine.runtime.close()
        engine.runtime.open()
        _, cached = ask(engine, [*STEM[:40], 1])
        assert cached == 0
        _, cached = ask(engine, [*STEM[:40], 2])
        assert cached >= 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_discarded_batch_leaves_every_pool_as_it_was(kind: str) -> None:
    with opened(cache_type="chunk_cache", **KINDS[kind]) as engine:
        spy = RuntimeSpy(engine.runtime)
        engine.add(STEM[:30], max_tokens=9)
        engine.step(3)
        runtime = engine.runtime
        execute = runtime.execute_batch

        def discard_first(prepared: Any) -> Any:
            runtime.execute_batch = execute
            runtime.discard_batch(prepared)
            return execute(runtime.prepare_batch(spy.plans[-1]))

        free = engine.container.token_allocator().num_free
        runtime.execute_batch = discard_first
        engine.step()
        assert engine.container.token_allocator().num_free <= free
        run(engine)


def test_swa_pools_share_one_budget_by_the_ratio() -> None:
    with opened(cache_type="chunk_cache", window=6, max_total_tokens=800, swa_full_tokens_ratio=0.5) as engine:
        container = engine.container
        assert (container.pool_spec().num_pages, container.window_spec().num_pages) == (200, 100)
        expected = container.page_spec().page_bytes + container.window_page().page_bytes // 2
        assert container.bytes_a_page() == expected


def test_a_cache_that_lacks_a_component_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="swa"), opened(cache_type="radix_cache", window=6):
        pass
