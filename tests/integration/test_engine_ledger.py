"""Pages: each has one owner after every step, a request never holds more than it needs, and full pools are survived.

The engine checks the whole ledger after every step here (--check-invariants), with no tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.core.keys import RadixKey
from app.errors import IntegrityError
from app.providers.testing import Override
from app.tpu.cpu_fake import fake_model_config
from tests.support.engine import CONTEXT_LENGTH, VOCAB_SIZE, Engine, RuntimeSpy, cold_tokens

OpenEngine = Callable[..., Engine]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4), (1, 1), (2, 6), (16, 4), (16, 16), (64, 192)])
def test_pages_are_released_once_however_a_request_ends(
    engine: OpenEngine, page_size: int, chunk: int, overlap: bool
) -> None:
    """H01: output lengths around page edges; ends by length, by stop id and by abort; one request, then eight."""
    # given
    opened = engine(
        page_size=page_size,
        chunked_prefill_size=chunk,
        disable_overlap=not overlap,
        max_total_tokens=1024,
        max_running_requests=8,
    )
    prompt = np.arange(7, dtype=np.int32) + page_size
    lengths = range(1, 2 * page_size + 2) if page_size < 16 else (1, page_size - 7, page_size - 6, page_size + 1)
    tokens = cold_tokens(prompt, max(lengths))

    def add(length: int, end: str) -> None:
        if end == "stop":
            opened.add(prompt, max_tokens=length + 3, stop_token_ids=(tokens[length - 1],))
        else:
            opened.add(prompt, max_tokens=length)

    # when: one after another
    for length in lengths:
        for end in ("length", "stop"):
            add(length, end)
            opened.drain()
            opened.check_idle()
    # ... and eight at once, two of which are aborted
    for index in range(8):
        add(lengths[index % len(lengths)], ("length", "stop")[index % 2])
    opened.step(2)
    for request_id in list(opened.requests)[-2:]:
        opened.scheduler.abort(request_id)
        opened.scheduler.abort(request_id)
    opened.drain()

    # then
    opened.check_idle()
    opened.check_replies()


@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_a_long_prompt_takes_one_chunk_of_pages_a_step(engine: OpenEngine, cache_type: str) -> None:
    """H05: a prompt of 5 C + 1 tokens in a pool of 6 C."""
    chunk, page_size = 16, 4
    opened = engine(cache_type=cache_type, chunked_prefill_size=chunk, page_size=page_size, max_total_tokens=6 * chunk)
    request = opened.add(range(5 * chunk + 1), max_tokens=2)

    held = [0]
    while opened.scheduler.has_work():
        opened.step()
        held.append(opened.adapter.num_pages(request) if opened.scheduler.num_running else 0)
        assert held[-1] - held[-2] <= chunk // page_size
        assert held[-1] <= -(-(5 * chunk + 1) // page_size) + 1

    assert max(held) == -(-(5 * chunk + 1) // page_size)
    opened.check_replies()


def unlimited(context_length: int = CONTEXT_LENGTH) -> dict[str, Override]:
    """A model whose context is longer than the pool: what the settings would not let through."""
    model = replace(fake_model_config(vocab_size=VOCAB_SIZE), context_length=context_length)
    return {"model_config": lambda _: providers.Object(model)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
@pytest.mark.parametrize("prompt_length", [1, 30, 31, 32, 39])
def test_a_request_that_outgrows_the_pool_ends_with_its_tokens_so_far(
    engine: OpenEngine, prompt_length: int, cache_type: str, overlap: bool
) -> None:
    """H06: the pool holds 40 tokens; the engine serves on."""
    # given
    opened = engine(overrides=unlimited(), max_total_tokens=40, cache_type=cache_type, disable_overlap=not overlap)

    # when
    output = opened.serve(range(prompt_length), max_tokens=80)

    # then: every token whose predecessor had room
    assert output.finish_reason == "capacity"
    assert "40" in output.error or "10 pages of 4 tokens" in output.error
    assert output.token_ids == cold_tokens(np.arange(prompt_length, dtype=np.int32), 41 - prompt_length)
    opened.check_idle()
    assert opened.serve(range(8), max_tokens=4).finish_reason == "length"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_requests_that_fit_only_alone_are_served_one_after_another(
    engine: OpenEngine, cache_type: str, overlap: bool
) -> None:
    """H06: four of them, each of which fills more than half of the pool before it ends."""
    opened = engine(max_total_tokens=40, cache_type=cache_type, disable_overlap=not overlap)
    for index in range(4):
        opened.add([index] * 6, max_tokens=30)

    opened.drain()

    opened.check_replies()
    assert {output.finish_reason for output in opened.outputs.values()} == {"length"}


@pytest.mark.parametrize("overlap", [True, False])
def test_one_outgrows_the_pool_while_others_wait(engine: OpenEngine, overlap: bool) -> None:
    """H06: the others end as their cold twins do."""
    opened = engine(overrides=unlimited(), max_total_tokens=40, disable_overlap=not overlap)
    opened.add(range(20), "big", max_tokens=60)
    for index in range(3):
        opened.add([index, 1, 2], max_tokens=10)

    opened.drain()

    opened.check_replies()
    reasons = [output.finish_reason for output in opened.outputs.values()]
    assert sorted(reasons) == ["capacity", "length", "length", "length"]
    assert opened.outputs["big"].finish_reason == "capacity"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_half_done_prompt_waits_for_a_row_that_is_about_to_end(engine: OpenEngine, overlap: bool) -> None:
    """A decoding request takes the pages that a slow prompt was promised and is at its last token: nobody must fail."""
    for max_tokens in range(10, 15):
        opened = engine(
            page_size=1,
            max_total_tokens=24,
            chunked_prefill_size=1,
            disable_overlap=not overlap,
            cache_type="chunk_cache",
        )
        opened.add([1, 2], max_tokens=max_tokens)
        opened.step()
        opened.add(range(100, 119), max_tokens=1)

        opened.drain()

        opened.check_replies()
        assert {output.finish_reason for output in opened.outputs.values()} == {"length"}


@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_half_done_prompts_that_hold_every_page_give_way_to_the_oldest(engine: OpenEngine, cache_type: str) -> None:
    """Prompts in small chunks beside rows that outgrow their promise: someone always makes progress."""
    opened = engine(page_size=1, max_total_tokens=60, chunked_prefill_size=2, cache_type=cache_type)
    rng = np.random.default_rng(3)
    for index in range(6):
        opened.add(rng.integers(0, 256, 8 + 5 * index), max_tokens=4 + 5 * (index % 3))

    opened.drain()

    opened.check_replies()
    assert {output.finish_reason for output in opened.outputs.values()} == {"length"}


@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_rows_stay_put_while_a_step_uses_them(engine: OpenEngine, cache_type: str) -> None:
    """H07: three rows, two long prompts in small chunks beside a flow of short ones, 200 rounds."""
    opened = engine(max_running_requests=3, chunked_prefill_size=8, cache_type=cache_type, max_total_tokens=512)
    rng = np.random.default_rng(7)
    long = 0
    for _ in range(200):
        if opened.scheduler.num_running + opened.scheduler.num_waiting < 5:
            if long < 2 + len(opened.requests) // 6:
                opened.add(rng.integers(0, 256, 90), max_tokens=4)
                long += 1
            else:
                opened.add(rng.integers(0, 256, 1 + int(rng.integers(6))), max_tokens=1 + int(rng.integers(5)))
        opened.step()
        opened.runtime.check_integrity()

    opened.drain()

    opened.check_replies()
    assert long >= 5


@pytest.mark.parametrize("overlap", [True, False])
def test_usage_is_that_of_the_first_admission(engine: OpenEngine, overlap: bool) -> None:
    """H17: chunks do not count their own earlier chunks, and retraction changes nothing."""
    # given: 16 tokens of a shared prefix are cached
    opened = engine(max_total_tokens=96, chunked_prefill_size=8, disable_overlap=not overlap)
    shared = list(range(16))
    opened.serve(shared, max_tokens=1)

    # when: three requests that outgrow the pool, so that some are retracted and admitted again
    for index in range(3):
        opened.add([*shared, 100 + index, 7], max_tokens=24)
    opened.drain()

    # then
    assert opened.scheduler.num_retractions >= 1
    assert [opened.outputs[f"r{index}"].cached_tokens for index in range(4)] == [0, 16, 16, 16]
    opened.check_replies()


def test_a_cold_prompt_in_chunks_has_no_cached_tokens(engine: OpenEngine) -> None:
    """H17"""
    opened = engine(chunked_prefill_size=8)

    assert opened.serve(range(60), max_tokens=3).cached_tokens == 0
    assert opened.serve(range(60), max_tokens=3).cached_tokens == 56  # never all of it


def test_cached_tokens_are_those_that_were_not_computed(engine: OpenEngine) -> None:
    """H17, H22: usage equals what was dispatched, whatever was matched in vain before."""
    opened = engine(max_total_tokens=512, max_running_requests=2)
    spy = RuntimeSpy(opened.runtime)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 256, 40).tolist()
    for index in range(8):
        opened.add([*shared[: 5 * index], *rng.integers(0, 256, 3).tolist()], max_tokens=2)

    opened.drain()

    outputs = opened.outputs.values()
    assert sum(output.prompt_tokens - output.cached_tokens for output in outputs) == spy.prompt_tokens


def test_a_match_of_a_refused_admission_is_forgotten(engine: OpenEngine) -> None:
    """H22: while the request waits for room its prefix is evicted; what counts is the match when it gets in."""
    # given: a cached prefix of 24 tokens, and two requests that will fill the pool
    opened = engine(max_total_tokens=96)
    shared = list(range(24))
    opened.serve(shared, max_tokens=1)
    for index in range(2):
        opened.add([100 + index] * 30, max_tokens=16)
    opened.step(4)

    # when: it does not fit beside them, for many rounds
    opened.add([*shared, 1, 2, 3], "late", max_tokens=4)
    cached = []
    while opened.scheduler.num_waiting:
        cached.append(opened.adapter.probe(RadixKey.of(np.array([*shared, 1, 2, 3], np.int32))))
        opened.step()
    opened.drain()

    # then
    assert len(cached) > 5
    assert cached[0] == 24
    assert opened.outputs["late"].cached_tokens == cached[-1] < 24
    opened.check_replies()


@pytest.mark.parametrize("action", ["idle", "prefill", "decode", "twice"])
def test_a_flush_is_all_or_nothing(engine: OpenEngine, action: str) -> None:
    """H16: refused while somebody reads the cache, and then without a change; done otherwise, and seen at once."""
    opened = engine(chunked_prefill_size=8)
    prompt = list(range(24))
    opened.serve(prompt, max_tokens=1)
    before = opened.cached_pages
    expected: Any = before
    if action in ("prefill", "decode"):
        opened.add([*prompt, *range(50, 80)], max_tokens=6)
        opened.step(2 if action == "prefill" else 6)
        with pytest.raises(Exception, match="locked"):
            opened.scheduler.flush_cache()
        assert opened.cached_pages >= before
        opened.drain()
        expected = opened.cached_pages
    if action == "twice":
        opened.scheduler.flush_cache()
        expected = 0

    assert opened.scheduler.flush_cache() == expected

    assert opened.cached_pages == 0
    assert opened.serve(prompt, max_tokens=1).cached_tokens == 0


def test_integrity_misses_no_row_and_no_token(engine: OpenEngine) -> None:
    """L1: rows are counted as pages are, and a token that is owed must be on its way."""
    opened = engine()
    opened.add(range(8), max_tokens=9)
    opened.add([5] * 8, max_tokens=9)
    opened.step(3)
    scheduler = opened.scheduler
    scheduler.check_integrity()

    scheduler._launcher.slots_left -= 1
    with pytest.raises(IntegrityError, match="row"):
        scheduler.check_integrity()
    scheduler._launcher.slots_left += 1

    scheduler._settlement._owed[0, 0] = scheduler._sequences["r0"]
    with pytest.raises(IntegrityError, match="owed"):
        scheduler.check_integrity()
    scheduler._settlement._owed.clear()


def test_a_step_that_breaks_an_invariant_says_so_at_once(engine: OpenEngine) -> None:
    """--check-invariants looks after every step, not only when idle."""
    opened = engine()
    opened.add(range(8), max_tokens=9)
    opened.step(2)
    lost = opened.container.token_allocator().allocate(1)

    with pytest.raises(IntegrityError, match=r"leaked: \[\d+\] \(1\)"):
        opened.step()

    opened.container.token_allocator().give_back(lost)
