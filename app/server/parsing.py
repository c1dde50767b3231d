"""A request body from bytes to a checked struct. Whatever the bytes are, the outcome is one or an ApiError of 400."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from app.server.field_words import allowed_at, value_at
from app.server.known_fields import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_MESSAGE_FIELDS,
    ignored_names,
    refuse_unsupported,
)
from app.server.openai_errors import ApiError, invalid_request, not_allowed

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\].*)?`$")  # [...] is some value of an object
_MISSING = re.compile(r"missing required field `(\w+)`")
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[T]):
    """ignored: names of fields that nobody defines, fit for a header (`known_fields.ignored_names`)."""

    request: T
    ignored: tuple[str, ...]


def parse_body(raw: bytes, schema: type[T]) -> Parsed[T]:
    """Decode and check a JSON body against one of `schemas`.

    Fields that are null count as left out; of a field that is there twice the last counts. Raises ApiError (400)
    naming the field, its value and what is allowed. O(bytes); text is decoded once and not copied again.
    """
    given = {name: value for name, value in _decode(raw).items() if value is not None}
    others = {name: value for name, value in given.items() if name not in schema.__struct_fields__}
    refuse_unsupported(others, UNSUPPORTED_FIELDS)
    if "messages" in schema.__struct_fields__:
        _refuse_unsupported_in_messages(given.get("messages"))
    try:
        request = msgspec.convert(given, schema)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, schema) from error
    return Parsed(request=request, ignored=ignored_names(others.keys() - UNSUPPORTED_FIELDS.keys()))


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as error:
        raise invalid_request("the body is not allowed: its JSON is nested too deeply") from error
    except msgspec.DecodeError as error:
        fault = str(error).removeprefix("JSON is malformed: ").split(" - at ")[0]
        hint = "; is there half of a surrogate pair in a \\u escape?" if _HALF_CHARACTER.search(raw) else ""
        raise invalid_request(f"the body cannot be read as JSON: {fault}{hint}") from error
    if not isinstance(body, dict):
        raise invalid_request("the body must be a JSON object")
    return body


def _refuse_unsupported_in_messages(messages: object) -> None:
    """Of anything but a list of objects the schema says more."""
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                refuse_unsupported(message, UNSUPPORTED_MESSAGE_FIELDS, f"messages[{index}].")


def _refusal(fault: str, given: Mapping[str, Any], schema: type[msgspec.Struct]) -> ApiError:
    """msgspec names the place and the Python types; the client gets the place, its value and what may stand there."""
    place = _PATH.search(fault)
    path = place[1] if place else ""
    missing = _MISSING.search(fault)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid_request(f"{path} is missing: it must be {allowed_at(schema, path)}", param=path)
    return not_allowed(path, value_at(given, path), allowed_at(schema, path))
