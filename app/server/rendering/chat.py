"""Replies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET

from app.server.openai_errors import ApiError
from app.server.parts import Part, Usage
from app.server.rendering.bodies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    Delta,
    ReplyMessage,
    TokenLogprob,
    TopLogprob,
    UsageBody,
    usage_body,
)
from app.server.rendering.events import error_event, event
from app.server.rendering.tokens import chat_token, finite


class ChatRenderer:
    """`Renderer` of chat completions."""

    def __init__(
        self, *, request_id: str, model: str, created: int, include_usage: bool, token_bytes: Callable[[int], bytes]
    ) -> None:
        """request_id: "chatcmpl-...". created: seconds since 1970. token_bytes: the exact bytes of a token id.

        include_usage: whether the client asked for the last event of a stream to be about tokens.
        """
        self._request_id = request_id
        self._model = model
        self._created = created
        self._usage = None if include_usage else UNSET
        self._token_bytes = token_bytes

    def response(self, parts: list[Part], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                index=part.index,
                message=ReplyMessage(content=part.text),
                logprobs=self._logprobs(part),
                finish_reason=part.finish_reason,
            )
            for part in sorted(parts, key=lambda part: part.index)
        ]
        reply = ChatReply(
            id=self._request_id, created=self._created, model=self._model, choices=choices, usage=usage_body(usage)
        )
        return msgspec.json.encode(reply)

    def opening(self, num_choices: int) -> bytes:
        return b"".join(
            self._event(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            for index in range(num_choices)
        )

    def chunk(self, part: Part) -> bytes:
        """The end of a choice is an event of its own, behind the one with its last text."""
        events = b""
        ended = part.finish_reason is not None
        # The last token often has no text; it gets an event only where its log-probability must be told.
        if part.text or part.logprobs or (part.token_ids and not ended):
            gained = Delta(content=part.text)
            events += self._event(ChatChunkChoice(index=part.index, delta=gained, logprobs=self._logprobs(part)))
        if ended:
            events += self._event(ChatChunkChoice(index=part.index, delta=Delta(), finish_reason=part.finish_reason))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(self._chunk([], usage_body(usage)))

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return event(self._chunk([choice], self._usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self._request_id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        likeliest = part.top_logprobs or [[] for _ in part.token_ids]
        content = []
        for token_id, logprob, top in zip(part.token_ids, part.logprobs, likeliest, strict=True):
            data = self._token_bytes(token_id)
            content.append(
                TokenLogprob(
                    token=chat_token(data),
                    logprob=finite(logprob),
                    bytes=list(data),
                    top_logprobs=[self._top(other, value) for other, value in top],
                )
            )
        return ChatLogprobs(content=content)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._token_bytes(token_id)
        return TopLogprob(token=chat_token(data), logprob=finite(logprob), bytes=list(data))
