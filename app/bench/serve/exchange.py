"""One request and what came back for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal[
    "refused",  # an HTTP status that is not 200
    "no connection",
    "connection lost",
    "timeout",
    "malformed",  # no stream of events, or none of the OpenAI API
    "error event",  # the server gave up within the stream
    "aborted",
    "no usage",  # all there, but without the token counts that the figures need
    "interrupted",  # the run ended first
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """status: of the HTTP reply, where that is the failure."""

    kind: FailureKind
    message: str
    status: int | None = None

    @property
    def label(self) -> str:
        """What failures are counted by."""
        return self.kind if self.status is None else f"{self.kind} {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Times are those of the run's clock, in seconds.

    first_byte: when the reply's head was there. deltas: when each event with text came, one time for each.
    prompt_tokens, completion_tokens: as the server counts; 0 until it has said so.
    cached_tokens: None when the server does not say.
    """

    sent: float
    end: float
    first_byte: float | None = None
    deltas: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
