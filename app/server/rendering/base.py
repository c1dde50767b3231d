"""Replies in the form of OpenAI's API, whole or as a stream of events."""

from __future__ import annotations

from typing import Protocol

from app.server.openai_errors import ApiError
from app.server.parts import Part, Usage


class Renderer(Protocol):
    """The reply to one HTTP request. Keeps where each choice stands, so a renderer serves one request only.

    Everything returned is ready to be sent: a JSON body, or whole server-sent events (b"" for none).
    """

    def response(self, parts: list[Part], usage: Usage) -> bytes:
        """The body of a reply that is not streamed: `parts` has one finished part for each choice."""
        ...

    def opening(self, num_choices: int) -> bytes:
        """What a stream begins with, before any part."""
        ...

    def chunk(self, part: Part) -> bytes:
        """What one choice gained; parts of a choice come in order."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event about the tokens of the whole reply, for clients that asked for it; after every part."""
        ...

    def error(self, error: ApiError) -> bytes:
        """An error in the midst of a stream, whose status is out already."""
        ...
