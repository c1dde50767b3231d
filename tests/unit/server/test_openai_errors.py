from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from app.errors import RequestError
from app.scheduling.limits import SchedulerLimits
from app.scheduling.request import Request
from app.server import openai_errors as errors
from app.server.openai_errors import CHAT_FIELDS, ApiError

LIMITS = SchedulerLimits(max_running_requests=1, context_length=8, chunk_tokens=8, vocab_size=100)


def test_the_body_is_that_of_openais_api() -> None:
    error = ApiError(status=400, message="no ü", type="invalid_request_error", param="top_p", code="c")

    assert json.loads(error.body()) == {
        "error": {"message": "no ü", "type": "invalid_request_error", "param": "top_p", "code": "c"}
    }
    assert str(error) == "no ü"


def test_what_an_error_does_not_have_is_null() -> None:
    body = json.loads(errors.invalid_request("no").body())

    assert body["error"]["param"] is None
    assert body["error"]["code"] is None


def test_an_error_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(errors.queue_full(3, 2)))

    assert (copy.status, copy.code, copy.message) == (429, "queue_full", errors.queue_full(3, 2).message)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "words"),
    [
        (errors.unauthorized(), 401, "invalid_request_error", "invalid_api_key", "Bearer"),
        (errors.forbidden("not from there"), 403, "invalid_request_error", "forbidden", "not from there"),
        (errors.unknown_route("/v2"), 404, "invalid_request_error", "unknown_url", "/v2"),
        (errors.method_not_allowed("PUT", "/x", ["POST", "GET"]), 405, "invalid_request_error", None, "GET or POST"),
        (errors.request_timeout(2.5), 408, "invalid_request_error", "request_timeout", "2.5 seconds"),
        (errors.conflict("busy"), 409, "invalid_request_error", "conflict", "busy"),
        (errors.body_too_large(1024), 413, "invalid_request_error", "request_too_large", "1024 bytes"),
        (errors.unsupported_media_type("text/x"), 415, "invalid_request_error", None, "application/json"),
        (errors.queue_full(9, 8), 429, "rate_limit_error", "queue_full", "9 requests are waiting and at most 8"),
        (errors.shutting_down(), 503, "server_error", "shutting_down", "shutting down"),
        (errors.queue_timeout(30), 503, "server_error", "queue_timeout", "30 seconds"),
        (errors.out_of_capacity("4 pages"), 503, "server_error", "capacity", "4 pages"),
        (errors.device_failure(), 503, "server_error", "device_failure", "device"),
        (errors.engine_failed(), 503, "server_error", "engine_failed", "the engine has failed"),
        (errors.internal_error(), 500, "server_error", "internal_error", "not the request's fault"),
    ],
)
def test_each_kind_has_its_status_and_code(
    error: ApiError, status: int, kind: str, code: str | None, words: str
) -> None:
    assert error.status == status
    assert error.type == kind
    assert code is None or error.code == code
    assert words in error.message


def test_an_unknown_model_names_both_models() -> None:
    error = errors.unknown_model("gpt", "smol")

    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "'gpt'" in error.message
    assert "'smol'" in error.message


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, ["x" * 10**4] * 10**4, {f"k{i}": [i] * 99 for i in range(10**4)}, [[[[[["deep"]]]]]] * 50, 10**4000],
    ids=["text", "list", "object", "nested", "number"],
)
def test_a_message_stays_short_whatever_the_value(value: object) -> None:
    error = errors.not_allowed("field", value, "small")

    assert error.message.startswith("field=")
    assert error.message.endswith(" is not allowed: small")
    assert len(error.message) < 200


def test_a_message_holds_no_control_characters() -> None:
    assert "\n" not in errors.unknown_model("a\r\nSet-Cookie: x", "m").message


def test_the_engines_field_names_become_the_clients() -> None:
    error = RequestError(field="prompt_token_ids", value=-1, allowed="0 or more")

    assert errors.from_request_error(error).param == "prompt"
    assert errors.from_request_error(error).message == "prompt=-1 is not allowed: 0 or more"
    assert errors.from_request_error(error, CHAT_FIELDS).param == "messages"


def test_log_probabilities_of_a_chat_are_top_logprobs() -> None:
    error = RequestError(field="logprobs", value=21, allowed="0 to 20")

    assert errors.from_request_error(error).param == "logprobs"
    assert errors.from_request_error(error, CHAT_FIELDS).param == "top_logprobs"


@pytest.mark.parametrize(
    ("tokens", "pool_tokens", "code"),
    [
        ([1] * 8, 100, "context_length_exceeded"),
        ([1] * 7, 7, "context_length_exceeded"),
        ([], 100, None),
        ([100], 100, None),
    ],
    ids=["context", "pool", "empty", "vocabulary"],
)
def test_only_a_prompt_that_is_too_long_has_the_code_for_that(
    tokens: list[int], pool_tokens: int, code: str | None
) -> None:
    request = Request(request_id="r", prompt_token_ids=np.array(tokens, np.int32))

    with pytest.raises(RequestError) as caught:
        LIMITS.check(request, pool_tokens=pool_tokens)
    error = errors.from_request_error(caught.value)

    assert (error.status, error.param, error.code) == (400, "prompt", code)
