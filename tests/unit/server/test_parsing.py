from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.server.openai_errors import ApiError
from app.server.parsing import parse_body
from app.server.schemas import ChatCompletionRequest, CompletionRequest

COMPLETION = {"model": "m", "prompt": "hi"}
HELLO = {"role": "user", "content": "hi"}
CHAT = {"model": "m", "messages": [HELLO]}


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(json.dumps({**COMPLETION, **fields}).encode(), CompletionRequest).request


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({**CHAT, **fields}).encode(), ChatCompletionRequest).request


def refusal(schema: type[msgspec.Struct], body: Any) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse_body(raw, schema)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_defaults_are_openais() -> None:
    for request in (completion(), chat()):
        assert (request.temperature, request.top_p, request.n, request.stream) == (1.0, 1.0, 1, False)
        assert (request.seed, request.stops, request.wants_usage) == (None, (), False)
        assert (request.frequency_penalty, request.presence_penalty) == (0.0, 0.0)
        assert (request.cache_salt, request.extra_key, request.priority) == (None, None, 0)
    assert (completion().max_tokens, completion().logprobs) == (None, None)
    assert (chat().asked_max_tokens, chat().logprobs, chat().add_generation_prompt) == (None, False, True)


@pytest.mark.parametrize(
    ("schema", "body"),
    [(CompletionRequest, COMPLETION), (ChatCompletionRequest, CHAT)],
    ids=["completion", "chat"],
)
def test_null_is_the_same_as_leaving_an_optional_field_out(schema: type[msgspec.Struct], body: dict[str, Any]) -> None:
    nulls = {name: None for name in schema.__struct_fields__ if name not in body}

    parsed = parse_body(json.dumps({**body, **nulls, "of_nobody": None}).encode(), schema)

    assert parsed.request == parse_body(json.dumps(body).encode(), schema).request
    assert parsed.ignored == ()


def test_fields_of_nobody_are_ignored_and_told() -> None:
    parsed = parse_body(json.dumps({**COMPLETION, "zzz": 1, "extra_body": {}}).encode(), CompletionRequest)

    assert parsed.ignored == ("extra_body", "zzz")


def test_of_a_field_given_twice_the_last_counts() -> None:
    parsed = parse_body(b'{"model": "m", "prompt": "a", "prompt": "b"}', CompletionRequest)

    assert parsed.request.prompt == "b"


# What is wrong with a field, on the routes that have it.

WRONG_ON_BOTH: list[tuple[str, Any]] = [
    ("model", 5),
    ("model", ["m"]),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("max_tokens", -1),
    ("max_tokens", 2**70),
    ("max_tokens", [5]),
    ("temperature", "1"),
    ("temperature", -0.1),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", "0.5"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("n", 0),
    ("n", 129),
    ("n", "1"),
    ("n", True),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", "1"),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop_token_ids", 5),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("presence_penalty", 3),
    ("presence_penalty", "0"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"07": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"7": 101}),
    ("logit_bias", {"7": "1"}),
    ("logit_bias", [1]),
    ("skip_special_tokens", 0),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),  # without stream
    ("user", 5),
    ("cache_salt", 5),
    ("cache_salt", "x" * 1025),
    ("extra_key", ["x"]),
    ("priority", 1.5),
    ("priority", 2**31),
    ("return_cached_tokens_details", "yes"),
]
WRONG_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", ["a", ""]),
    ("prompt", [[1], []]),
    ("prompt", 5),
    ("prompt", {"text": "a"}),
    ("prompt", ["a", 1]),
    ("prompt", [1, [1]]),
    ("prompt", ["a"] * 1025),
    ("logprobs", True),
    ("logprobs", -1),
    ("logprobs", 21),
]
WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", HELLO),
    ("max_completion_tokens", "5"),
    ("max_completion_tokens", -1),
    ("logprobs", 1),
    ("top_logprobs", 3),  # without logprobs
    ("top_logprobs", -1),
    ("add_generation_prompt", "no"),
]
WRONG = [
    *((CompletionRequest, COMPLETION, name, value) for name, value in WRONG_ON_BOTH + WRONG_COMPLETION),
    *((ChatCompletionRequest, CHAT, name, value) for name, value in WRONG_ON_BOTH + WRONG_CHAT),
]


@pytest.mark.parametrize(("schema", "body", "name", "value"), WRONG)
def test_a_wrong_value_is_refused_naming_its_field(
    schema: type[msgspec.Struct], body: dict[str, Any], name: str, value: Any
) -> None:
    error = refusal(schema, {**body, name: value})

    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value", "param", "words"),
    [
        ("prompt", [1, -1], "prompt[1]", "prompt[1]=-1"),
        ("prompt", [1, 2**31], "prompt[1]", "2147483647"),
        ("prompt", [True], "prompt[0]", "prompt[0]=True"),
        ("prompt", [[1], [2, 1.5]], "prompt[1][1]", "a whole number from 0 to"),
        ("stop", ["a", ""], "stop[1]", "text of at least 1 character"),
        ("stop_token_ids", [5, "x"], "stop_token_ids[1]", "'x'"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage", "true or false"),
    ],
)
def test_a_wrong_value_inside_a_field_is_refused_with_its_place(name: str, value: Any, param: str, words: str) -> None:
    error = refusal(CompletionRequest, {**COMPLETION, "stream": True, name: value})

    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("hi", "messages[1]", "an object with role, content, name"),
        ({"content": "hi"}, "messages[1].role", "is missing: it must be one of 'assistant', 'developer'"),
        ({"role": "tool", "content": "hi"}, "messages[1].role", "messages[1].role='tool' is not allowed: one of"),
        ({"role": None, "content": "hi"}, "messages[1].role", "one of"),
        ({"role": "user"}, "messages[1].content", "text, or a list of text parts"),
        ({"role": "user", "content": None}, "messages[1].content", "text, or a list of text parts"),
        ({"role": "user", "content": 5}, "messages[1].content", "messages[1].content=5"),
        ({"role": "user", "content": ["hi"]}, "messages[1].content[0]", "an object with type, text"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "is missing"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text", "5"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type", "'image_url'"),
        ({"role": "user", "content": "hi", "name": 5}, "messages[1].name", "text"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(message: Any, param: str, words: str) -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, "messages": [HELLO, message]})

    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(("schema", "name"), [(CompletionRequest, "model"), (ChatCompletionRequest, "messages")])
