"""The settings of one engine. Frozen; the command line's flags are generated from these fields.

The text under a field is its help. Checks that need nothing but these settings run when the object is made, in the
order of the fields and then of the pairs; what needs the model is in `app/config/checks.py`, and what needs the
registered cache types in `app/config/cache_type.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.config import rules
from app.config.tier_settings import HostMode, PrefetchPolicy, WritePolicy
from app.errors import CacheTypeConflictError, ConfigError

DisaggregationMode = Literal["null", "prefill", "decode"]
DType = Literal["auto", "float32", "bfloat16"]
SchedulePolicy = Literal["fcfs", "lpm"]
Device = Literal["auto", "cpu", "tpu"]
WarmupLevel = Literal["none", "copies", "decode", "all"]
Warmup = Literal["auto", WarmupLevel]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]
EvictionPolicy = Literal["lru", "lfu", "slru", "priority", "hit_density"]

CHUNKING_OFF = -1
MAX_PAGE_SIZE = 1024
MAX_RUNNING_REQUESTS = 4096
MAX_INT32 = 2**31 - 1
MAX_NODES = 1024
MAX_DIST_TIMEOUT = 86400
MAX_GB = 1e6
MAX_RATIO = 1e4
MAX_SECONDS = 86400.0
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
    """Compiled before requests: nothing, copies of tiers, decode steps too, all. auto: decode on TPU, else copies."""

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

    enable_hierarchical_cache: bool = False
    """Keep what the KV pool has no room for in host memory, and in storage with --hicache-storage-backend."""

    hicache_ratio: float = 2.0
    """Size of the host pool as a multiple of the KV pool."""

    hicache_size: float | None = None
    """Size of the host pool in GB (10^9 bytes, of all ranks together); by default what --hicache-ratio says."""

    hicache_write_policy: WritePolicy = "write_through_selective"
    """What is copied to the host: all at once; what was hit --hicache-write-min-hits times; what is evicted."""

    hicache_write_min_hits: int = 2
    """Hits after which write_through_selective copies a prefix."""

    hicache_host_mode: HostMode = "cache"
    """What host memory is: a cache, or buffer_only, through which pages go to storage and come back."""

    hicache_staging_size: float | None = None
    """Device memory in GB for copies under way; by default two chunks of a prompt, at most 1/8 of the KV pool."""

    hicache_copy_deadline: float = 30.0
    """Seconds after which a copy between device and host is given up."""

    hicache_storage_backend: str | None = None
    """Storage below the host pool: file, obstore, mooncake, memory or one of a plugin; by default none."""

    hicache_storage_path: str = ""
    """Where the storage is: a folder for file, a URL for obstore, HOST:PORT of the master for mooncake."""

    hicache_storage_size: float | None = None
    """Most GB that the storage keeps, or for mooncake lends; by default 17.2 where the backend has a limit."""

    hicache_storage_options: str = dataclasses.field(default="", repr=False)
    """Settings of the backend's own: a JSON object of texts."""

    hicache_storage_prefetch_policy: PrefetchPolicy = "timeout"
    """How long a request waits for its prefix from storage: not at all, --hicache-storage-prefetch-timeout, or all."""

    hicache_storage_prefetch_timeout: float = 2.0
    """Seconds that a request waits for its prefix with --hicache-storage-prefetch-policy timeout."""

    hicache_storage_deadline: float = 10.0
    """Seconds after which an answer of the storage counts as a miss."""

    def __post_init__(self) -> None:
        for field, accepts, allowed in _RULES:
            value = getattr(self, field)
            if not accepts(value):
                raise ConfigError(field=flag_of(field), value=self._shown(field), allowed=allowed)
        self._check_nodes()
        self._check_tiers()
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

    def _check_tiers(self) -> None:
        """Settings that only mean something beside another one, once they differ from their default."""
        for own in dataclasses.fields(self):
            if getattr(self, own.name) == own.default:
                continue
            for needy, other, accepts, allowed in _NEEDS:
                if own.name.startswith(needy) and not accepts(getattr(self, other)):
                    raise CacheTypeConflictError(
                        field=flag_of(own.name),
                        value=self._shown(own.name),
                        other_field=flag_of(other),
                        other_value=getattr(self, other),
                        allowed=allowed,
                    )

    def _shown(self, name: str) -> object:
        """The value as a message may show it."""
        secret = {own.name for own in dataclasses.fields(self) if not own.repr}
        return "***" if name in secret else getattr(self, name)

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


