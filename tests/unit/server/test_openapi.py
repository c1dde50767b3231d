from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from app.server.openai_errors import ApiError
from app.server.openapi import document
from app.server.parsing import parse_body
from app.server.schemas import (
    AbortRequest,
    AttachStorageRequest,
    ChatCompletionRequest,
    ClearStorageRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    TokenizeRequest,
)

DOCUMENT = document("1.2.3")
VALID: dict[type[msgspec.Struct], dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    TokenizeRequest: {"prompt": "hi"},
    DetokenizeRequest: {"tokens": [1]},
    AbortRequest: {"rid": "r"},
    FlushRequest: {},
    AttachStorageRequest: {"hicache_storage_backend": "memory"},
    ClearStorageRequest: {},
}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def alternatives(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in field.get("anyOf", [field]):
        if part is field:
            yield field
        else:
            yield from alternatives(part)


def bounds_of(part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(a value at a limit, one just beyond it) for each limit of a schema."""
    step = 1 if part.get("type") == "integer" else 0.001
    if "minimum" in part:
        yield part["minimum"], part["minimum"] - step
    if "maximum" in part:
        yield part["maximum"], part["maximum"] + step
    if "exclusiveMinimum" in part:
        yield part["exclusiveMinimum"] + step, part["exclusiveMinimum"]
    if "maxLength" in part:
        yield "x" * part["maxLength"], "x" * (part["maxLength"] + 1)
    if part.get("minLength"):
        yield "x" * part["minLength"], ""
    if "maxItems" in part:
        item = 1 if part["items"]["type"] == "integer" else "x"
        yield [item] * part["maxItems"], [item] * (part["maxItems"] + 1)


BOUNDS = [
    (schema, name, good, bad)
    for schema in VALID
    for name, field in DOCUMENT["components"]["schemas"][schema.__name__]["properties"].items()
    for part in alternatives(field)
    for good, bad in bounds_of(part)
]


def parsed(schema: type[msgspec.Struct], **fields: Any) -> msgspec.Struct:
    return parse_body(json.dumps({**VALID[schema], **fields}).encode(), schema).request


def test_every_route_is_described() -> None:
    routes = {f"{method} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}

    assert routes == {
        "post /v1/completions",
        "post /v1/chat/completions",
        "get /v1/models",
        "get /v1/models/{model}",
        "post /tokenize",
        "post /detokenize",
        "get /health",
        "get /health_generate",
        "get /server_info",
        "post /flush_cache",
        "post /abort_request",
        "get /hicache/storage-backend",
        "put /hicache/storage-backend",
        "delete /hicache/storage-backend",
        "post /clear_hicache_storage_backend",
        "get /metrics",
        "get /cache_state",
        "get /",
        "get /openapi.json",
    }


def test_the_document_is_json_with_every_reference_in_it() -> None:
    copy = json.loads(json.dumps(DOCUMENT))

    assert copy == DOCUMENT
    assert copy["openapi"].startswith("3.1")
    assert copy["info"]["version"] == "1.2.3"
    found = set(references(copy))
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(copy["components"]["schemas"])
    assert len(found) > 10


def test_operations_have_names_of_their_own_and_answers() -> None:
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]

    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all("200" in operation["responses"] for operation in operations)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_generating_routes_stream_and_refuse(path: str) -> None:
    responses = DOCUMENT["paths"][path]["post"]["responses"]

    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "413", "415", "429", "503"} <= set(responses)
    errors = [
        response["content"]["application/json"]["schema"] for status, response in responses.items() if status != "200"
    ]
    assert all(schema == {"$ref": "#/components/schemas/ErrorReply"} for schema in errors)


def test_a_key_is_a_bearer_token_and_not_needed_for_health() -> None:
    assert DOCUMENT["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert DOCUMENT["paths"]["/health"]["get"]["security"] == []
    assert "security" not in DOCUMENT["paths"]["/v1/completions"]["post"]


@pytest.mark.parametrize(
    ("schema", "name", "good", "bad"), BOUNDS, ids=[f"{schema.__name__}-{name}" for schema, name, _, _ in BOUNDS]
)
def test_the_checks_follow_every_limit_of_the_document(
    schema: type[msgspec.Struct], name: str, good: Any, bad: Any
) -> None:
    assert parsed(schema, **{name: good})
    with pytest.raises(ApiError) as caught:
        parsed(schema, **{name: bad})
    assert caught.value.param == name


def test_the_document_has_limits_to_follow() -> None:
    assert {name for schema, name, _, _ in BOUNDS if schema is ChatCompletionRequest} >= {
        "temperature", "top_p", "n", "seed", "max_tokens", "max_completion_tokens", "top_logprobs", "stop", "priority",
    }  # fmt: skip


@pytest.mark.parametrize("schema", VALID)
def test_null_is_described_where_it_is_taken(schema: type[msgspec.Struct]) -> None:
    described = DOCUMENT["components"]["schemas"][schema.__name__]
    required = set(described.get("required", []))

    for name, field in described["properties"].items():
        assert ({"type": "null"} in field.get("anyOf", [])) is (name not in required)
    optional = {name: None for name in described["properties"] if name not in {*required, *VALID[schema]}}
    assert parsed(schema, **optional) == parsed(schema)


@pytest.mark.parametrize("schema", VALID)
def test_what_is_described_as_required_is(schema: type[msgspec.Struct]) -> None:
    required = DOCUMENT["components"]["schemas"][schema.__name__].get("required", [])

    for name in required:
        with pytest.raises(ApiError) as caught:
            parsed(schema, **{name: None})
        assert caught.value.param == name
    assert set(required) <= set(VALID[schema])
