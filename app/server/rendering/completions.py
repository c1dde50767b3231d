"""Replies of /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from app.server.openai_errors import ApiError
from app.server.parts import Part, Usage
from app.server.rendering.bodies import CompletionChoice, CompletionLogprobs, CompletionReply, UsageBody, usage_body
from app.server.rendering.events import error_event, event
from app.server.rendering.tokens import TextOffsets, completion_token, finite


class CompletionRenderer:
    """`Renderer` of text completions."""

    def __init__(
        self, *, request_id: str, model: str, created: int, include_usage: bool, token_bytes: Callable[[int], bytes]
    ) -> None:
        """request_id: "cmpl-...". created: seconds since 1970. token_bytes: the exact bytes of a token id.

        include_usage: whether the client asked for the last event of a stream to be about tokens.
        """
        self._request_id = request_id
        self._model = model
        self._created = created
        self._usage = None if include_usage else UNSET
        self._token_bytes = token_bytes
        self._offsets: dict[int, TextOffsets] = defaultdict(TextOffsets)  # by choice

    def response(self, parts: list[Part], usage: Usage) -> bytes:
        choices = [self._choice(part) for part in sorted(parts, key=lambda part: part.index)]
        return msgspec.json.encode(self._reply(choices, usage_body(usage)))

    def opening(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, part: Part) -> bytes:
        if not (part.text or part.token_ids or part.finish_reason):
            return b""
        return event(self._reply([self._choice(part)], self._usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(self._reply([], usage_body(usage)))

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _reply(self, choices: list[CompletionChoice], usage: UsageBody | msgspec.UnsetType | None) -> CompletionReply:
        return CompletionReply(
            id=self._request_id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _choice(self, part: Part) -> CompletionChoice:
        return CompletionChoice(
            index=part.index, text=part.text, logprobs=self._logprobs(part), finish_reason=part.finish_reason
        )

    def _logprobs(self, part: Part) -> CompletionLogprobs | None:
        if part.logprobs is None:
            return None
        spelt = [self._token_bytes(token_id) for token_id in part.token_ids]
        tokens = [completion_token(data) for data in spelt]
        logprobs = [finite(logprob) for logprob in part.logprobs]
        likeliest = part.top_logprobs or [[] for _ in tokens]
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=logprobs,
            top_logprobs=[
                self._named(top, token, logprob)
                for top, token, logprob in zip(likeliest, tokens, logprobs, strict=True)
            ],
            text_offset=self._offsets[part.index].push(spelt),
        )

    def _named(self, top: list[tuple[int, float]], token: str, logprob: float) -> dict[str, float]:
        """By token text, likeliest first, the chosen token always among them."""
        named: dict[str, float] = {}
        for token_id, value in top:
            # Of two tokens with the same text the likelier one is shown.
            named.setdefault(completion_token(self._token_bytes(token_id)), finite(value))
        named.setdefault(token, logprob)
        return named
