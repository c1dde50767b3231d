"""What a field of a request body may be, in words, read off its declared type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


def allowed_at(schema: type, path: str) -> str:
    """What may stand at `path` of `schema`, such as "messages[0].role": "one of 'system', 'user'"."""
    found = inspect.type_info(schema)
    for name, _index in _STEP.findall("." + path):
        found = _field(found, name) if name else _item(found)
    return in_words(found)


def value_at(body: Any, path: str) -> Any:
    """The value at `path` of a decoded body that has one there."""
    for name, index in _STEP.findall("." + path):
        body = body[name] if name else body[int(index)]
    return body


def in_words(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner, extra=extra):
            return (extra or {}).get("allowed") or in_words(inner)
        case inspect.IntType():
            return "a whole number" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.StrType():
            return "text" + _length(info, "character")
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return ("one of " if len(values) > 1 else "") + ", ".join(map(repr, values))
        case inspect.ListType(item_type=item):
            return f"a list{_length(info, 'entry') or ' of entries'}, each {in_words(item)}"
        case inspect.DictType(value_type=value):
            return f"an object whose values are each {in_words(value)}"
        case inspect.UnionType(types=types):
            # null counts as left out, so it needs no mention
            return " or ".join(in_words(part) for part in types if not isinstance(part, inspect.NoneType))
        case inspect.StructType(cls=cls):
            return "an object with " + ", ".join(field.encode_name for field in inspect.type_info(cls).fields)  # type: ignore[attr-defined]
    raise TypeError(f"no words for {info}")


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    if info.gt is not None:
        return f" above {_number(info.gt)}" + ("" if info.le is None else f" and at most {_number(info.le)}")
    if info.le is not None and info.ge is not None:
        return f" from {_number(info.ge)} to {_number(info.le)}"
    return "" if info.ge is None else f" of {_number(info.ge)} or more"


def _number(value: float) -> str:
    return str(int(value)) if int(value) == value else str(value)


def _length(info: inspect.StrType | inspect.ListType, unit: str) -> str:
    plural = {"entry": "entries"}.get(unit, unit + "s")
    if info.max_length is not None:
        return f" of at most {info.max_length} {plural}"
    return f" of at least {info.min_length} {unit if info.min_length == 1 else plural}" if info.min_length else ""


def _alternatives(info: inspect.Type) -> Iterable[inspect.Type]:
    match info:
        case inspect.Metadata(type=inner):
            yield from _alternatives(inner)
        case inspect.UnionType(types=types):
            for part in types:
                yield from _alternatives(part)
        case _:
            yield info


def _field(info: inspect.Type, name: str) -> inspect.Type:
    for part in _alternatives(info):
        if isinstance(part, inspect.StructType):
            return next(field.type for field in part.fields if field.encode_name == name)
    raise LookupError(f"{info} has no field {name}")


def _item(info: inspect.Type) -> inspect.Type:
    for part in _alternatives(info):
        if isinstance(part, inspect.ListType):
            return part.item_type
    raise LookupError(f"{info} has no entries")
