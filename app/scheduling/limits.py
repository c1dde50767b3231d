"""What one engine can serve, and the check of each request against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.errors import RequestError
from app.scheduling.request import Request, Sequence
from app.scheduling.waiting import SchedulePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_running_requests: int
    context_length: int  # tokens, prompt and output together
    chunk_tokens: int  # prompt tokens a step, all requests together
    vocab_size: int
    schedule_policy: SchedulePolicy = "fcfs"
    random_seed: int = 0
    overlap: bool = True  # False: each step is read before the next is planned
    check_invariants: bool = False  # after every step; O(pages)
    snapshot_interval: int | None = None  # tokens between snapshots of recurrent states, whole pages; None: none taken

    def check(self, request: Request, *, pool_tokens: int) -> None:
        """Raise RequestError for a request that can never be served, naming the field and the numbers."""
        tokens = request.prompt_token_ids
        if tokens.ndim != 1 or tokens.dtype != np.int32:
            raise RequestError(
                field="prompt_token_ids", value=f"{tokens.dtype} of shape {tokens.shape}", allowed="a row of int32"
            )
        if not tokens.size:
            raise RequestError(field="prompt", value="0 tokens", allowed="at least one token")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
            raise RequestError(
                field="prompt_token_ids", value=int(outside[0]), allowed=f"token ids of 0 to {self.vocab_size - 1}"
            )
        for token_id in request.sampling.logit_bias:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    field="logit_bias", value=token_id, allowed=f"token ids of 0 to {self.vocab_size - 1}"
                )
        self._check_length(tokens.size, "context length", self.context_length)
        self._check_length(tokens.size, "KV pool", pool_tokens)

    def end_of(self, sequence: Sequence) -> int:
        """Tokens at which the sequence ends whatever they are."""
        return min(sequence.prompt.size + sequence.sampling.max_tokens, self.context_length)

    def seed_of(self, arrival: int) -> int:
        """A seed for a request that brings none: the same for the same place in the same run."""
        return (self.random_seed % 2**32) << 32 | arrival % 2**32

    def _check_length(self, num_tokens: int, what: str, limit: int) -> None:
        if num_tokens + 1 > limit:
            raise RequestError(
                field="prompt",
                value=f"{num_tokens} tokens",
                allowed=f"at most {limit - 1}: with one output token it must fit the {what} of {limit} tokens",
            )
