"""The golden models behind a whole engine, and the same model serving one request at a time and keeping nothing.

Their vocabulary is cut to no more than the log-probabilities that a request may ask for, so that every next-token
distribution is seen whole.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
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
MOST_DIVERGENCE = 1e-6  # nats, in float32

Prompt = Sequence[int]


class SeededModel:
    """Stands for a checkpoint: weights by name."""

    digest = FAKE_WEIGHTS

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        self._tensors = seeded_weights(shapes)

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


def files_of(family: str, **config: Any) -> dict[str, Override]:
    """Overrides that stand for the files of the family's golden model, its vocabulary cut short. config: other fields
    of its config.json.
    """
    golden = json.loads((GOLDEN / f"{family}.json").read_text())
    shapes = {
        name: [MAX_LOGPROBS, *shape[1:]] if name in ("model.embed_tokens.weight", "lm_head.weight") else shape
        for name, shape in golden["weights"].items()
    }
    model = model_config_from_hf({**golden["config"], "vocab_size": MAX_LOGPROBS, **config})
    fakes = fake_model(model)
    return {
        "checkpoint": lambda _: providers.Object(SeededModel(shapes)),
        **{name: fakes[name] for name in ("base_model_config", "tokenizer", "detokenizer")},
    }


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


class FamilySite:
    """An engine with a golden model."""

    def __init__(self, container: Any) -> None:
        self.container = container
        self.scheduler = container.scheduler()
        self._numbers = itertools.count()

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        """One that tells every distribution."""
        return Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=MAX_LOGPROBS),
        )

    def together(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestOutput]:
        outputs = generate_all(self.scheduler, [self.request(prompt, max_tokens) for prompt in prompts])
        self.check()
        return outputs

    def ask(self, prompt: Prompt, max_tokens: int) -> RequestOutput:
        return self.together([prompt], max_tokens)[0]

    def evict(self) -> None:
        """All that nobody uses."""
        adapter = self.container.scheduler_adapter()
        adapter.make_room(adapter.reachable())
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.container.runtime().check_integrity()


class ColdTwin:
    """Answers each request alone, and computes all of it."""

    def __init__(self, site: FamilySite) -> None:
        self._site = site
        self._known: dict[tuple[Any, ...], RequestOutput] = {}

    def check(self, prompt: Prompt, found: RequestOutput) -> None:
        """The same ids, and the same distribution of every token."""
        count = len(found.token_ids)
        key = (*prompt, "and", count)
        if key not in self._known:
            self._known[key] = self._site.ask(prompt, count)
        expected = self._known[key]
        assert expected.cached_tokens == 0
        assert found.token_ids == expected.token_ids
        assert divergence(expected, found) < MOST_DIVERGENCE


@contextmanager
def served_family(family: str, config: dict[str, Any] | None = None, **fields: Any) -> Iterator[FamilySite]:
    """config: other fields of its config.json. fields: of ServerArgs."""
    with overridden(arguments(**fields), **files_of(family, **(config or {}))) as container:
        yield FamilySite(container)


@contextmanager
def cold_twin(family: str, config: dict[str, Any] | None = None, **fields: Any) -> Iterator[ColdTwin]:
    with served_family(family, config, cache_type="chunk_cache", max_running_requests=1, **fields) as site:
        yield ColdTwin(site)


def divergence(expected: RequestOutput, found: RequestOutput) -> float:
    """Greatest KL divergence of a next-token distribution, in nats."""
    assert expected.top_logprobs is not None
    assert found.top_logprobs is not None
    pairs = zip(expected.top_logprobs, found.top_logprobs, strict=True)
    return max(_kl(dict(left), dict(right)) for left, right in pairs)


def _kl(left: dict[int, float], right: dict[int, float]) -> float:
    assert len(left) == len(right) == MAX_LOGPROBS
    expected, found = (_normalised([given[token] for token in sorted(given)]) for given in (left, right))
    return float(np.sum(np.exp(expected) * (expected - found)))


def _normalised(logprobs: list[float]) -> np.ndarray:
    """In float64: told in float32 they sum to one but for some 1e-7, which would be taken for a divergence."""
    told = np.array(logprobs, np.float64)
    return told - np.log(np.exp(told).sum())
