from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.server.openai_errors import ApiError
from app.server.parsing import parse_body
from app.server.schemas import AbortRequest, DetokenizeRequest, FlushRequest, TokenizeRequest

HELLO = {"role": "user", "content": "hi"}


def refusal(schema: type[msgspec.Struct], body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(body).encode(), schema)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None, "messages": None}, "prompt"),
        ({"prompt": "a", "messages": [HELLO]}, "messages"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_tokenize_needs_a_prompt_or_messages(body: dict[str, Any], param: str) -> None:
    assert refusal(TokenizeRequest, body).param == param


def test_tokenize_takes_either() -> None:
    prompt = parse_body(b'{"prompt": "", "model": "m", "add_special_tokens": false}', TokenizeRequest).request
    messages = parse_body(json.dumps({"messages": [HELLO]}).encode(), TokenizeRequest).request

    assert (prompt.prompt, prompt.messages) == ("", None)
    assert messages.prompt is None
    assert [message.for_template() for message in messages.messages or []] == [HELLO]


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (DetokenizeRequest, {}, "tokens"),
        (DetokenizeRequest, {"tokens": "a"}, "tokens"),
        (DetokenizeRequest, {"tokens": [1, -1]}, "tokens[1]"),
        (DetokenizeRequest, {"tokens": [2**31]}, "tokens[0]"),
        (AbortRequest, {}, "rid"),
        (AbortRequest, {"rid": "", "abort_all": False}, "rid"),
        (AbortRequest, {"rid": 5}, "rid"),
        (AbortRequest, {"abort_all": "yes"}, "abort_all"),
        (FlushRequest, {"timeout": -1}, "timeout"),
        (FlushRequest, {"timeout": "1"}, "timeout"),
        (FlushRequest, {"timeout": 1e30}, "timeout"),
    ],
)
def test_the_other_routes_name_the_field_too(schema: type[msgspec.Struct], body: Any, param: str) -> None:
    assert refusal(schema, body).param == param


def test_the_other_routes_take_what_they_say() -> None:
    assert parse_body(b'{"tokens": []}', DetokenizeRequest).request.tokens == []
    assert parse_body(b'{"rid": "cmpl-1"}', AbortRequest).request == AbortRequest(rid="cmpl-1")
    assert parse_body(b'{"abort_all": true}', AbortRequest).request.abort_all
    assert parse_body(b"{}", FlushRequest).request.timeout == 0.0
    assert parse_body(b'{"timeout": 2}', FlushRequest).request.timeout == 2.0
