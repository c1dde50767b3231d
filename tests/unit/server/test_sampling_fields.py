from __future__ import annotations

from typing import Any

import pytest

from app.core.keys import Namespace
from app.core.sampling import SamplingParams
from app.server.openai_errors import ApiError
from app.server.sampling_fields import chat_sampling, completion_sampling, namespace_of, resolve_max_tokens
from app.server.schemas import ChatCompletionRequest, ChatMessage, CompletionRequest


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="hi", **fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[ChatMessage(role="user", content="hi")], **fields)


@pytest.mark.parametrize(
    ("asked", "default", "prompt_tokens", "tokens"),
    [
        (5, 16, 10, 5),
        (0, 16, 10, 0),
        (22, 16, 10, 22),  # all that fits
        (None, 16, 10, 16),
        (None, 16, 20, 12),  # the default is cut
        (None, None, 10, 22),
        (None, None, 31, 1),
        (1, None, 31, 1),
    ],
)
def test_output_tokens_are_what_was_asked_or_what_fits(
    asked: int | None, default: int | None, prompt_tokens: int, tokens: int
) -> None:
    assert resolve_max_tokens(asked, default, prompt_tokens, 32) == tokens


def test_more_tokens_than_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(23, None, 10, 32, max_tokens_field="max_completion_tokens")

    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_completion_tokens")
    assert all(number in error.message for number in ("=23 ", "at most 22", "32 tokens", "prompt has 10"))


@pytest.mark.parametrize("prompt_tokens", [32, 33, 10**6])
@pytest.mark.parametrize("asked", [None, 0, 1])
def test_a_prompt_that_fills_the_context_is_refused(prompt_tokens: int, asked: int | None) -> None:
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(asked, 16, prompt_tokens, 32, prompt_field="messages")

    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert f"{prompt_tokens} tokens" in error.message
    assert "at most 31" in error.message


def test_every_field_reaches_the_engine() -> None:
    request = completion(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, frequency_penalty=0.2, presence_penalty=-0.3,
        repetition_penalty=1.1, logit_bias={"7": 5.0}, min_tokens=2, ignore_eos=True, stop=["x", "y"],
        stop_token_ids=[3], logprobs=4, skip_special_tokens=False, seed=11,
    )  # fmt: skip

    assert completion_sampling(request, 9) == [
        SamplingParams(
            max_tokens=9, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, frequency_penalty=0.2,
            presence_penalty=-0.3, repetition_penalty=1.1, logit_bias={7: 5.0}, min_tokens=2, ignore_eos=True,
            stop=("x", "y"), stop_token_ids=(3,), logprobs=4, skip_special_tokens=False, seed=11,
        )
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", [(completion_sampling, completion), (chat_sampling, chat)], ids=["text", "chat"])
def test_nothing_given_is_openais_default(sampling: Any) -> None:
    params_of, request = sampling

    assert params_of(request(), 9) == [SamplingParams(max_tokens=9, temperature=1.0)]


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (5, [5, 6, 7]),
        (0, [0, 1, 2]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, 0]),
        (-1, [2**63 - 1, 0, 1]),
        (-(2**63), [0, 1, 2]),
        (None, [None, None, None]),
    ],
)
def test_each_choice_has_a_seed_of_its_own(seed: int | None, seeds: list[int | None]) -> None:
    assert [params.seed for params in completion_sampling(completion(n=3, seed=seed), 9)] == seeds
    assert [params.seed for params in chat_sampling(chat(n=3, seed=seed), 9)] == seeds


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_log_probabilities_of_a_chat_follow_both_fields(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat_sampling(chat(**fields), 9)[0].logprobs == logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_log_probabilities_of_a_completion_are_a_number(logprobs: int | None) -> None:
    assert completion_sampling(completion(logprobs=logprobs), 9)[0].logprobs == logprobs


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_spellings_of_no_top_k_mean_all_tokens(top_k: int) -> None:
    assert completion_sampling(completion(top_k=top_k), 9)[0].top_k == -1


@pytest.mark.parametrize("sampling", [(completion_sampling, completion), (chat_sampling, chat)], ids=["text", "chat"])
def test_what_the_engine_refuses_names_the_clients_field(sampling: Any) -> None:
    params_of, request = sampling

    with pytest.raises(ApiError) as caught:
        params_of(request(min_tokens=10), 9)

    assert (caught.value.status, caught.value.param) == (400, "min_tokens")
    assert caught.value.message == "min_tokens=10 is not allowed: 0 to max_tokens (9)"


def test_salt_and_extra_key_keep_cached_pages_apart() -> None:
    assert namespace_of(completion()) == Namespace()
    assert namespace_of(completion(cache_salt="s", extra_key="k")) == Namespace(salt="s", extra_key="k")
    assert namespace_of(chat(cache_salt="", extra_key="")) == Namespace(salt="", extra_key="")
    assert namespace_of(chat(cache_salt="")) != namespace_of(chat())
