"""Bodies as replies."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from app.server.openai_errors import ApiError


def json_response(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error as a reply; those that pass by themselves say when to come back."""
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error.body(), error.status, headers, media_type="application/json")
