"""Cold twin: whatever is cached, shared, chunked, retracted or aborted around it, a request's ids are its own.

The fake model's next token depends on every page that a row reads, so one wrong page shows; and free pages are filled
with a marker between steps, so that whoever reads one shows too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.core.keys import Namespace
from app.errors import LockedPageError, OutOfPagesError
from tests.support.engine import CONTEXT_LENGTH, Engine, RuntimeSpy, cold_tokens

OpenEngine = Callable[..., Engine]

# Few shapes of pools, so few programs to compile; all of them too small for what is asked.
POOLS = {1: 96, 16: 144, 64: 384}


def random_prompt(rng: np.random.Generator, stems: list[np.ndarray]) -> np.ndarray:
    """A shared beginning of any length and a short end of its own."""
    stem = stems[rng.integers(len(stems))]
    end = rng.integers(0, 256, int(rng.integers(0, 12))).astype(np.int32)
    prompt = np.concatenate([stem[: int(rng.integers(0, 100))], end])
    return prompt if prompt.size else stem[:1]


def random_sampling(rng: np.random.Generator, prompt: np.ndarray) -> dict[str, Any]:
    max_tokens = int(rng.choice([0, 1, 2, 5, 12, 30]))
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": bool(rng.integers(2))}
    if max_tokens and rng.random() < 0.3:
        tokens = cold_tokens(prompt, max_tokens)
        sampling["stop_token_ids"] = (tokens[rng.integers(max_tokens)],)
        sampling["min_tokens"] = int(rng.integers(0, max_tokens + 1))
    return sampling


def random_rounds(engine: Engine, seed: int, *, rounds: int) -> None:
    """Arrivals, aborts, flushes, refusals and steps in random order, with poison in every free page."""
    spy = RuntimeSpy(engine.runtime)
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 256, CONTEXT_LENGTH).astype(np.int32) for _ in range(3)]
    namespaces = [Namespace(), Namespace(), Namespace(salt="other")]
    for _ in range(rounds):
        if rng.random() < 0.4:
            asked = {"prompt": random_prompt(rng, stems), "namespace": namespaces[rng.integers(3)]}
            if engine.outputs and rng.random() < 0.4:
                asked = next_turn(rng, engine)
            prompt = asked["prompt"][: engine.context_length - 1]
            engine.add(prompt, namespace=asked["namespace"], **random_sampling(rng, prompt))
        if rng.random() < 0.06 and engine.requests:
            engine.scheduler.abort(f"r{rng.integers(len(engine.requests))}")
        if rng.random() < 0.03:
            try:
                engine.scheduler.flush_cache()
            except LockedPageError:
                engine.check()
        if rng.random() < 0.08 and not spy.refusals:
            spy.refusals.append(OutOfPagesError(need=1, free=0))
        if rng.random() < 0.3:
            engine.poison_free_pages()
        engine.step()
        engine.runtime.check_integrity()


def next_turn(rng: np.random.Generator, engine: Engine) -> dict[str, Any]:
    """A request that was answered, asked again, or a message after the answer."""
    request_id = list(engine.outputs)[rng.integers(len(engine.outputs))]
    request, answer = engine.requests[request_id], engine.outputs[request_id].token_ids
    message = rng.integers(0, 256, int(rng.integers(0, 6))).astype(np.int32)
    rest = [np.array(answer, np.int32), message] if rng.integers(3) else []
    return {"prompt": np.concatenate([request.prompt_token_ids, *rest]), "namespace": request.namespace}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])
@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_random_workloads_answer_as_their_cold_twins(
    engine: OpenEngine, page_size: int, cache_type: str, overlap: bool
) -> None:
    """Point 11: ids of both cache types equal those of one request at a time."""
    chunks = {1: (1, 5, 16), 16: (7, 16, 40), 64: (16, 64, -1)}[page_size]
    retractions = cached = 0
    for seed, chunk in enumerate(chunks):
        opened = engine(
            page_size=page_size,
            cache_type=cache_type,
            disable_overlap=not overlap,
            chunked_prefill_size=chunk,
            max_total_tokens=POOLS[page_size],
            schedule_policy=("fcfs", "lpm")[seed % 2],
            max_running_requests=4,
        )

        random_rounds(opened, seed, rounds=70)
        opened.drain()

        opened.check_replies()
        opened.check_idle()
        retractions += opened.scheduler.num_retractions
        cached += sum(output.cached_tokens for output in opened.outputs.values())

    assert retractions > 0
    assert (cached > 0) == (cache_type != "chunk_cache")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])
@pytest.mark.parametrize(
    ("page_size", "window", "recurrent"),
    [(1, 5, False), (4, 9, False), (4, 16, False), (4, None, True), (16, None, True), (4, 6, True)],
)
def test_so_they_do_with_windows_and_states(
    engine: OpenEngine, page_size: int, window: int | None, recurrent: bool, overlap: bool
) -> None:
    cached = 0
    for seed, chunk in enumerate((5 * page_size, 40)):
        opened = engine(
            page_size=page_size,
            window=window,
            recurrent=recurrent,
            cache_type="unified_radix_cache",
            disable_overlap=not overlap,
            chunked_prefill_size=chunk,
            max_total_tokens=POOLS[16],
            schedule_policy=("fcfs", "lpm")[seed % 2],
            **({"recurrent_track_interval": max(8, page_size), "max_recurrent_snapshots": 9} if recurrent else {}),
        )

        random_rounds(opened, seed, rounds=70)
        opened.drain()

        opened.check_replies()
        opened.check_idle()
        cached += sum(output.cached_tokens for output in opened.outputs.values())

    assert cached > 0


def test_an_engine_that_serves_one_at_a_time_is_the_cold_twin(engine: OpenEngine) -> None:
    """What the other tests compare with, computed in numpy, is what a fresh engine answers."""
    rng = np.random.default_rng(0)
    for length in (1, 2, 15, 16, 17, 64, CONTEXT_LENGTH - 4):
        opened = engine(cache_type="chunk_cache", chunked_prefill_size=-1, disable_overlap=True)
        prompt = rng.integers(0, 256, length).astype(np.int32)

        assert opened.serve(prompt, max_tokens=4).token_ids == cold_tokens(prompt, 4)


def test_poison_would_show(engine: OpenEngine) -> None:
    """The marker is no blunt weapon: in a page that is read, it changes the answer."""
    opened = engine(max_total_tokens=128)
    opened.add(range(20), max_tokens=8)
    opened.step(2)

    opened.container.device_pool().poison(opened.adapter.ledger()["requests"])
    opened.drain()

    assert opened.outputs["r0"].token_ids != cold_tokens(np.arange(20, dtype=np.int32), 8)


def test_evicted_and_asked_again_gives_the_same(engine: OpenEngine) -> None:
    """Cached, evicted by others, computed again, cached again: four times the same answer."""
    opened = engine(max_total_tokens=128)
    prompt = np.arange(100, 140, dtype=np.int32)
    answers = []
    for round_ in range(2):
        for _ in range(2):
            answers.append(opened.serve(prompt, max_tokens=6))
        for index in range(6):
            opened.serve([round_, index] * 20, max_tokens=4)
        opened.poison_free_pages()

    assert [answer.cached_tokens for answer in answers] == [0, 36, 0, 36]
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(cold_tokens(prompt, 6))}
