"""Reply bodies, as the wire has them; GET /openapi.json describes them from here."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from app.server.parts import ClientFinishReason, Usage


class CachedTokens(Struct, frozen=True, kw_only=True):
    """Cached prompt tokens by the tier that had them."""

    device: int = 0
    host: int = 0
    storage: int = 0


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cached_tokens_details: CachedTokens | UnsetType = UNSET


class UsageBody(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_body(usage: Usage) -> UsageBody:
    by_source = usage.cached_by_source
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cached_tokens,
            cached_tokens_details=UNSET if by_source is None else CachedTokens(**by_source),
        ),
    )


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """One entry a token. text_offset: characters of the choice's text before the token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ClientFinishReason | None


class CompletionReply(Struct, frozen=True, kw_only=True):
    """The whole reply, or one event of a stream. usage: null in events before the last, when it was asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class TopLogprob(Struct, frozen=True, kw_only=True):
    """bytes: exact, also where the token is not whole characters and `token` shows them escaped."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class ReplyMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: ClientFinishReason | None


class ChatReply(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ClientFinishReason | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """max_model_len: tokens of prompt and output together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(Struct, frozen=True, kw_only=True):
    """max_model_len: tokens of prompt and output together."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(Struct, frozen=True, kw_only=True):
    prompt: str
