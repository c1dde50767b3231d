"""Around the context's limit a request is served exactly as asked or refused; and usage counts what happened."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.asking import CHAT, Asker, text_of
from tests.support.engine import cold_tokens
from tests.support.server import running_server

CONTEXT_LENGTH = 126  # it ends within a page
OVERHEAD = len("user: \nassistant: ")  # of a conversation with one message


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with running_server(page_size=8, context_length=CONTEXT_LENGTH) as server, Asker(server.url) as made:
        yield made


AROUND = [
    (prompt, max_tokens)
    for prompt in (1, 64, *range(CONTEXT_LENGTH - 2, CONTEXT_LENGTH + 2))
    for max_tokens in sorted({0, 1, *range(CONTEXT_LENGTH - prompt - 2, CONTEXT_LENGTH - prompt + 2)})
    if max_tokens >= 0
]


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), AROUND)
def test_a_request_is_served_exactly_as_asked_or_refused(asker: Asker, prompt_tokens: int, max_tokens: int) -> None:
    prompt = [(7 * index + prompt_tokens) % 256 for index in range(prompt_tokens)]
    asked = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0}

    if prompt_tokens < CONTEXT_LENGTH and prompt_tokens + max_tokens <= CONTEXT_LENGTH:
        expected = cold_tokens(np.array(prompt, np.int32), max_tokens)
        for way in (asker.whole, asker.streamed):
            answer = way(**asked)
            assert answer.choice.token_ids == expected
            assert answer.usage["prompt_tokens"] == prompt_tokens
            assert answer.usage["completion_tokens"] == max_tokens
            assert answer.choice.finish_reason == "length"
    else:
        for stream in (False, True):
            status, error = asker.refused(**asked, stream=stream)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == ("prompt" if prompt_tokens >= CONTEXT_LENGTH else "max_tokens")
            assert str(CONTEXT_LENGTH) in error["message"]


@pytest.mark.parametrize("prompt_tokens", [20, CONTEXT_LENGTH - 17, CONTEXT_LENGTH - 15, CONTEXT_LENGTH - 1])
def test_who_names_no_limit_gets_what_fits(asker: Asker, prompt_tokens: int) -> None:
    room = CONTEXT_LENGTH - prompt_tokens

    completion = asker.whole(prompt="p" * prompt_tokens)
    chat = asker.whole(CHAT, messages=[{"role": "user", "content": "p" * (prompt_tokens - OVERHEAD)}])

    assert completion.usage["completion_tokens"] == min(16, room)
    assert chat.usage["prompt_tokens"] == prompt_tokens
    assert chat.usage["completion_tokens"] == room


def test_of_several_prompts_one_that_is_too_long_refuses_all(asker: Asker) -> None:
    asker.wait_until_idle()
    before = asker.metrics()["tpukv:prompt_tokens_total"]

    status, error = asker.refused(prompt=["short", "x" * CONTEXT_LENGTH], max_tokens=2)

    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert asker.info()["num_requests"] == 0
    assert asker.metrics()["tpukv:prompt_tokens_total"] == before


def test_usage_is_that_of_an_undisturbed_run_though_requests_are_retracted() -> None:
    """Four requests of up to 46 tokens each, and a pool of 72."""
    # given
    prompts = [[*range(index, index + 14)] for index in (0, 50, 100, 150)]
    fields = {"max_tokens": 32, "logprobs": 0}

    with running_server(max_total_tokens=72, context_length=64) as server, Asker(server.url) as asker:
        asker.wait_until_idle()
        before = asker.metrics()

        # when: streamed and not, all of them at once
        with ThreadPoolExecutor(4) as pool:
            ways = [asker.whole, asker.streamed, asker.whole, asker.streamed]
            asked = list(zip(ways, prompts, strict=True)) * 2
            answers = list(pool.map(lambda one: one[0](prompt=one[1], **fields), asked))
        asker.wait_until_idle()

        # then
        for (_, prompt), answer in zip(asked, answers, strict=True):
            expected = cold_tokens(np.array(prompt, np.int32), 32)
            assert answer.choice.token_ids == expected
            assert answer.choice.text == text_of(expected)
            assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (14, 32)
        gained = {name: value - before.get(name, 0) for name, value in asker.metrics().items()}
        assert gained["tpukv:num_preemptions_total"] > 0
        assert gained["tpukv:evicted_tokens_total"] > 0
        assert gained["tpukv:prompt_tokens_total"] == 14 * len(answers)
        assert gained["tpukv:generation_tokens_total"] == 32 * len(answers)
        assert gained["tpukv:prefix_cache_hits_total"] == sum(answer.cached_tokens for answer in answers)


def test_a_pool_smaller_than_the_context_is_the_limit() -> None:
    with running_server(max_total_tokens=64) as server, Asker(server.url) as asker:
        assert asker.whole(prompt=[*range(30)], max_tokens=34).usage["completion_tokens"] == 34
        assert asker.refused(prompt=[*range(30)], max_tokens=35)[1]["code"] == "context_length_exceeded"
        assert asker.refused(prompt=[*range(64)], max_tokens=0)[1]["code"] == "context_length_exceeded"
