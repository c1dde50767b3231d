"""A request as the client states it, as the scheduler follows it, and as it ends."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from app.caches.tiers.ports import RestoredTokens
from app.core.batch import BatchCompletion
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey
from app.core.sampling import SamplingParams
from app.core.transfers import PageCounts
from app.scheduling.watched_text import WatchedText

NOTHING_RESTORED = RestoredTokens()

FinishReason = Literal["stop", "length", "abort", "capacity", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks. `prompt_token_ids`: (num_tokens,) int32, at least one.

    priority: a lower one is admitted earlier and gives way later; equals are served in the scheduler's order.
    streams: whether its tokens are told as they come (`SchedulerObserver.streamed`), besides the terminal reply.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = DEFAULT_NAMESPACE
    priority: int = 0
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The one terminal reply of a request.

    token_ids: the output tokens; a stop token that ended the request is the last of them, its text is not in `text`.
    cached_tokens: prompt tokens that were not computed because they were cached when the request was first admitted.
    restored_tokens: those of them that were brought back for it from the host tier, or from storage.
    first_token_ns: from `add` to the first token being known on the host; None when there was none.
    logprobs: of each output token when asked for; top_logprobs: per token, (token id, logprob) pairs, likeliest first.
    error: why a request ended with finish_reason "capacity" or "error".
    """

    request_id: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    first_token_ns: int | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    error: str | None = None
    restored_tokens: RestoredTokens = NOTHING_RESTORED

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """`cached_tokens` by where they came from."""
        host, storage = self.restored_tokens
        return {"device": self.cached_tokens - host - storage, "host": host, "storage": storage}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """What a streamed request gained since its last delta. Joined, the texts are the text of the terminal reply.

    text: final characters; less than the tokens' when some are held back for half a character or a stop string.
    logprobs, top_logprobs: as in RequestOutput, of these tokens.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """How far a request is that has not ended. cached_tokens: None before its first admission."""

    request_id: str
    status: str  # a value of Status
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    age_s: float


class Status(enum.Enum):
    """Where a request is. It reaches ENDED once, from anywhere."""

    WAITING = "waiting"
    PREFILL = "prefill"  # has a row; not all known tokens are computed yet
    DECODE = "decode"  # has a row; every known token is computed or being computed
    ENDED = "ended"


class Sequence:
    """A request being followed. Written by the scheduler alone.

    Token counts, for a running sequence:
        known     prompt and outputs that the host has read
        computed  tokens whose KV a dispatched step writes (`Status.PREFILL`; the running table has it afterwards)
    """

    __slots__ = (
        "ahead",
        "arrival",
        "arrival_ns",
        "cached_tokens",
        "capacity_error",
        "computed",
        "dedup_waits",
        "first_token_ns",
        "generation",
        "key",
        "logprobs",
        "num_restores",
        "output",
        "owed",
        "promised",
        "prompt",
        "request",
        "restored_tokens",
        "sampling",
        "sent",
        "slot",
        "status",
        "text",
        "top_logprobs",
        "unpublished",
    )

    def __init__(self, request: Request, sampling: SamplingParams, arrival: int) -> None:
        self.request = request
        self.sampling = sampling
        self.key = self._key_of(request.prompt_token_ids)  # of every known token when it waits
        self.prompt = self.key.tokens()  # a copy: the client's array may change
        self.arrival = arrival
        self.arrival_ns = time.monotonic_ns()
        self.first_token_ns: int | None = None
        self.status = Status.WAITING
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.slot = -1
        self.generation = -1
        self.computed = 0
        self.owed = False  # retracted while a dispatched step still owes it a token
        self.cached_tokens: int | None = None
        self.capacity_error: str | None = None
        self.restored_tokens = NOTHING_RESTORED  # of `cached_tokens`
        self.dedup_waits = 0
        self.num_restores = 0  # begun since it was queued
        self.promised = PageCounts()  # kept for it while its prefix is being restored
        self.ahead: PageCounts | None = None  # restored for it before a row was free; None if that was not tried yet
        self.unpublished = False  # has a row, and part of its prompt is not in the cache yet but will be
        self.text: WatchedText | None = None  # only with stop strings, or when streamed
        self.sent = 0  # output tokens told in deltas

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """Whoever has the lower one comes first, and gives way last."""
        return self.request.priority, self.arrival

    @property
    def known(self) -> int:
        return self.prompt.size + len(self.output)

    @property
    def needs_attention(self) -> bool:
        """Whether each of its tokens must be looked at, beyond the ends that the running table knows."""
        params = self.sampling
        return bool(params.stop or params.stop_token_ids or params.logprobs is not None or self.request.streams)

    def tokens(self) -> np.ndarray:
        """(known,) int32."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.output, np.int32)])

    def rekey(self) -> None:
        """Make `key` the key of every known token, as it is needed for the next admission."""
        self.key = self._key_of(self.tokens())

    def note_first_token(self) -> None:
        if self.first_token_ns is None:
            self.first_token_ns = time.monotonic_ns() - self.arrival_ns

    def add_logprobs(self, row: int, completion: BatchCompletion) -> None:
        """Of the last output token, from its row in the step that sampled it."""
        self.logprobs.append(float(completion.logprobs[row]))
        count = self.sampling.logprobs or 0
        ids = completion.top_token_ids[row, :count].tolist()
        values = completion.top_logprobs[row, :count].tolist()
        self.top_logprobs.append(list(zip(ids, values, strict=True)))

    def note_cached(self, num_tokens: int, restored: RestoredTokens) -> None:
        """It is admitted for the first time, with so many cached tokens. `restored`: what was brought back before.

        What came from storage is deeper than what the host had, and so what was evicted again is missing from it first.
        """
        host = min(restored.host, num_tokens)
        self.cached_tokens = num_tokens
        self.restored_tokens = RestoredTokens(host, min(restored.storage, num_tokens - host))

    def settled_key(self, num_tokens: int) -> RadixKey:
        """The key of the first `num_tokens` known tokens."""
        if num_tokens <= self.key.num_tokens:
            return self.key.head(num_tokens)
        return self._key_of(self.tokens()[:num_tokens])

    def _key_of(self, token_ids: np.ndarray) -> RadixKey:
        return RadixKey.of(token_ids, self.request.namespace, self.request.priority)