def test_a_missing_field_is_named(schema: type[msgspec.Struct], name: str) -> None:
    body = {key: value for key, value in {**COMPLETION, **CHAT}.items() if key in schema.__struct_fields__}
    del body[name]

    error = refusal(schema, body)

    assert error.param == name
    assert error.message.startswith(f"{name} is missing")


def test_values_at_the_edge_are_taken() -> None:
    request = completion(
        max_tokens=0, temperature=5, top_p=1, top_k=0, min_p=1, n=128, seed=-(2**63), stop=["x"] * 16, logprobs=20,
        frequency_penalty=-2, presence_penalty=2, logit_bias={"0": -100, "50256": 100}, priority=-(2**31),
    )  # fmt: skip

    assert (request.max_tokens, request.temperature, request.seed, request.logprobs) == (0, 5.0, -(2**63), 20)
    assert request.logit_bias == {"0": -100.0, "50256": 100.0}
    assert completion(logprobs=0).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert chat(top_logprobs=0, logprobs=False).top_logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompts_come_one_by_one_whatever_their_form(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


def test_the_number_of_choices_is_limited_over_all_prompts() -> None:
    assert completion(prompt=["a"] * 1024).n == 1
    assert completion(prompt=[[1]] * 8, n=128).n == 128
    assert completion(prompt=[1] * 5000).n == 1  # one prompt of 5000 tokens

    assert refusal(CompletionRequest, {**COMPLETION, "prompt": ["a"] * 9, "n": 128}).param == "n"
    assert "1025" in refusal(CompletionRequest, {**COMPLETION, "prompt": ["a"] * 1025}).message


def test_stop_may_be_one_text_or_several() -> None:
    assert completion(stop="x").stops == ("x",)
    assert completion(stop=["x", "y"]).stops == ("x", "y")
    assert completion(stop=[]).stops == ()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({"include_usage": None}, False), ({}, False)],
)
def test_a_stream_tells_its_usage_when_asked(options: dict[str, Any], wanted: bool) -> None:
    assert completion(stream=True, stream_options=options).wants_usage is wanted


def test_usage_in_every_event_is_not_supported() -> None:
    for value in (False, None):
        assert chat(stream=True, stream_options={"continuous_usage_stats": value}).stream

    error = refusal(ChatCompletionRequest, {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}})

    assert error.param == "stream_options.continuous_usage_stats"


def test_both_names_of_the_length_limit_must_agree() -> None:
    assert (chat(max_tokens=5).asked_max_tokens, chat(max_tokens=5).max_tokens_field) == (5, "max_tokens")
    assert chat(max_completion_tokens=6).asked_max_tokens == 6
    assert chat(max_completion_tokens=6).max_tokens_field == "max_completion_tokens"
    assert chat(max_tokens=5, max_completion_tokens=5).asked_max_tokens == 5
    assert chat(max_completion_tokens=0).asked_max_tokens == 0

    error = refusal(ChatCompletionRequest, {**CHAT, "max_tokens": 5, "max_completion_tokens": 6})

    assert "max_tokens=5" in error.message
    assert "max_completion_tokens=6" in error.message


def test_messages_become_what_templates_take() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief", "name": "ops"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": []},
        ]
    )

    assert request.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "truncated"),
        (b'{"model": "m"', "truncated"),
        (b"\xff", "JSON"),
        (b'{"model": "\xff", "prompt": "a"}', "UTF-8"),
        (b'{"model": "\xed\xa0\x80", "prompt": "a"}', "UTF-8"),
        (b'{"model": "m", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "m", "prompt": "a\\udfffb"}', "surrogate"),
        (b'{"model": "m", "prompt": "\\ud83d\\ud83d"}', "surrogate"),
        (b'{"model": "m", "prompt": "a", "\\ud800": 1}', "surrogate"),
        (b'{"model": "m", "prompt": "a\nb"}', "invalid character"),
        (b'{"model": "m", "prompt": "a"} x', "trailing"),
        (b'{"model": "m", "prompt": "a",}', "JSON"),
        (b'{"temperature": NaN}', "JSON"),
        (b'{"temperature": Infinity}', "JSON"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"model"', "must be a JSON object"),
        ('{"model": "m"}'.encode("utf-16"), "JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, words: str) -> None:
    assert words in refusal(CompletionRequest, raw).message


def test_text_of_any_unicode_arrives_as_it_was() -> None:
    text = "\0 é 日本 👩‍👩‍👧 \U0010ffff \u202e"

    assert completion(prompt=text, cache_salt=text).prompt == text
    assert completion(prompt=text, cache_salt=text).cache_salt == text


def test_an_empty_salt_is_not_the_absence_of_one() -> None:
    assert completion(cache_salt="", extra_key="").cache_salt == ""
    assert completion(cache_salt=None).cache_salt is None
