"""Bodies made from a schema alone are mostly refused for what a schema cannot say. This makes them servable."""

from __future__ import annotations

import re
from typing import Any

from app.server.schemas import MAX_INT
from tests.support.engine import VOCAB_SIZE
from tests.support.server import MODEL

_MOST_TOKENS = 8  # so that the other rules of a request matter more than its length


def servable(body: dict[str, Any]) -> dict[str, Any]:
    """The same body with numbers and texts that fit a small server together. What breaks its schema stays as it is."""
    body = {name: _as_python_reads_it(value) for name, value in body.items()}
    fitting = {**body, "model": MODEL}
    for name in ("max_tokens", "max_completion_tokens"):
        if _is_count(body.get(name)):
            fitting[name] = 4 + body[name] % _MOST_TOKENS
    if body.get("max_tokens") is body.get("max_completion_tokens") is None:
        fitting["max_tokens"] = _MOST_TOKENS
    if _is_count(body.get("min_tokens")):
        fitting["min_tokens"] = body["min_tokens"] % 4
    if _is_count(body.get("n"), 128):
        fitting["n"] = max(1, body["n"] % 4) if body["n"] else 0
    if isinstance(body.get("prompt"), str):
        fitting["prompt"] = body["prompt"][:_MOST_TOKENS] or "x"
    if _is_row(body.get("prompt")):
        fitting["prompt"] = [token % VOCAB_SIZE for token in body["prompt"][:_MOST_TOKENS]]
    if isinstance(body.get("stream_options"), dict) and isinstance(body.get("stream", False), bool):
        fitting["stream"] = True
    if _is_count(body.get("top_logprobs"), 20) and isinstance(body.get("logprobs", False), bool):
        fitting["logprobs"] = True
    bias = body.get("logit_bias")
    if isinstance(bias, dict) and all(re.fullmatch("0|[1-9][0-9]{0,9}", name) for name in bias):
        fitting["logit_bias"] = {str(int(name) % VOCAB_SIZE): value for name, value in bias.items()}
    return fitting


def _as_python_reads_it(value: object) -> object:
    """1.0 is a whole number to JSON Schema, and not to the server."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_count(value: object, most: int = MAX_INT) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_row(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))
