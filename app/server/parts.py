"""What the engine answered, as the renderers of the OpenAI interface take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ClientFinishReason = Literal["stop", "length", "abort"]
# By the scheduler's word. Its other two, "capacity" and "error", are told as errors.
CLIENT_FINISH_REASONS: dict[str, ClientFinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
TopLogprobs = list[list[tuple[int, float]]]  # per token: (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one choice gained: all of it, or what came since the last part of a stream.

    index: of the choice, as the client counts.
    logprobs, top_logprobs: one entry for each of `token_ids`; None when not asked for.
    finish_reason: set on the last part of a choice, and on no other.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: TopLogprobs | None = None
    finish_reason: ClientFinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one reply, all its choices together; a prompt counts once, however many choices it has.

    cached_tokens: prompt tokens that were not computed because they were cached; for n choices of one prompt, the
        least of them.
    cached_by_source: `cached_tokens` by where they came from (device, host, storage); None unless asked for.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_source: dict[str, int] | None = None
