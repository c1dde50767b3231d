"""What goes wrong reaches OpenAI's client as the exception that its users catch, with the field and the code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.asking import Asker
from tests.support.engine import CONTEXT_LENGTH
from tests.support.paced_model import HeldRunner, model_runner
from tests.support.server import MODEL, RunningServer, running_server

CLIENT_KEY, ADMIN_KEY = "client-key", "admin-key"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(http={"api_key": CLIENT_KEY, "admin_api_key": ADMIN_KEY}) as running:
        yield running


def client_of(server: RunningServer, key: str = CLIENT_KEY, path: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}{path}", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


LONG = "x" * CONTEXT_LENGTH
REFUSED: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"temperature": -1}, "temperature", None),
    ({"top_p": 0}, "top_p", None),
    ({"n": 0}, "n", None),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": [1, 2, 257]}, "prompt", None),
    ({"prompt": [[1], []]}, "prompt", None),
    ({"logit_bias": {"257": 1}}, "logit_bias", None),
    ({"logit_bias": {"97": 101}}, "logit_bias", None),
    ({"stop": [""]}, "stop[0]", None),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"logprobs": 21}, "logprobs", None),
    ({"echo": True}, "echo", None),
    ({"best_of": 2}, "best_of", None),
    ({"suffix": "end"}, "suffix", None),
    ({"extra_body": {"min_tokens": 9, "max_tokens": 5}}, "min_tokens", None),
    ({"extra_body": {"top_k": -2}}, "top_k", None),
    ({"extra_body": {"guided_json": {}}}, "guided_json", None),
    ({"extra_body": {"cache_salt": "s" * 1025}}, "cache_salt", None),
    ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options", None),
    ({"prompt": LONG}, "prompt", "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": CONTEXT_LENGTH}, "max_tokens", "context_length_exceeded"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=str)
def test_a_bad_field_of_a_completion_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    """Before a stream begins, too: nothing of these is found out later."""
    if stream and param == "stream_options":
        fields = {"extra_body": {"stream_options": {"include_usage": "often"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": MODEL, "prompt": "x", "stream": stream, **fields})

    error = refused.value
    assert (error.type, error.code) == ("invalid_request_error", code)
    assert error.param is not None
    assert error.param.partition(".")[0] == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": CONTEXT_LENGTH}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": CONTEXT_LENGTH}, "max_completion_tokens", "context_length_exceeded"),
        ({"top_logprobs": 3}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", None),
        ({"response_format": {"type": "json_object"}}, "response_format", None),
        ({"extra_body": {"prompt": "x"}}, "prompt", None),
    ],
    ids=str,
)
def test_a_bad_field_of_a_conversation_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str | None
) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": messages, **fields})

    assert (refused.value.param, refused.value.code) == (param, code)
    assert param in refused.value.message


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-4", prompt="x")

    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


def test_a_wrong_key_is_an_authentication_error_that_does_not_repeat_it(server: RunningServer) -> None:
    with client_of(server, key="guessed-key") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()

    assert refused.value.code == "invalid_api_key"
    assert "guessed-key" not in str(refused.value)


def test_the_clients_key_may_not_flush_and_the_admins_may(server: RunningServer) -> None:
    with client_of(server, path="") as client, client_of(server, key=ADMIN_KEY, path="") as admin:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            client.post("/flush_cache", cast_to=object)
        flushed = admin.post("/flush_cache", cast_to=object)

    assert refused.value.code == "forbidden"
    assert flushed.keys() == {"flushed_pages"}


def test_a_full_queue_is_a_rate_limit_error_and_the_client_comes_back_by_itself() -> None:
    # given: one request runs, and none may wait
    model = HeldRunner()
    http = {"max_queued_requests": 0}
    with running_server(http=http, max_running_requests=1, overrides=model_runner(model)) as server:
        model.hold()
        with client_of(server) as client, Asker(server.url) as asker:
            stream = client.completions.create(model=MODEL, prompt="first", stream=True, max_tokens=1)
            model.wait_until_stuck()

            # when
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model=MODEL, prompt="second", max_tokens=1)

            # then
            assert refused.value.code == "queue_full"
            assert int(refused.value.response.headers["retry-after"]) > 0
            model.release()
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
            asker.wait_until_idle()
            patient = client.with_options(max_retries=2)
            assert patient.completions.create(model=MODEL, prompt="second", max_tokens=1).usage.completion_tokens == 1


def test_a_stream_that_waited_too_long_fails_with_a_code() -> None:
    """Its status is out already."""
    model = HeldRunner()
    http = {"queue_timeout": 0.5}
    with running_server(http=http, max_running_requests=1, overrides=model_runner(model)) as server:
        model.hold()
        with client_of(server) as client:
            first = client.completions.create(model=MODEL, prompt="first", stream=True, max_tokens=3)
            model.wait_until_stuck()
            second = client.completions.create(model=MODEL, prompt="second", stream=True, max_tokens=3)
            time.sleep(0.6)  # it counts from its arrival
            model.release()

            with pytest.raises(openai.APIError) as refused:
                list(second)
            assert [chunk.choices[0].finish_reason for chunk in first][-1] == "length"
    assert refused.value.code == "queue_timeout"
