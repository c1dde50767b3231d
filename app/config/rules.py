"""What single settings accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple, get_args

MAX_PORT = 65535


class Rule(NamedTuple):
    """What one field accepts: a test, and the same in words."""

    field: str
    accepts: Callable[[object], bool]
    allowed: str


def text(field: str) -> Rule:
    """Text that the system takes for a name, which ends at a null character."""
    return Rule(field, lambda value: isinstance(value, str) and "\0" not in value, "text without null characters")


def text_or_none(field: str) -> Rule:
    return Rule(field, lambda value: value is None or isinstance(value, str), "text")


def switch(field: str) -> Rule:
    return Rule(field, lambda value: isinstance(value, bool), "True or False")


def one_of(field: str, literal: object) -> Rule:
    choices = get_args(literal)
    return Rule(field, lambda value: value in choices, f"one of {', '.join(choices)}")


def whole(field: str, low: int, high: int) -> Rule:
    # `type is int`: True counts as 1 for isinstance, and is a mistake here.
    return Rule(field, lambda value: type(value) is int and low <= value <= high, f"a whole number, {low} to {high}")


def share(field: str) -> Rule:
    def accepts(value: object) -> bool:
        return type(value) is float and 0 < value <= 1

    return Rule(field, accepts, "a number above 0, at most 1")


def whole_or_none(field: str, low: int, high: int) -> Rule:
    rule = whole(field, low, high)
    return rule._replace(accepts=lambda value: value is None or rule.accepts(value))


def fraction_or_none(field: str) -> Rule:
    # A whole number is no fraction, True least of all.
    return Rule(field, lambda value: value is None or (type(value) is float and 0 < value < 1), "between 0 and 1")


def address_or_none(field: str) -> Rule:
    allowed = f"HOST:PORT, with a port from 1 to {MAX_PORT - 1}"
    return Rule(field, lambda value: value is None or _is_address(value), allowed)


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 1 <= int(port) < MAX_PORT


def only_one(field: str) -> Rule:
    rule = whole(field, 1, 1)
    return rule._replace(allowed="1; more than one is not yet supported")


def number(field: str, high: float) -> Rule:
    def accepts(value: object) -> bool:
        return type(value) in (int, float) and 0 < value <= high  # type: ignore[operator]

    return Rule(field, accepts, f"a number above 0, at most {high:g}")


def number_or_none(field: str, high: float) -> Rule:
    rule = number(field, high)
    return rule._replace(accepts=lambda value: value is None or rule.accepts(value))


def json_texts(field: str) -> Rule:
    return Rule(field, _is_json_of_texts, 'a JSON object of texts, as {"region": "eu-west-1"}')


def _is_json_of_texts(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        read = json.loads(value or "{}")
    except ValueError:
        return False
    return isinstance(read, dict) and all(isinstance(each, str) for each in read.values())
