"""What a sampled answer may depend on: its own request, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.engine import Engine, cold_logits, cold_tokens

OpenEngine = Callable[..., Engine]
PROMPT = np.arange(60, 75, dtype=np.int32)
SAMPLED = {"temperature": 3.0, "seed": 11}

KINDS: dict[str, dict[str, Any]] = {
    "temperature": SAMPLED,
    "filtered": {**SAMPLED, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "sampled with penalties": {**SAMPLED, "presence_penalty": 2.0, "logit_bias": {7: 6.0}},
}


def alone(engine: OpenEngine, prompt: np.ndarray, **sampling: Any) -> list[int]:
    """The answer of an engine that serves nothing else, whole prompt at once, nothing reused."""
    opened = engine(cache_type="chunk_cache", chunked_prefill_size=-1, disable_overlap=True)
    return opened.serve(prompt, **sampling).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_depend_on_chunks_mates_cache_or_overlap(engine: OpenEngine, kind: str) -> None:
    params = {**KINDS[kind], "max_tokens": 16}
    expected = alone(engine, PROMPT, **params)
    assert expected != cold_tokens(PROMPT, 16)

    for fields in ({"chunked_prefill_size": 4}, {"chunked_prefill_size": 7, "disable_overlap": True}):
        opened = engine(**fields)
        opened.serve(PROMPT[:9], max_tokens=1)
        for index in range(3):
            opened.add([index] * (3 + index), f"mate{index}", max_tokens=20, **KINDS["filtered"])
        opened.step(2)
        opened.add(PROMPT, "mine", **params)
        opened.add([1, 2], "greedy", max_tokens=8)

        outputs = opened.drain()

        assert outputs["mine"].token_ids == expected
        assert outputs["greedy"].token_ids == cold_tokens(np.array([1, 2], np.int32), 8)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_change_when_it_is_retracted(engine: OpenEngine, kind: str, overlap: bool) -> None:
    """Penalties count what was put out before the retraction; a draw depends on seed and position alone."""
    params = {**KINDS[kind], "max_tokens": 20}
    prompts = [PROMPT[:10] + index for index in range(3)]
    expected = [alone(engine, prompt, **params) for prompt in prompts]

    opened = engine(max_total_tokens=56, disable_overlap=not overlap, chunked_prefill_size=8)
    for prompt in prompts:
        opened.add(prompt, **params)
    outputs = opened.drain()

    assert opened.scheduler.num_retractions > 0
    assert [outputs[f"r{index}"].token_ids for index in range(3)] == expected


def test_requests_without_a_seed_get_one_of_their_own(engine: OpenEngine) -> None:
    """The same run gives the same answers; two requests of one run differ; another --random-seed changes them."""

    def answers(random_seed: int) -> list[list[int]]:
        opened = engine(random_seed=random_seed)
        for _ in range(2):
            opened.add(PROMPT, max_tokens=8, temperature=3.0)
        return [output.token_ids for _, output in sorted(opened.drain().items())]

    first, again, other = answers(0), answers(0), answers(1)

    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_a_row_forgets_the_penalties_of_the_request_before(engine: OpenEngine) -> None:
    opened = engine(max_running_requests=1)
    banned = cold_tokens(PROMPT, 1)[0]

    biased = opened.serve(PROMPT, max_tokens=4, logit_bias={banned: -100.0})
    plain = opened.serve(PROMPT, max_tokens=4)
    again = opened.serve(PROMPT, max_tokens=4, presence_penalty=0.5)

    assert biased.token_ids[0] != banned
    assert plain.token_ids == cold_tokens(PROMPT, 4)
    assert again.token_ids[0] == banned


@pytest.mark.parametrize("overlap", [True, False])
def test_log_probabilities_are_those_of_the_model(engine: OpenEngine, overlap: bool) -> None:
    """Of each output token and its rivals, whatever is retracted in between; rows that did not ask get none."""
    opened = engine(max_total_tokens=56, disable_overlap=not overlap, chunked_prefill_size=8)
    wanted = {"a": 3, "b": 0, "c": None}
    for index, (name, count) in enumerate(wanted.items()):
        opened.add(PROMPT[:10] + index, name, max_tokens=20, logprobs=count)

    outputs = opened.drain()

    assert opened.scheduler.num_retractions > 0
    opened.check_replies()
    assert outputs["c"].logprobs is outputs["c"].top_logprobs is None
    for index, name in enumerate(("a", "b")):
        output = outputs[name]
        assert len(output.logprobs) == len(output.top_logprobs) == 20
        tokens = PROMPT[:10] + index
        for token, logprob, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
            expected = log_softmax(cold_logits(tokens))
            assert logprob == pytest.approx(expected[token], abs=1e-4)
            assert [pair[0] for pair in top] == np.argsort(-expected)[: wanted[name]].tolist()
            assert [pair[1] for pair in top] == pytest.approx(np.sort(expected)[::-1][: wanted[name]], abs=1e-4)
            tokens = np.append(tokens, np.int32(token))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())
