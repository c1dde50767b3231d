"""Server-sent events, as OpenAI's streams use them: `data:` and one line of JSON."""

from __future__ import annotations

import msgspec

from app.server.openai_errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(body: msgspec.Struct) -> bytes:
    """JSON holds no line ends of its own, so one line is the whole event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"
