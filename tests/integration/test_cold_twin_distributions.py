"""Cached, chunked, batched and retracted output has the distribution of the uncached one: same ids, KL ~ 0 in float32.

The model's vocabulary is no larger than the log-probabilities that a request may ask for, so that every next-token
distribution is seen whole, through the whole engine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.config.server_args import ServerArgs
from app.core.sampling import MAX_LOGPROBS, SamplingParams
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request, RequestOutput
from tests.support.tiny_llama import files_of, tiny_llama

MODEL = tiny_llama(vocab_size=MAX_LOGPROBS, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2)
FILES = files_of(MODEL, seed=3)


def workload(seed: int) -> list[Request]:
    """Prompts that share prefixes of many lengths, among them whole prompts."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, MODEL.vocab_size, 120).astype(np.int32) for _ in range(2)]
    requests = []
    for number in range(10):
        prefix = shared[number % 2][: rng.integers(1, 120)]
        suffix = rng.integers(0, MODEL.vocab_size, rng.integers(0, 16)).astype(np.int32)
        requests.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=np.concatenate([prefix, suffix]),
                sampling=SamplingParams(max_tokens=int(rng.integers(90, 120)), logprobs=MAX_LOGPROBS),
            )
        )
    return requests


def serve(args: ServerArgs, rounds: int) -> tuple[list[RequestOutput], int, int]:
    """-> outputs of the last round, tokens cached in it, retractions in all rounds."""
    with overridden(args, **FILES) as container:
        scheduler = container.scheduler()
        for _ in range(rounds):
            outputs = generate_all(scheduler, workload(seed=1))
            scheduler.check_integrity()
            container.runtime().check_integrity()
        return outputs, sum(output.cached_tokens for output in outputs), scheduler.num_retractions


def divergence(expected: RequestOutput, found: RequestOutput) -> float:
    """Mean KL divergence of the next-token distributions, in nats."""
    assert expected.top_logprobs is not None
    assert found.top_logprobs is not None
    pairs = zip(expected.top_logprobs, found.top_logprobs, strict=True)
    return float(np.mean([_kl(dict(left), dict(right)) for left, right in pairs]))


def _kl(left: dict[int, float], right: dict[int, float]) -> float:
    assert len(left) == len(right) == MODEL.vocab_size
    return sum(np.exp(value) * (value - right[token]) for token, value in left.items())


@pytest.mark.parametrize(
    "page_size", [pytest.param(1, marks=pytest.mark.slow), 16, pytest.param(64, marks=pytest.mark.slow)]
)
def test_reuse_changes_neither_ids_nor_distributions(page_size):
    cold_args = ServerArgs(
        cache_type="chunk_cache", page_size=page_size, max_total_tokens=4096, context_length=256, max_running_requests=1
    )
    warm_args = replace(
        cold_args, cache_type="radix_cache", max_running_requests=4, chunked_prefill_size=32, max_total_tokens=384
    )
    cold, cached, _ = serve(cold_args, rounds=1)
    assert cached == 0

    warm, cached, retractions = serve(warm_args, rounds=2)

    assert cached > 0
    assert retractions > 0
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert max(divergence(*pair) for pair in zip(cold, warm, strict=True)) < 1e-6
