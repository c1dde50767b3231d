"""The settings of one engine. Frozen; the command line's flags are generated from these fields.

The text under a field is its help. Checks that need nothing but these settings run when the object is made, in the
order of the fields and then of the pairs; what needs the model is in `app/config/checks.py`, and what needs the
registered cache types in `app/config/cache_type.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from app.errors import CacheTypeConflictError, ConfigError

DisaggregationMode = Literal["null", "prefill", "decode"]
DType = Literal["auto", "float32", "bfloat16"]
SchedulePolicy = Literal["fcfs", "lpm"]
Device = Literal["auto", "cpu", "tpu"]
WarmupLevel = Literal["none", "decode", "all"]
Warmup = Literal["auto", WarmupLevel]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]
EvictionPolicy = Literal["lru", "lfu", "slru", "priority", "hit_density"]

CHUNKING_OFF = -1
MAX_PAGE_SIZE = 1024
MAX_RUNNING_REQUESTS = 4096
MAX_INT32 = 2**31 - 1
MAX_NODES = 1024
MAX_PORT = 65535
MAX_DIST_TIMEOUT = 86400
MIN_POOL_PAGES = 2  # one page that can be shared, and room for the token after it


def flag_of(field: str) -> str:
    """The command line's name of a field."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Settings of one engine. A value that cannot be served raises ConfigError, which names the flag."""

    model_path: str = ""
    """GGUF file or Hugging Face folder; empty is the bundled SmolLM2-135M-Instruct."""

    cache_type: str | None = None
    """Prefix cache, by its registered name; by default the first one that covers the model."""

    disaggregation_mode: DisaggregationMode = "null"
    """Part that this node plays: null serves whole requests; decode nodes use chunk_cache."""

    page_size: int = 16
    """Tokens in a page, the unit in which KV is allocated, shared and evicted."""

    tp_size: int = 1
    """Tensor parallelism: devices over which heads and weights are split."""

    dp_size: int = 1
    """Data parallelism: engines side by side. Only 1 for now."""

    nnodes: int = 1
    """Processes that serve one model together, each on devices of its own: nodes. All get the same settings."""

    node_rank: int = 0
    """Which of the nodes this process is; node 0 is the one that the others connect to."""

    dist_init_addr: str | None = None
    """HOST:PORT of node 0, at which the nodes meet; the port after it is used as well."""

    dist_timeout: int = 300
    """Seconds that a node waits for the others when it starts."""

    max_running_requests: int = 16
    """Requests that run at the same time; more wait in the queue."""

    max_total_tokens: int | None = None
    """Capacity of the KV pool in tokens, rounded down to whole pages; by default what memory allows."""

    context_length: int | None = None
    """Longest request, prompt and output together, in tokens; by default the model's, or the pool's if that is less."""

    chunked_prefill_size: int = 512
    """Most prompt tokens computed in one step; -1 computes whole prompts at once."""

    dtype: DType = "auto"
    """Type of weights and computation; auto is float32 on CPU and bfloat16 on TPU."""

    kv_cache_dtype: DType = "auto"
    """Type of cached keys and values; auto is that of the computation."""

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of waiting requests: fcfs, first come first served; lpm, longest cached prefix first."""

    random_seed: int = 0
    """Seed from which requests without one of their own get theirs."""

    device: Device = "auto"
    """Where the model runs; auto takes a TPU if there is one."""

    mem_fraction_static: float | None = None
    """Part of the memory that weights, KV pool and a step may take together; by default 0.9 on TPU and 0.7 on CPU."""

    warmup: Warmup = "auto"
    """What is compiled before requests are taken: nothing, decode steps or all; auto is decode for `serve` on TPU."""

    check_invariants: bool = False
    """Check every invariant after every step; slow, for tests and debugging."""

    log_level: LogLevel = "warning"
    """Least severe log lines that are written, to stderr."""

    log_format: LogFormat = "console"
    """Form of log lines: console is for people, json is one object a line."""

    disable_overlap: bool = False
    """Run one step at a time instead of planning the next while one runs; for debugging."""

    swa_full_tokens_ratio: float = 0.5
    """Tokens that the pool of sliding-window layers holds for each token of the other pool, for models with both."""

    recurrent_track_interval: int = 256
    """Tokens between snapshots of recurrent states, at which later requests can hit; rounded up to whole pages."""

    max_recurrent_snapshots: int | None = None
    """Snapshots of recurrent states that are kept; by default one for each interval of the KV pool."""

    eviction_policy: EvictionPolicy = "lru"
    """Which unlocked cached pages go first when room is needed."""

    def __post_init__(self) -> None:
        for field, accepts, allowed in _RULES:
            value = getattr(self, field)
            if not accepts(value):
                raise ConfigError(field=flag_of(field), value=value, allowed=allowed)
        self._check_nodes()
        if self.max_total_tokens is not None:
            self._check_pool(self.max_total_tokens)

    def _check_nodes(self) -> None:
        """Settings that only mean something together, once there are several nodes."""
        several = self.nnodes > 1
        pairs = (
            (self.node_rank >= self.nnodes, "node_rank", f"nodes count from 0 to {self.nnodes - 1}"),
            (several != (self.dist_init_addr is not None), "dist_init_addr", "it is where two or more nodes meet"),
            (self.tp_size % self.nnodes != 0, "tp_size", "every node must have the same number of devices"),
            (several and self.max_total_tokens is None, "max_total_tokens", "say it, as it must be equal on all nodes"),
        )
        for wrong, field, allowed in pairs:
            if wrong:
                raise CacheTypeConflictError(
                    field=flag_of(field),
                    value=getattr(self, field),
                    other_field="--nnodes",
                    other_value=self.nnodes,
                    allowed=allowed,
                )

    def _check_pool(self, max_total_tokens: int) -> None:
        """What depends on the size of the pool, where it is given."""
        num_pages = max_total_tokens // self.page_size
        if num_pages < MIN_POOL_PAGES:
            raise CacheTypeConflictError(
                field="--max-total-tokens",
                value=max_total_tokens,
                other_field="--page-size",
                other_value=self.page_size,
                allowed=f"the pool needs at least {MIN_POOL_PAGES} pages, {MIN_POOL_PAGES * self.page_size} tokens",
            )
        pool_tokens = num_pages * self.page_size
        if self.context_length is not None and self.context_length > pool_tokens:
            raise CacheTypeConflictError(
                field="--context-length",
                value=self.context_length,
                other_field="--max-total-tokens",
                other_value=max_total_tokens,
                allowed=f"{num_pages} whole pages of {self.page_size} tokens hold {pool_tokens}, less than one request",
            )


class _Rule(NamedTuple):
    """What one field accepts: a test, and the same in words."""

    field: str
    accepts: Callable[[object], bool]
    allowed: str


def _text(field: str) -> _Rule:
    return _Rule(field, lambda value: isinstance(value, str), "text")


def _text_or_none(field: str) -> _Rule:
    return _Rule(field, lambda value: value is None or isinstance(value, str), "text")


def _switch(field: str) -> _Rule:
    return _Rule(field, lambda value: isinstance(value, bool), "True or False")


def _one_of(field: str, literal: object) -> _Rule:
    choices = get_args(literal)
    return _Rule(field, lambda value: value in choices, f"one of {', '.join(choices)}")


def _whole(field: str, low: int, high: int) -> _Rule:
    # `type is int`: True counts as 1 for isinstance, and is a mistake here.
    return _Rule(field, lambda value: type(value) is int and low <= value <= high, f"a whole number, {low} to {high}")


def _share(field: str) -> _Rule:
    def accepts(value: object) -> bool:
        return type(value) is float and 0 < value <= 1

    return _Rule(field, accepts, "a number above 0, at most 1")


def _whole_or_none(field: str, low: int, high: int) -> _Rule:
    rule = _whole(field, low, high)
    return rule._replace(accepts=lambda value: value is None or rule.accepts(value))


def _fraction_or_none(field: str) -> _Rule:
    # A whole number is no fraction, True least of all.
    return _Rule(field, lambda value: value is None or (type(value) is float and 0 < value < 1), "between 0 and 1")


def _address_or_none(field: str) -> _Rule:
    allowed = f"HOST:PORT, with a port from 1 to {MAX_PORT - 1}"
    return _Rule(field, lambda value: value is None or _is_address(value), allowed)


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host, _, port = value.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 1 <= int(port) < MAX_PORT


def _chunk_size(field: str) -> _Rule:
    rule = _whole(field, CHUNKING_OFF, MAX_INT32)
    allowed = f"a whole number, 1 to {MAX_INT32}, or {CHUNKING_OFF} to compute whole prompts at once"
    return _Rule(field, lambda value: rule.accepts(value) and value != 0, allowed)


def _only_one(field: str) -> _Rule:
    rule = _whole(field, 1, 1)
    return rule._replace(allowed="1; more than one is not yet supported")


_RULES: tuple[_Rule, ...] = (
    _text("model_path"),
    _text_or_none("cache_type"),
    _one_of("disaggregation_mode", DisaggregationMode),
    _whole("page_size", 1, MAX_PAGE_SIZE),
    _whole("tp_size", 1, MAX_INT32),
    _only_one("dp_size"),
    _whole("nnodes", 1, MAX_NODES),
    _whole("node_rank", 0, MAX_NODES - 1),
    _address_or_none("dist_init_addr"),
    _whole("dist_timeout", 1, MAX_DIST_TIMEOUT),
    _whole("max_running_requests", 1, MAX_RUNNING_REQUESTS),
    _whole_or_none("max_total_tokens", 1, MAX_INT32),
    _whole_or_none("context_length", 2, MAX_INT32),
    _chunk_size("chunked_prefill_size"),
    _one_of("dtype", DType),
    _one_of("kv_cache_dtype", DType),
    _one_of("schedule_policy", SchedulePolicy),
    _whole("random_seed", 0, 2**32 - 1),
    _one_of("device", Device),
    _fraction_or_none("mem_fraction_static"),
    _one_of("warmup", Warmup),
    _switch("check_invariants"),
    _one_of("log_level", LogLevel),
    _one_of("log_format", LogFormat),
    _switch("disable_overlap"),
    _share("swa_full_tokens_ratio"),
    _whole("recurrent_track_interval", 1, MAX_INT32),
    _whole_or_none("max_recurrent_snapshots", 1, MAX_INT32),
    _one_of("eviction_policy", EvictionPolicy),
)
