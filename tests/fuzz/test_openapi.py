"""Requests made from the server's OpenAPI document, good ones and broken ones: each reply is as the document says.

TPUKV_FUZZ_EXAMPLES is how many requests each route gets beside those that cover its schema: 10 in CI, more by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case, Response
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks as openapi_checks

from app.server.openapi import document
from tests.support.fuzz_bodies import servable
from tests.support.server import RunningServer, running_server
from tests.support.soak_requests import events_of

pytestmark = pytest.mark.fuzz

EXAMPLES = int(os.environ.get("TPUKV_FUZZ_EXAMPLES", "10"))
TIMEOUT_S = 60  # of one request: a hang
ERROR_FIELDS = {"message", "type", "param", "code"}
BUSY_CODES = {"queue_timeout", "capacity", "device_failure", "shutting_down"}
EVENTS = {"/v1/completions": "CompletionReply", "/v1/chat/completions": "ChatChunk"}  # the document says it in words
CONFIG = SchemathesisConfig.from_dict(
    {
        "seed": 0,
        "generation": {"max-examples": EXAMPLES},
        "request-timeout": TIMEOUT_S,
        "max-stream-events": 100_000,
    }
)

schema = schemathesis.openapi.from_dict(document(version("tpukv")), config=CONFIG)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Small, so that requests of many choices also wait, are refused, and find the cache full."""
    limits = {"max_queued_requests": 16}
    with running_server(page_size=4, max_total_tokens=192, check_invariants=False, http=limits) as running:
        yield running


def only_busy(ctx: Any, response: Response, case: Case) -> None:
    """Of the 5xx, 503 alone, for a reason that passes, and in OpenAI's form."""
    if response.status_code >= 400 and case.operation.label != "GET /":
        error = response.json()["error"]
        assert error.keys() == ERROR_FIELDS
        assert error["message"]
        assert error["type"]
    if response.status_code >= 500:
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] in BUSY_CODES, response.text


def described(ctx: Any, response: Response, case: Case) -> None:
    """The body follows its schema; of a stream, each event does."""
    if response.headers["content-type"][0].startswith("text/event-stream"):
        components = schema.raw_schema["components"]
        name = EVENTS[case.operation.path]
        follows = jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": components})
        for event in events_of(response.content):
            follows.validate(event)
    else:
        openapi_checks.response_schema_conformance(ctx, response, case)


CHECKS = [
    only_busy,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    described,
    openapi_checks.negative_data_rejection,
    openapi_checks.unsupported_method,
    openapi_checks.allow_header_conformance,
]


def test_the_document_is_valid_and_is_what_the_server_shows(server: RunningServer) -> None:
    schema.validate()

    assert httpx.get(f"{server.url}/openapi.json").json() == schema.raw_schema


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_every_reply_is_one_that_the_document_describes(case: Case, server: RunningServer) -> None:
    check(case, server)
    if "model" in _fields(case) and case.meta.generation.mode.is_positive:
        case.body = servable(case.body)
        check(case, server)


def check(case: Case, server: RunningServer) -> None:
    response = case.call(base_url=server.url, timeout=TIMEOUT_S)
    case.validate_response(response, checks=CHECKS)


def _fields(case: Case) -> dict[str, Any]:
    return case.body if isinstance(case.body, dict) else {}