def _chunk_size(field: str) -> rules.Rule:
    rule = rules.whole(field, CHUNKING_OFF, MAX_INT32)
    allowed = f"a whole number, 1 to {MAX_INT32}, or {CHUNKING_OFF} to compute whole prompts at once"
    return rules.Rule(field, lambda value: rule.accepts(value) and value != 0, allowed)


_RULES: tuple[rules.Rule, ...] = (
    rules.text("model_path"),
    rules.text_or_none("cache_type"),
    rules.one_of("disaggregation_mode", DisaggregationMode),
    rules.whole("page_size", 1, MAX_PAGE_SIZE),
    rules.whole("tp_size", 1, MAX_INT32),
    rules.only_one("dp_size"),
    rules.whole("nnodes", 1, MAX_NODES),
    rules.whole("node_rank", 0, MAX_NODES - 1),
    rules.address_or_none("dist_init_addr"),
    rules.whole("dist_timeout", 1, MAX_DIST_TIMEOUT),
    rules.whole("max_running_requests", 1, MAX_RUNNING_REQUESTS),
    rules.whole_or_none("max_total_tokens", 1, MAX_INT32),
    rules.whole_or_none("context_length", 2, MAX_INT32),
    _chunk_size("chunked_prefill_size"),
    rules.one_of("dtype", DType),
    rules.one_of("kv_cache_dtype", DType),
    rules.one_of("schedule_policy", SchedulePolicy),
    rules.whole("random_seed", 0, 2**32 - 1),
    rules.one_of("device", Device),
    rules.fraction_or_none("mem_fraction_static"),
    rules.one_of("warmup", Warmup),
    rules.switch("check_invariants"),
    rules.one_of("log_level", LogLevel),
    rules.one_of("log_format", LogFormat),
    rules.switch("disable_overlap"),
    rules.share("swa_full_tokens_ratio"),
    rules.whole("recurrent_track_interval", 1, MAX_INT32),
    rules.whole_or_none("max_recurrent_snapshots", 1, MAX_INT32),
    rules.one_of("eviction_policy", EvictionPolicy),
    rules.switch("enable_hierarchical_cache"),
    rules.number("hicache_ratio", MAX_RATIO),
    rules.number_or_none("hicache_size", MAX_GB),
    rules.one_of("hicache_write_policy", WritePolicy),
    rules.whole("hicache_write_min_hits", 1, MAX_INT32),
    rules.one_of("hicache_host_mode", HostMode),
    rules.number_or_none("hicache_staging_size", MAX_GB),
    rules.number("hicache_copy_deadline", MAX_SECONDS),
    rules.text_or_none("hicache_storage_backend"),
    rules.text("hicache_storage_path"),
    rules.number_or_none("hicache_storage_size", MAX_GB),
    rules.json_texts("hicache_storage_options"),
    rules.one_of("hicache_storage_prefetch_policy", PrefetchPolicy),
    rules.number("hicache_storage_prefetch_timeout", MAX_SECONDS),
    rules.number("hicache_storage_deadline", MAX_SECONDS),
)


class _Need(NamedTuple):
    """A setting, or all that begin so, and what another one must be once it is not left at its default."""

    needy: str
    other: str
    accepts: Callable[[object], bool]
    allowed: str


_NEEDS: tuple[_Need, ...] = (
    _Need("enable_hierarchical_cache", "nnodes", (1).__eq__, "the tiers of one engine lie on one node for now"),
    _Need("hicache_", "enable_hierarchical_cache", bool, "there are no tiers without --enable-hierarchical-cache"),
    _Need("hicache_write_min_hits", "hicache_write_policy", "write_through_selective".__eq__, "no other policy counts"),
    _Need("hicache_host_mode", "hicache_storage_backend", bool, "a host pool that keeps nothing needs a storage"),
    _Need("hicache_storage_", "hicache_storage_backend", bool, "name the backend that it is for"),
    _Need("hicache_storage_prefetch_timeout", "hicache_storage_prefetch_policy", "timeout".__eq__, "no other waits so"),
)
