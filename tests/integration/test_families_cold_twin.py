"""Every model family through the whole engine: what is reused, chunked, batched and retracted changes no distribution.

The models are the tiny ones of the golden files, with a vocabulary no larger than the log-probabilities that a request
may ask for, so that every next-token distribution is seen whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.config.server_args import ServerArgs
from app.core.sampling import MAX_LOGPROBS, SamplingParams
from app.hicache.identities import FAKE_WEIGHTS
from app.models.hf_config import model_config_from_hf
from app.providers.testing import Override, fake_model, overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request, RequestOutput
from tests.support.seeded_weights import seeded_weights

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.json"))


class SeededModel:
    """Stands for a checkpoint: weights by name."""

    digest = FAKE_WEIGHTS

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        self._tensors = seeded_weights(shapes)

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


def files_of(family: str) -> dict[str, Override]:
    """Overrides that stand for the files of the family's golden model, its vocabulary cut short."""
    golden = json.loads((GOLDEN / f"{family}.json").read_text())
    config = {**golden["config"], "vocab_size": MAX_LOGPROBS}
    shapes = {
        name: [MAX_LOGPROBS, *shape[1:]] if name in ("model.embed_tokens.weight", "lm_head.weight") else shape
        for name, shape in golden["weights"].items()
    }
    model = model_config_from_hf(config)
    fakes = fake_model(model)
    return {
        "checkpoint": lambda _: providers.Object(SeededModel(shapes)),
        **{name: fakes[name] for name in ("base_model_config", "tokenizer", "detokenizer")},
    }


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


def divergence(expected: RequestOutput, found: RequestOutput) -> float:
    """Greatest KL divergence of a next-token distribution, in nats."""
    assert expected.top_logprobs is not None
    assert found.top_logprobs is not None
    pairs = zip(expected.top_logprobs, found.top_logprobs, strict=True)
    return max(_kl(dict(left), dict(right)) for left, right in pairs)


def _kl(left: dict[int, float], right: dict[int, float]) -> float:
    assert len(left) == len(right) == MAX_LOGPROBS
    return float(sum(np.exp(value) * (value - right[token]) for token, value in left.items()))


def arguments(**fields: Any) -> ServerArgs:
    return ServerArgs(
        **{
            "page_size": 4,
            "context_length": 160,
            "max_total_tokens": 1024,
            "recurrent_track_interval": 8,
            "max_recurrent_snapshots": 24,
            **fields,
        }
    )


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
    assert max(divergence(*pair) for pair in zip(cold, warm, strict=True)) < 1e-6
