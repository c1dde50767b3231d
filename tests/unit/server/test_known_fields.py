from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.server.known_fields import UNSUPPORTED_FIELDS, UNSUPPORTED_MESSAGE_FIELDS, UnsupportedField, ignored_names
from app.server.openai_errors import ApiError
from app.server.parsing import parse_body
from app.server.schemas import ChatCompletionRequest, CompletionRequest

SCHEMAS = {
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}
# A value that asks for something, by what the neutral one looks like.
ASKING: dict[str, Any] = {
    "bool": [True, False, 1, 0, "true"],
    "other": [{"type": "json_object"}, ["x"], "x", 7, True],
}
CASES = [(schema, name) for schema in SCHEMAS for name in UNSUPPORTED_FIELDS if name not in schema.__struct_fields__]


def asking_values(field: UnsupportedField) -> list[Any]:
    kind = "bool" if any(isinstance(neutral, bool) for neutral in field.neutral) else "other"
    return [value for value in ASKING[kind] if not field.accepts(value)]


@pytest.mark.parametrize(("schema", "name"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_what_asks_for_nothing_is_taken(schema: type[msgspec.Struct], name: str) -> None:
    for value in [None, *UNSUPPORTED_FIELDS[name].neutral]:
        parsed = parse_body(json.dumps({**SCHEMAS[schema], name: value}).encode(), schema)

        assert parsed.ignored == ()


@pytest.mark.parametrize(("schema", "name"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_what_asks_for_something_is_refused_by_name(schema: type[msgspec.Struct], name: str) -> None:
    values = asking_values(UNSUPPORTED_FIELDS[name])
    assert values
    for value in values:
        with pytest.raises(ApiError) as caught:
            parse_body(json.dumps({**SCHEMAS[schema], name: value}).encode(), schema)

        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.message.startswith(f"{name}={value!r} is not allowed: this server does not support it")


@pytest.mark.parametrize("name", UNSUPPORTED_MESSAGE_FIELDS)
def test_a_message_with_more_than_text_is_refused_with_its_place(name: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, name: {"x": 1}}]

    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatCompletionRequest)

    assert caught.value.param == f"messages[1].{name}"


def test_an_earlier_reply_can_be_sent_back_as_it_came() -> None:
    reply = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "function_call": None}
    body = {"model": "m", "messages": [reply, {**reply, "tool_calls": []}]}

    parsed = parse_body(json.dumps(body).encode(), ChatCompletionRequest)

    assert parsed.request.template_messages() == [{"role": "assistant", "content": "yes"}] * 2


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("tools", "leave it out or send null or []"),
        ("echo", "leave it out or send null or false"),
        ("response_format", 'leave it out or send null or {"type":"text"}'),
        ("best_of", "leave it out or send null or 1 (for several answers use n)"),
        ("prompt_logprobs", "leave it out or send null"),
    ],
)
def test_the_message_says_what_may_be_sent(name: str, allowed: str) -> None:
    assert UNSUPPORTED_FIELDS[name].allowed().endswith(allowed)


@pytest.mark.parametrize(
    ("neutral", "value", "accepted"),
    [
        (False, 0, False),
        (1, True, False),
        (0, False, False),
        (1.0, 1, True),
        (1, 1.0, True),
        ([], {}, False),
        ("", [], False),
    ],
)
def test_values_of_another_kind_are_not_the_same(neutral: object, value: object, accepted: bool) -> None:
    assert UnsupportedField(neutral=(neutral,)).accepts(value) is accepted


def test_names_that_nobody_knows_are_fit_for_a_header() -> None:
    assert ignored_names(["zeta", "alpha"]) == ("alpha", "zeta")
    assert ignored_names(["x" * 1000]) == ("x" * 64,)
    assert ignored_names(["a\r\nSet-Cookie: b", "ünï", ""]) == ("?", "?n?", "a??Set-Cookie:?b")
    assert ignored_names([f"f{index:02}" for index in reversed(range(40))]) == tuple(
        f"f{index:02}" for index in range(16)
    )
    assert ignored_names([]) == ()
