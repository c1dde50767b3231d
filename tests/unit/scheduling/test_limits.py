"""What one engine can serve: the check of a request, its end, and the seed of one that brings none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.core.sampling import SamplingParams
from app.errors import RequestError
from app.scheduling.limits import SchedulerLimits
from app.scheduling.request import Request, Sequence

LIMITS = SchedulerLimits(max_running_requests=4, context_length=32, chunk_tokens=8, vocab_size=100)


def request(length: int, **sampling: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=np.arange(length, dtype=np.int32),
        sampling=SamplingParams(**sampling),
    )


@pytest.mark.parametrize(("length", "pool_tokens"), [(1, 32), (31, 32), (31, 64), (15, 16)])
def test_a_prompt_that_leaves_room_for_one_token_is_served(length: int, pool_tokens: int) -> None:
    LIMITS.check(request(length), pool_tokens=pool_tokens)


@pytest.mark.parametrize(
    ("length", "pool_tokens", "words"), [(32, 64, "context length of 32"), (16, 16, "KV pool of 16")]
)
def test_a_prompt_without_room_is_refused_with_the_numbers(length: int, pool_tokens: int, words: str) -> None:
    with pytest.raises(RequestError, match=f"{length} tokens.*at most {length - 1}.*{words}"):
        LIMITS.check(request(length), pool_tokens=pool_tokens)


@pytest.mark.parametrize("token", [-1, 100])
def test_a_biased_token_that_the_model_has_not_is_refused(token: int) -> None:
    with pytest.raises(RequestError, match=r"logit_bias.*0 to 99"):
        LIMITS.check(request(3, logit_bias={token: 1.0}), pool_tokens=32)


@pytest.mark.parametrize(("max_tokens", "end"), [(0, 5), (1, 6), (27, 32), (200, 32)])
def test_a_request_ends_at_its_own_limit_or_the_contexts(max_tokens: int, end: int) -> None:
    asked = request(5, max_tokens=max_tokens)

    assert LIMITS.end_of(Sequence(asked, asked.sampling, 0)) == end


def test_seeds_of_one_engine_differ_and_repeat() -> None:
    seeds = [LIMITS.seed_of(arrival) for arrival in range(100)]

    assert len(set(seeds)) == 100
    assert seeds == [LIMITS.seed_of(arrival) for arrival in range(100)]
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
