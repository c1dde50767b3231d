"""The OpenAPI 3.1 document of the server's routes. Its schemas, with every limit, are those that the checks use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.server.openai_errors import ErrorReply
from app.server.rendering.bodies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ModelCard,
    ModelList,
    TokenizeReply,
)
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

_REQUESTS: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
    FlushRequest,
    AttachStorageRequest,
    ClearStorageRequest,
)
_REPLIES: tuple[type[msgspec.Struct], ...] = (
    CompletionReply,
    ChatReply,
    ChatChunk,
    ModelCard,
    ModelList,
    TokenizeReply,
    DetokenizeReply,
    ErrorReply,
)
_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is not allowed; the message names the field, its value and what is.",
    401: "The API key is missing or wrong.",
    403: "This caller may not do that.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    409: "Not as things stand: requests read cached pages, or the storage is not there, or another one is.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too many requests are waiting.",
    503: "Not served now: shutting down, waited too long, no room in the KV pool, or the device failed.",
}
_GUARDED = (401, 403)
_WITH_BODY = (400, *_GUARDED, 408, 413, 415)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route, as the document has it.

    request: schema of the JSON body, None for none. body_required: False where no body counts as {}.
    content: media type -> schema of the answer. errors: statuses.
    needs_key: whether a server with an API key asks for it.
    """

    method: str
    path: str
    summary: str
    content: dict[str, dict[str, Any]]
    request: type[msgspec.Struct] | None = None
    body_required: bool = True
    errors: Sequence[int] = ()
    needs_key: bool = True

    def described(self) -> dict[str, Any]:
        answer = {
            "description": "Done.",
            "content": {media: {"schema": schema} for media, schema in self.content.items()},
        }
        operation: dict[str, Any] = {
            "summary": self.summary,
            "operationId": self.method + "".join(c if c.isalnum() else "_" for c in self.path),
            "responses": {"200": answer, **{str(status): _error(status) for status in sorted(self.errors)}},
        }
        if self.request is not None:
            body = {"application/json": {"schema": _ref(self.request)}}
            operation["requestBody"] = {"required": self.body_required, "content": body}
        if "{model}" in self.path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if not self.needs_key:
            operation["security"] = []
        return operation


def document(version: str) -> dict[str, Any]:
    """The document as JSON-able values. version: of the server. A few milliseconds: make it once."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in _operations():
        paths.setdefault(operation.path, {})[operation.method] = operation.described()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tpukv",
            "version": version,
            "description": "OpenAI's completions and chat completions, and the server's own routes. An optional field "
            "that is null counts as left out. Fields that nobody defines are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        # A server that was started without a key takes requests without one.
        "security": [{"bearer": []}, {}],
    }


def _operations() -> list[Operation]:
    text = {"type": "string"}
    json_object = {"type": "object"}
    generating = (*_WITH_BODY, 404, 429, 503)
    return [
        Operation(
            method="post",
            path="/v1/completions",
            summary="Continue one or several prompts.",
            request=CompletionRequest,
            content={"application/json": _ref(CompletionReply), "text/event-stream": _stream(CompletionReply)},
            errors=generating,
        ),
        Operation(
            method="post",
            path="/v1/chat/completions",
            summary="Answer a conversation.",
            request=ChatCompletionRequest,
            content={"application/json": _ref(ChatReply), "text/event-stream": _stream(ChatChunk)},
            errors=generating,
        ),
        Operation(
            method="get",
            path="/v1/models",
            summary="The models that are served.",
            content={"application/json": _ref(ModelList)},
            errors=_GUARDED,
        ),
        Operation(
            method="get",
            path="/v1/models/{model}",
            summary="One model.",
            content={"application/json": _ref(ModelCard)},
            errors=(*_GUARDED, 404),
        ),
        Operation(
            method="post",
            path="/tokenize",
            summary="The token ids of a prompt or a conversation.",
            request=TokenizeRequest,
            content={"application/json": _ref(TokenizeReply)},
            errors=(*_WITH_BODY, 404),
        ),
        Operation(
            method="post",
            path="/detokenize",
            summary="The text of token ids.",
            request=DetokenizeRequest,
            content={"application/json": _ref(DetokenizeReply)},
            errors=(*_WITH_BODY, 404),
        ),
        Operation(
            method="get",
            path="/health",
            summary="Whether the server takes requests.",
            content={"application/json": json_object},
            errors=(503,),
            needs_key=False,
        ),
        Operation(
            method="get",
            path="/health_generate",
            summary="Whether the server answers: it computes one token.",
            content={"application/json": json_object},
            errors=(*_GUARDED, 503),
        ),
        Operation(
            method="get",
            path="/server_info",
            summary="Settings, model, cache and what was chosen.",
            content={"application/json": json_object},
            errors=_GUARDED,
        ),
        Operation(
            method="post",
            path="/flush_cache",
            summary="Forget every cached page.",
            request=FlushRequest,
            body_required=False,
            content={"application/json": json_object},
            errors=(*_WITH_BODY, 409, 503),
        ),
        Operation(
            method="post",
            path="/abort_request",
            summary="End one request, or all.",
            request=AbortRequest,
            content={"application/json": json_object},
            errors=(*_WITH_BODY, 503),
        ),
        Operation(
            method="get",
            path="/hicache/storage-backend",
            summary="The storage below the host tier, and what it was used for.",
            content={"application/json": json_object},
            errors=(*_GUARDED, 409),
        ),
        Operation(
            method="put",
            path="/hicache/storage-backend",
            summary="Attach a storage.",
            request=AttachStorageRequest,
            content={"application/json": json_object},
            errors=(*_WITH_BODY, 409, 503),
        ),
        Operation(
            method="delete",
            path="/hicache/storage-backend",
            summary="Detach the storage; its values stay.",
            content={"application/json": json_object},
            errors=(*_GUARDED, 409, 503),
        ),
        Operation(
            method="post",
            path="/clear_hicache_storage_backend",
            summary="Delete every value of the storage.",
            request=ClearStorageRequest,
            body_required=False,
            content={"application/json": json_object},
            errors=(*_WITH_BODY, 409, 503),
        ),
        Operation(
            method="get",
            path="/metrics",
            summary="Counters for Prometheus.",
            content={"text/plain": text},
            needs_key=False,
        ),
        Operation(
            method="get",
            path="/cache_state",
            summary="What the cache holds, and why recent requests did or did not hit.",
            content={"application/json": json_object},
            errors=(*_GUARDED, 503),
        ),
        Operation(
            method="get",
            path="/",
            summary="The page that shows the cache.",
            content={"text/html": text},
            needs_key=False,
        ),
        Operation(
            method="get",
            path="/openapi.json",
            summary="This document.",
            content={"application/json": json_object},
            needs_key=False,
        ),
    ]


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components((*_REQUESTS, *_REPLIES), ref_template=_REF)
    for request in _REQUESTS:
        _allow_null(schemas[request.__name__])
    return schemas


def _allow_null(schema: dict[str, Any]) -> None:
    """`parsing` takes null for every optional field of a body, which the structs cannot say."""
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name not in required and {"type": "null"} not in field.get("anyOf", []):
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default}


def _ref(schema: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=schema.__name__)}


def _stream(schema: type[msgspec.Struct]) -> dict[str, Any]:
    name = schema.__name__
    return {"type": "string", "description": f"Events `data: {name}`, with a {name} as JSON; then `data: [DONE]`."}


def _error(status: int) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": _ref(ErrorReply)}}}
