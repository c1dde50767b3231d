"""What this server takes beyond OpenAI's fields, asked for through OpenAI's client, as extra_body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from app.text.byte_tokenizer import END_OF_SEQUENCE
from tests.support.asking import text_of, tokens_of
from tests.support.engine import cold_logits, cold_tokens
from tests.support.server import MODEL, running_server

PROMPT = "Once upon a midnight dreary"
EOS = {str(END_OF_SEQUENCE): 100}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running_server(max_total_tokens=1024) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made


def ask(client: openai.OpenAI, prompt: str = PROMPT, max_tokens: int = 6, **fields: Any) -> Any:
    extra = fields.pop("extra_body", {})
    return client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        **{"temperature": 0, **fields},
        extra_body={"ignore_eos": True, **extra},
    )


def cached(client: openai.OpenAI, prompt: str, **extra: Any) -> int:
    return ask(client, prompt, 1, extra_body=extra).usage.prompt_tokens_details.cached_tokens


def greedy(count: int) -> str:
    return text_of(cold_tokens(np.array(tokens_of(PROMPT), np.int32), count))


@pytest.mark.parametrize("label", ["cache_salt", "extra_key"])
def test_a_label_keeps_cached_pages_apart(client: openai.OpenAI, label: str) -> None:
    prompt = f"{label} keeps prompts apart, if they are long enough for pages"
    hit = (len(prompt) - 1) // 4 * 4

    assert cached(client, prompt, **{label: "alice"}) == 0
    assert cached(client, prompt, **{label: "alice"}) == hit
    assert cached(client, prompt, **{label: "bob"}) == 0
    assert cached(client, prompt) == 0
    assert cached(client, prompt, **{label: ""}) == 0  # an empty label is one, too
    assert cached(client, prompt, **{label: "alice"}) == hit
    assert cached(client, prompt) == hit


def test_the_two_labels_are_not_one(client: openai.OpenAI) -> None:
    prompt = "The same word under two names keeps apart as well"
    assert cached(client, prompt, cache_salt="word") == 0
    assert cached(client, prompt, extra_key="word") == 0


def test_labels_do_not_change_the_answer(client: openai.OpenAI) -> None:
    assert ask(client, extra_body={"cache_salt": "x", "extra_key": "y"}).choices[0].text == greedy(6)


def test_end_of_sequence_ends_an_answer_unless_it_is_to_be_ignored(client: openai.OpenAI) -> None:
    ended = ask(client, logit_bias=EOS, extra_body={"ignore_eos": False})
    ignored = ask(client, logit_bias=EOS)

    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    assert (ignored.choices[0].finish_reason, ignored.usage.completion_tokens) == ("length", 6)
    assert ended.choices[0].text == ignored.choices[0].text == ""


@pytest.mark.parametrize(
    "end",
    [
        {"logit_bias": EOS, "extra_body": {"ignore_eos": False}},
        {"logit_bias": {"97": 100}, "extra_body": {"stop_token_ids": [97]}},
        {"logit_bias": {"97": 100}, "stop": "a"},
    ],
    ids=["end of sequence", "stop token", "stop string"],
)
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_nothing_ends_an_answer_before_min_tokens(client: openai.OpenAI, min_tokens: int, end: dict[str, Any]) -> None:
    extra = {**end.get("extra_body", {}), "min_tokens": min_tokens}

    reply = ask(client, **{**end, "extra_body": extra})

    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == max(1, min_tokens)


def test_a_stop_token_is_counted_and_not_shown(client: openai.OpenAI) -> None:
    reply = ask(client, logit_bias={"97": 100}, extra_body={"stop_token_ids": [97], "min_tokens": 3})

    assert reply.choices[0].text == "aa"
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize(
    "narrow", [{"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}, {"top_p": 1e-6}], ids=str
)
def test_a_choice_among_one_token_is_the_greedy_one(client: openai.OpenAI, narrow: dict[str, Any]) -> None:
    assert ask(client, temperature=1.5, seed=1).choices[0].text != greedy(6)
    assert ask(client, temperature=1.5, seed=1, **narrow).choices[0].text == greedy(6)


def test_repetition_penalty_divides_the_score_of_known_tokens(client: openai.OpenAI) -> None:
    """Five letters compete, all far above the other tokens."""
    letters = [97, 98, 99, 100, 101]
    bias = {str(letter): 100.0 for letter in letters}

    def reference(penalty: float) -> str:
        known = tokens_of("bc")
        for _ in range(8):
            logits = cold_logits(np.array(known, np.int32)) + 100
            known.append(max(letters, key=lambda letter: logits[letter] / (penalty if letter in known else 1)))
        return text_of(known[2:])

    assert reference(1.1) != reference(1.0)
    assert ask(client, "bc", 8, logit_bias=bias).choices[0].text == reference(1.0)
    penalised = ask(client, "bc", 8, logit_bias=bias, extra_body={"repetition_penalty": 1.1})
    assert penalised.choices[0].text == reference(1.1)


def test_cached_tokens_are_told_by_tier_if_asked_for(client: openai.OpenAI) -> None:
    prompt = "Where did the cached tokens of this prompt come from?"
    cached(client, prompt)
    hit = (len(prompt) - 1) // 4 * 4

    plain = ask(client, prompt, 1).usage.prompt_tokens_details.model_dump()
    detailed = ask(client, prompt, 1, extra_body={"return_cached_tokens_details": True})
    details = detailed.usage.prompt_tokens_details.model_dump()

    assert plain["cached_tokens"] == details["cached_tokens"] == hit
    assert "cached_tokens_details" not in plain
    assert details["cached_tokens_details"] == {"device": hit, "host": 0, "storage": 0}


def test_null_counts_as_left_out(client: openai.OpenAI) -> None:
    extra = dict.fromkeys(("cache_salt", "extra_key", "priority", "min_tokens", "stop_token_ids", "top_k"))
    assert ask(client, extra_body=extra, stop=None, seed=None, logit_bias=None).choices[0].text == greedy(6)


def test_token_ids_are_taken_for_text_and_lists_for_several_prompts(client: openai.OpenAI) -> None:
    other = "Ravens"
    reply = client.completions.create(
        model=MODEL,
        prompt=[tokens_of(PROMPT), tokens_of(other)],
        max_tokens=6,
        temperature=0,
        n=2,
        extra_body={"ignore_eos": True},
    )

    texts = [choice.text for choice in reply.choices]
    expected_other = text_of(cold_tokens(np.array(tokens_of(other), np.int32), 6))
    assert texts == [greedy(6), greedy(6), expected_other, expected_other]
    assert reply.usage.prompt_tokens == len(PROMPT) + len(other)
    assert reply.usage.completion_tokens == 24
