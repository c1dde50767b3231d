"""What a server that speaks the OpenAI API sends, as far as the benchmark reads it. Other fields are left alone."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """`text` in a stream of completions, `delta` in one of a chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class ErrorText(msgspec.Struct, frozen=True):
    message: str = ""


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorText | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorText


class ModelEntry(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]


class ServerInfo(msgspec.Struct, frozen=True):
    """What /server_info says that the benchmark uses; the whole of it is saved with the result."""

    page_size: int | None = None
    cache_type: str | None = None
    max_model_len: int | None = None
    context_length: int | None = None


class Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int]


def error_text(body: bytes) -> str:
    """What a refusal says, or the beginning of its body if it has another form."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error.message or "no message"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace") or "no message"


def as_object(body: bytes) -> dict[str, Any]:
    """Raises msgspec.DecodeError for anything but a JSON object."""
    return msgspec.json.decode(body, type=dict[str, Any])
