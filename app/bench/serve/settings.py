"""What a run is asked to do. The command's flags are made from these fields; the text under a field is its help."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from app.errors import CacheTypeConflictError, ConfigError

WorkloadName = Literal["mooncake", "agent", "mtbench"]

TRACE_RATE = "trace"
_REPLY_TOKENS = {"agent": 16, "mtbench": 64}
_LENGTH_SCALE = 1 / 16
_VOCAB_SIZE = 30_000  # below the vocabulary of every model that is served today


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server."""

    url: str = "http://127.0.0.1:30000"
    """Address of the running server, without /v1."""

    model: str | None = None
    """Model to ask for; by default the first that the server lists."""

    api_key: str | None = field(default=None, repr=False)
    """Key for requests, if the server wants one."""

    admin_api_key: str | None = field(default=None, repr=False)
    """Key for /server_info and /flush_cache, if it is another one."""

    timeout: float = 600.0
    """Seconds after which a request counts as failed."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise ConfigError(field="url", value=self.url, allowed="an address such as http://127.0.0.1:30000")
        if not 0.0 < self.timeout < math.inf:
            raise ConfigError(field="timeout", value=self.timeout, allowed="seconds, more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """What is sent."""

    workload: WorkloadName
    """What to send: mooncake, requests of a trace; agent, runs of a coding agent; mtbench, two-turn questions."""

    data: Path | None = None
    """Data of the workload: a file, or for agent a folder; by default the copy in the repository."""

    conversations: int | None = None
    """Conversations to send (for mooncake: requests); by default all that the data has."""

    seed: int = 0
    """Fixes the order of conversations and the arrival times."""

    max_tokens: int | None = None
    """Tokens of every reply, for mtbench the most; by default 16 for agent and 64 for mtbench. A trace has its own."""

    length_scale: float | None = None
    """Length of prompts, pages shared and replies as a part of the trace's, at most 1; by default 1/16."""

    max_prompt_tokens: int | None = None
    """Longest prompt of the trace; longer ones are cut. By default what the server's context leaves."""

    vocab_size: int | None = None
    """Token ids of the trace's prompts are below this; by default 30000."""

    def __post_init__(self) -> None:
        limits = (
            ("conversations", self.conversations, 1, "1 or more"),
            ("seed", self.seed, 0, "0 or more"),
            ("max_tokens", self.max_tokens, 1, "1 or more"),
            ("max_prompt_tokens", self.max_prompt_tokens, 1, "1 or more"),
            ("vocab_size", self.vocab_size, 2, "2 or more"),
        )
        for name, value, least, allowed in limits:
            if value is not None and value < least:
                raise ConfigError(field=name, value=value, allowed=allowed)
        if self.length_scale is not None and not 0.0 < self.length_scale <= 1.0:
            raise ConfigError(field="length_scale", value=self.length_scale, allowed="more than 0, at most 1")
        others = {
            "mooncake": (("max_tokens", self.max_tokens),),
            "agent": (
                ("length_scale", self.length_scale),
                ("max_prompt_tokens", self.max_prompt_tokens),
                ("vocab_size", self.vocab_size),
            ),
        }
        for name, given in others.get(self.workload, others["agent"]):
            if given is not None:
                raise CacheTypeConflictError(
                    field=_flag(name),
                    value=given,
                    other_field="--workload",
                    other_value=self.workload,
                    allowed=_WHY_NOT[name],
                )

    @property
    def reply_tokens(self) -> int:
        """Of every reply of a workload that is no trace."""
        return self.max_tokens or _REPLY_TOKENS[self.workload]

    @property
    def kept_length(self) -> float:
        """`length_scale` with its default."""
        return self.length_scale or _LENGTH_SCALE

    @property
    def token_id_limit(self) -> int:
        """`vocab_size` with its default."""
        return self.vocab_size or _VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How fast it is sent."""

    concurrency: int = 8
    """Most conversations at the same time."""

    rate: str = "0"
    """Requests a second on average, arriving at random; 0, as fast as --concurrency allows; trace, at its own times."""

    time_scale: float | None = None
    """With --rate trace: its times, multiplied by this; 0.5 is twice as fast. By default 1."""

    skip_warmup: bool = False
    """Do not send everything once before measuring, nor empty the cache after that."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(field="concurrency", value=self.concurrency, allowed="1 or more")
        if self.rate != TRACE_RATE:
            try:
                good = 0.0 <= float(self.rate) < math.inf
            except ValueError:
                good = False
            if not good:
                raise ConfigError(
                    field="rate", value=self.rate, allowed=f"requests a second, 0 or more, or {TRACE_RATE}"
                )
        if self.time_scale is None:
            return
        if not 0.0 < self.time_scale < math.inf:
            raise ConfigError(field="time_scale", value=self.time_scale, allowed="more than 0")
        if self.rate != TRACE_RATE:
            raise CacheTypeConflictError(
                field="--time-scale",
                value=self.time_scale,
                other_field="--rate",
                other_value=self.rate,
                allowed=f"only the times of a trace (--rate {TRACE_RATE}) are scaled",
            )

    @property
    def requests_per_second(self) -> float:
        """0 when nothing holds requests back but the concurrency, or when the trace says when they arrive."""
        return 0.0 if self.rate == TRACE_RATE else float(self.rate)

    @property
    def kept_time(self) -> float:
        """`time_scale` with its default."""
        return self.time_scale or 1.0


def check_together(workload: WorkloadSettings, load: LoadSettings) -> None:
    """Raise CacheTypeConflictError for a load that the workload cannot have."""
    if load.rate == TRACE_RATE and workload.workload != "mooncake":
        raise CacheTypeConflictError(
            field="--rate",
            value=load.rate,
            other_field="--workload",
            other_value=workload.workload,
            allowed="only mooncake has arrival times of its own",
        )


_WHY_NOT = {
    "max_tokens": "the trace says how long each reply is; --length-scale scales it",
    "length_scale": "only the lengths of a trace (mooncake) are scaled",
    "max_prompt_tokens": "only prompts of a trace (mooncake) are cut; turns that are too long are left out",
    "vocab_size": "only a trace (mooncake) needs made-up tokens",
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
