"""Every model family through the whole engine: what is reused, chunked, batched and retracted changes no distribution.

The models are the tiny ones of the golden files. tests/integration/test_families_reuse.py goes through the ways of
reuse one by one.
"""

from __future__ import annotations

import numpy as np
import pytest

from app.config.server_args import ServerArgs
from app.core.sampling import MAX_LOGPROBS, SamplingParams
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request, RequestOutput
from tests.support.served_families import FAMILIES, MOST_DIVERGENCE, arguments, divergence, files_of


def workload(seed: int) -> list[Request]:
    """Prompts that share prefixes of many lengths, among them whole prompts, and one that goes on after an answer."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, MAX_LOGPROBS, 70).astype(np.int32)
    requests = []
    for number in range(5):
        suffix = rng.integers(0, MAX_LOGPROBS, rng.integers(0, 9)).astype(np.int32)
        requests.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=np.concatenate([shared[: rng.integers(1, 70)], suffix]),
                sampling=SamplingParams(max_tokens=int(rng.integers(45, 75)), logprobs=MAX_LOGPROBS),
            )
        )
    return requests


def serve(args: ServerArgs, family: str, rounds: int) -> tuple[list[RequestOutput], dict[str, int]]:
    """-> outputs of the last round, and what happened: tokens cached in it, retractions in all rounds."""
    with overridden(args, **files_of(family)) as container:
        scheduler = container.scheduler()
        for _ in range(rounds):
            outputs = generate_all(scheduler, workload(seed=1))
            scheduler.check_integrity()
            container.runtime().check_integrity()
        cached = sum(output.cached_tokens for output in outputs)
        return outputs, {"cached": cached, "retractions": scheduler.num_retractions}


OFTEN = ("gemma3_text",)  # the others take longer to compile


@pytest.mark.parametrize(
    "family", [family if family in OFTEN else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_reuse_changes_neither_ids_nor_distributions(family: str) -> None:
    cold, happened = serve(arguments(cache_type="chunk_cache", max_running_requests=1), family, rounds=1)
    assert happened["cached"] == 0

    # Less than two requests' worth of pages, so that rows give way; chunks that divide neither window nor interval.
    warm, happened = serve(
        arguments(max_running_requests=3, chunked_prefill_size=12, max_total_tokens=160), family, rounds=2
    )

    assert happened["cached"] > 0
    assert happened["retractions"] > 0
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert max(divergence(*pair) for pair in zip(cold, warm, strict=True)) < MOST_DIVERGENCE
