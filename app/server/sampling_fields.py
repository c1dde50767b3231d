"""How a request wants its tokens chosen: from the client's fields to the engine's parameters."""

from __future__ import annotations

from dataclasses import replace

from app.core.keys import Namespace
from app.core.sampling import SamplingParams
from app.errors import RequestError
from app.server.openai_errors import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    CONTEXT_LENGTH_EXCEEDED,
    from_request_error,
    not_allowed,
)
from app.server.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest

_NUM_SEEDS = 2**63


def resolve_max_tokens(
    asked: int | None,
    default: int | None,
    prompt_tokens: int,
    context_length: int,
    *,
    prompt_field: str = "prompt",
    max_tokens_field: str = "max_tokens",
) -> int:
    """Output tokens of one choice, so that prompt and output fit the context.

    asked: what the client says; it is never cut. default: for a client that says nothing, None for all that fits; it
    is cut to what fits. The field names are those that a refusal mentions. Raises ApiError (400) with code
    context_length_exceeded.
    """
    if prompt_tokens >= context_length:
        raise not_allowed(
            prompt_field,
            f"{prompt_tokens} tokens",
            f"at most {context_length - 1}: with one output token it must fit the context length of {context_length}",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    room = context_length - prompt_tokens
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise not_allowed(
            max_tokens_field,
            asked,
            f"at most {room} here: the context length is {context_length} tokens and the prompt has {prompt_tokens}",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return asked


def completion_sampling(request: CompletionRequest, max_tokens: int) -> list[SamplingParams]:
    """The parameters of each of a prompt's `n` choices, in order. Raises ApiError naming the client's field."""
    try:
        return _choices(request, _params(request, max_tokens, request.logprobs))
    except RequestError as error:
        raise from_request_error(error, COMPLETION_FIELDS) from error


def chat_sampling(request: ChatCompletionRequest, max_tokens: int) -> list[SamplingParams]:
    """The parameters of each of the `n` choices, in order. Raises ApiError naming the client's field."""
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    try:
        return _choices(request, _params(request, max_tokens, logprobs))
    except RequestError as error:
        raise from_request_error(error, CHAT_FIELDS) from error


def namespace_of(request: GenerationRequest) -> Namespace:
    """What keeps the request's cached pages apart from others'. Empty text differs from no text."""
    return Namespace(salt=request.cache_salt, extra_key=request.extra_key)


def _params(request: GenerationRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or -1,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={int(token_id): bias for token_id, bias in request.logit_bias.items()},
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop=request.stops,
        stop_token_ids=tuple(request.stop_token_ids),
        logprobs=logprobs,
        skip_special_tokens=request.skip_special_tokens,
    )


def _choices(request: GenerationRequest, params: SamplingParams) -> list[SamplingParams]:
    if request.seed is None:
        return [params] * request.n
    return [replace(params, seed=(request.seed + index) % _NUM_SEEDS) for index in range(request.n)]
