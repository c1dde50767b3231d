"""Errors as an OpenAI client reads them: an HTTP status and a body with message, type, param and code."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import msgspec

from app.errors import AppError, RequestError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

# The engine's field names -> those that the client wrote, by route.
COMPLETION_FIELDS: Mapping[str, str] = MappingProxyType({"prompt_token_ids": "prompt"})
CHAT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"prompt_token_ids": "messages", "prompt": "messages", "logprobs": "top_logprobs"}
)


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class ApiError(AppError):
    """A request that gets an error reply. `status` is the HTTP status; `param` the field at fault, if there is one."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None

    def __init__(self, *, status: int, message: str, type: str, param: str | None = None, code: str | None = None):
        super().__init__(status=status, message=message, type=type, param=param, code=code)

    def describe(self, **fields: Any) -> str:
        return str(fields["message"])

    def body(self) -> bytes:
        """The JSON body of the reply."""
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorReply(error=detail))


def shown(value: object) -> str:
    """`value` as messages show it: at most about a hundred characters, whatever its size."""
    writer = _ShortRepr()
    writer.maxstring, writer.maxother, writer.maxlong = 64, 64, 40
    writer.maxlist, writer.maxdict, writer.maxlevel = 4, 2, 3
    text = writer.repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


class _ShortRepr(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # The library would sort all keys first, of which a client may send a million.
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


def invalid_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400 in words of the caller's; `not_allowed` is for a single field."""
    return ApiError(status=400, message=message, type=INVALID_REQUEST, param=param, code=code)


def not_allowed(field: str, value: object, allowed: str, *, code: str | None = None) -> ApiError:
    """400 for one field: its name, its value (shortened) and what it may be."""
    return invalid_request(f"{field}={shown(value)} is not allowed: {allowed}", param=field, code=code)


def from_request_error(error: RequestError, fields: Mapping[str, str] = COMPLETION_FIELDS) -> ApiError:
    """400 for what the engine refused, under the client's own field name.

    fields: COMPLETION_FIELDS or CHAT_FIELDS, by the route.
    """
    name, value, allowed = str(error.field), error.value, str(error.allowed)
    code = CONTEXT_LENGTH_EXCEEDED if _is_too_long(name, value) else None
    return not_allowed(fields.get(name, name), value, allowed, code=code)


def unauthorized(message: str = "send the server's API key as: Authorization: Bearer KEY") -> ApiError:
    """401. The key that was sent is not repeated: replies are logged by proxies."""
    return ApiError(status=401, message=message, type=INVALID_REQUEST, code="invalid_api_key")


def forbidden(message: str) -> ApiError:
    return ApiError(status=403, message=message, type=INVALID_REQUEST, code="forbidden")


def unknown_route(path: str) -> ApiError:
    message = f"there is no route {shown(path)} here; GET /openapi.json lists the routes"
    return ApiError(status=404, message=message, type=INVALID_REQUEST, code="unknown_url")


def unknown_model(model: str, served: str) -> ApiError:
    message = f"model={shown(model)} is not served here: the model is {shown(served)}"
    return ApiError(status=404, message=message, type=INVALID_REQUEST, param="model", code="model_not_found")


def method_not_allowed(method: str, path: str, allowed: Iterable[str]) -> ApiError:
    message = f"method={shown(method)} is not allowed on {shown(path)}: use {' or '.join(sorted(allowed))}"
    return ApiError(status=405, message=message, type=INVALID_REQUEST, code="method_not_allowed")


def request_timeout(seconds: float) -> ApiError:
    """408: the client did not finish sending."""
    message = f"the request body did not arrive within {seconds:g} seconds"
    return ApiError(status=408, message=message, type=INVALID_REQUEST, code="request_timeout")


def conflict(message: str) -> ApiError:
    return ApiError(status=409, message=message, type=INVALID_REQUEST, code="conflict")


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"the request body is larger than the {limit_bytes} bytes that this server takes"
    return ApiError(status=413, message=message, type=INVALID_REQUEST, code="request_too_large")


def unsupported_media_type(content_type: str) -> ApiError:
    message = f"content-type={shown(content_type)} is not allowed: application/json"
    return ApiError(status=415, message=message, type=INVALID_REQUEST, code="unsupported_media_type")


def queue_full(waiting: int, limit: int) -> ApiError:
    """429: as many requests wait as may."""
    message = f"{waiting} requests are waiting and at most {limit} may: try again later"
    return ApiError(status=429, message=message, type="rate_limit_error", code="queue_full")


def starting() -> ApiError:
    return _unavailable("the server is starting: it compiles its programs and takes no requests yet", "starting")


def shutting_down() -> ApiError:
    return _unavailable("the server is shutting down and takes no new requests", "shutting_down")


def queue_timeout(seconds: float) -> ApiError:
    message = f"the request waited {seconds:g} seconds and was not started: try again later"
    return _unavailable(message, "queue_timeout")


def out_of_capacity(reason: str) -> ApiError:
    """503: the KV pool has no room for the request. `reason` is the engine's own text."""
    return _unavailable(f"the KV pool cannot hold the request: {reason}", "capacity")


def device_failure() -> ApiError:
    return _unavailable("the device failed while it computed this request: send it again", "device_failure")


def engine_failed() -> ApiError:
    """What everybody is told from then on: a bug of ours stopped the engine."""
    return _unavailable("the engine has failed and the server is shutting down; its log says why", "engine_failed")


def no_token(seconds: float) -> ApiError:
    """The engine was asked for a token, to see whether it works."""
    return _unavailable(f"no token was produced within {seconds:g} seconds", "no_token")


def internal_error() -> ApiError:
    """500. Says nothing about the inside; the log has it."""
    message = "the server made a mistake; this is not the request's fault, and the server's log says more"
    return ApiError(status=500, message=message, type=SERVER_ERROR, code="internal_error")


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(status=503, message=message, type=SERVER_ERROR, code=code)


def _is_too_long(field: str, value: object) -> bool:
    # The engine names a prompt by its length only when the length is at fault.
    return field == "prompt" and str(value).endswith(" tokens") and value != "0 tokens"
