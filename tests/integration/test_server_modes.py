"""One question has one answer, however it is asked, whatever is cached, and whoever else is served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.asking import CHAT, Answer, Asker, text_of, tokens_of
from tests.support.engine import cold_tokens
from tests.support.server import running_server

PROMPT = "The quick brown fox jumps over the lazy dog, twice."
COUNT = 20

ENGINES: dict[str, dict[str, Any]] = {
    "pages of 1": {"page_size": 1},
    "pages of 4, whole prompts": {"page_size": 4, "chunked_prefill_size": -1},
    "pages of 16, small chunks": {"page_size": 16, "chunked_prefill_size": 8},
    "no prefix reuse": {"cache_type": "chunk_cache"},
}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES.keys())
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the engine."""
    return dict(request.param)


@pytest.fixture(scope="module")
def asker(fields: dict[str, Any]) -> Iterator[Asker]:
    with running_server(max_total_tokens=512, **fields) as server, Asker(server.url) as made:
        yield made


def test_a_completion_is_the_same_in_every_mode(asker: Asker, fields: dict[str, Any]) -> None:
    # given
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": COUNT, "logprobs": 1}
    by_ids = {**asked, "prompt": tokens_of(PROMPT)}
    answers = {}

    # when
    flush(asker)
    answers["cold"] = asker.whole(**asked)
    answers["warm"] = asker.whole(**asked)
    answers["warm stream"] = asker.streamed(**asked)
    answers["warm by ids"] = asker.whole(**by_ids)
    flush(asker)
    answers["cold stream"] = asker.streamed(**asked)
    flush(asker)
    answers["cold by ids"] = asker.streamed(**by_ids)
    flush(asker)
    with ThreadPoolExecutor(8) as pool:
        ways = [asker.whole, asker.streamed] * 4
        together = list(pool.map(lambda way: way(**asked), ways))

    # then
    expected = cold_tokens(np.array(tokens_of(PROMPT), np.int32), COUNT)
    reference = answers["cold"].choice
    for answer in [*answers.values(), *together]:
        assert answer.choice.token_ids == expected
        assert answer.choice.text == text_of(expected)
        assert answer.choice.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
        assert answer.choice.finish_reason == "length"
        assert tokens_told(answer) == (len(PROMPT), COUNT)
    reuses = fields.get("cache_type") != "chunk_cache"
    hit = (len(PROMPT) - 1) // fields.get("page_size", 4) * fields.get("page_size", 4) if reuses else 0
    for name, answer in answers.items():
        assert answer.cached_tokens == (hit if "warm" in name else 0), name


def test_a_conversation_is_the_same_in_every_mode(asker: Asker) -> None:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "logprobs": True}
    flush(asker)

    answers = [asker.whole(CHAT, **asked), asker.whole(CHAT, **asked), asker.streamed(CHAT, **asked)]

    expected = cold_tokens(np.array(tokens_of(f"user: {PROMPT}\nassistant: "), np.int32), 9)
    for answer in answers:
        assert answer.choice.token_ids == expected
        assert answer.choice.text == text_of(expected)
        assert answer.choice.logprobs == pytest.approx(answers[0].choice.logprobs, abs=1e-5)
        assert tokens_told(answer) == tokens_told(answers[0])


def test_asking_for_logprobs_or_stops_changes_no_token(asker: Asker) -> None:
    plain = asker.whole(prompt=PROMPT, max_tokens=COUNT)

    for extra in ({"logprobs": 0}, {"logprobs": 5}, {"stop": "never said"}, {"stop_token_ids": [256]}):
        for way in (asker.whole, asker.streamed):
            assert way(prompt=PROMPT, max_tokens=COUNT, **extra).choice.text == plain.choice.text, extra


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_the_shortest_answers_are_as_long_as_asked(asker: Asker, path: str, max_tokens: int) -> None:
    """Cold and computed in chunks, as a full hit, as a stream, with two choices."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
    asked = {**prompt, "path": path, "max_tokens": max_tokens}
    full = asker.whole(**{**asked, "max_tokens": 1})
    flush(asker)

    cold = asker.whole(**asked)
    warm = asker.whole(**asked)
    streamed = asker.streamed(**asked)
    two = asker.whole(**asked, n=2)
    two_streamed = asker.streamed(**asked, n=2)

    for answer in (cold, warm, streamed, two, two_streamed):
        assert {choice.text for choice in answer.choices} == {full.choice.text if max_tokens else ""}
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage["prompt_tokens"] == full.usage["prompt_tokens"]
        assert answer.usage["completion_tokens"] == max_tokens * len(answer.choices)


def test_a_stop_that_the_first_token_meets_ends_the_answer_there(asker: Asker) -> None:
    bias = {"97": 100}
    for max_tokens, reason in ((0, "length"), (1, "stop"), (5, "stop")):
        for stop in ({"stop": "a"}, {"stop_token_ids": [97]}):
            for way in (asker.whole, asker.streamed):
                answer = way(prompt=PROMPT, max_tokens=max_tokens, logit_bias=bias, **stop)
                assert (answer.choice.text, answer.choice.finish_reason) == ("", reason)
                assert answer.usage["completion_tokens"] == min(1, max_tokens)


def flush(asker: Asker) -> None:
    asker.wait_until_idle()
    asker.http.post("/flush_cache").raise_for_status()


def tokens_told(answer: Answer) -> tuple[int, int]:
    assert answer.usage is not None
    return answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
