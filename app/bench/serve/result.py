"""What a run leaves behind: one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from app.errors import ConfigError

VERSION = 1

Ending = Literal["complete", "interrupted", "server gone"]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds after the run began.

    due_s: when its conversation was to begin, or the reply before it ended. delta_s: when each event with text came.
    cached_tokens: None when the server does not say. ideal_cached_tokens: None when the ideal is not known.
    failure: what failures are counted by; None when the reply is whole.
    """

    request: int
    conversation: str
    turn: int
    due_s: float
    sent_s: float
    first_byte_s: float | None
    delta_s: list[float]
    end_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    ideal_cached_tokens: int | None
    finish_reason: str | None
    failure: str | None
    failure_message: str | None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of n samples, in seconds. Percentiles are samples: the smallest that at least so many per cent do not exceed."""

    n: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over the completed requests; a Spread is None without samples.

    duration_s: from the first request sent to the last reply ended. not_sent: turns whose turn before failed, or that
    the run did not reach. The rates of tokens are over prompts and replies; hit rates are tokens over prompt tokens.
    """

    completed: int
    failed: int
    not_sent: int
    failures: dict[str, int]
    duration_s: float
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    late: Spread | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    hit_rate: float | None
    ideal_hit_rate: float | None
    of_ideal: float | None


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`info`: all that /server_info said."""

    url: str
    model: str
    cache_type: str | None
    page_size: int | None
    context_length: int
    info: dict[str, Any]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """settings: all that shapes what is sent and when, keys left out. digest: of everything that was to be sent.

    notes: what a reader of the figures must know, one sentence each. loop_lag_s: the longest that the client itself
    was behind; times are no better than that.
    """

    version: int
    started_at: str
    ending: Ending
    settings: dict[str, Any]
    digest: str
    server: ServerRecord
    notes: list[str]
    loop_lag_s: float
    summary: Summary
    rows: list[RequestRow]

    @property
    def label(self) -> str:
        """A few words that name the run in tables and pictures."""
        return f"{self.server.cache_type or 'unknown cache'} ({self.server.model})"


def write_result(path: Path, result: RunResult) -> None:
    """Replaces the file. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read_result(path: Path, field: str) -> RunResult:
    """Raises ConfigError, naming `field`, for a file that is no result of this version."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=RunResult)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(field=field, value=str(path), allowed=f"it cannot be read: {reason}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            field=field, value=str(path), allowed=f"a result file of `tpukv bench serve` ({error})"
        ) from None
    if result.version != VERSION:
        raise ConfigError(
            field=field, value=str(path), allowed=f"a result of version {VERSION}, but this is {result.version}"
        )
    return result
