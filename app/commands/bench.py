"""`tpukv bench tree`, `bench policies` and `bench engine`: measurements, each printed with its floor."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from app.config.server_args import EvictionPolicy, ServerArgs
from app.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTreeArgs:
    """Replay a trace through the real prefix tree and page allocator, and time single operations; needs no model."""

    trace: Path
    """Trace file: JSON lines of requests, with the hashes of their blocks."""

    requests: int = 800
    """Requests to replay, from the start of the trace."""

    page_size: int = 16
    """Tokens in a page."""

    pool_fraction: float = 0.25
    """Size of the pool, as a part of the distinct tokens of these requests."""

    cache_type: str = "radix_cache"
    """Cache to measure, by its registered name."""

    components: str = "full"
    """Components of the model that the cache serves: full, swa and recurrent, with commas between."""
    eviction_policy: EvictionPolicy = "lru"
    """Which unlocked cached pages go first when room is needed."""

    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        limits = (
            ("requests", self.requests >= 1, "1 or more"),
            ("page_size", self.page_size >= 1, "1 or more"),
            ("pool_fraction", 0.0 < self.pool_fraction <= 1.0, "more than 0, at most 1"),
        )
        for name, good, allowed in limits:
            if not good:
                raise ConfigError(field=name, value=getattr(self, name), allowed=allowed)
        if not self.trace.is_file():
            raise ConfigError(field="trace", value=str(self.trace), allowed="a file that exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPoliciesArgs:
    """Replay a trace with each eviction policy, beside the best that any could do; needs no model."""

    trace: Path
    """Trace file: JSON lines of requests, with the hashes of their blocks."""

    requests: int | None = None
    """Requests to replay, from the start of the trace; by default all."""

    pool_fraction: tuple[float, ...] = ()
    """Size of a pool, as a part of the distinct blocks of these requests; by default 0.02, 0.05, 0.1 and 0.25."""

    policy: tuple[EvictionPolicy, ...] = ()
    """Policy to replay; by default all."""

    cache_type: str = "radix_cache"
    """Cache to measure, by its registered name."""

    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise ConfigError(field="requests", value=self.requests, allowed="1 or more")
        for fraction in self.pool_fraction:
            if not 0.0 < fraction <= 1.0:
                raise ConfigError(field="pool_fraction", value=fraction, allowed="more than 0, at most 1")
        if not self.trace.is_file():
            raise ConfigError(field="trace", value=str(self.trace), allowed="a file that exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchEngineArgs:
    """Time steps, prefill and the control side of the engine, against the bare compiled step."""

    json: bool = False
    """Print one JSON object instead of a table."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine. Each of these can also come from the environment, as TPUKV_PAGE_SIZE and so on."""


def run_tree(args: BenchTreeArgs) -> int:
    from app.bench.component_replay import components_named, replay_of
    from app.bench.tree import format_operations_bench, format_tree_bench, run_operations_bench, run_tree_bench

    replay = run_tree_bench(
        trace=args.trace,
        num_requests=args.requests,
        page_size=args.page_size,
        pool_fraction=args.pool_fraction,
        cache_type=args.cache_type,
        new_replay=replay_of(components_named(args.components)),
        eviction_policy=args.eviction_policy,
    )
    single = run_operations_bench(args.page_size)
    if args.json:
        print(json.dumps({**replay, "single_operations": single}))
    else:
        print(format_tree_bench(replay), format_operations_bench(single), sep="\n\n")
    return 0


def run_policies(args: BenchPoliciesArgs) -> int:
    from app.bench.policies import format_policies_bench, run_policies_bench

    result = run_policies_bench(
        trace=args.trace,
        num_requests=args.requests,
        pool_fractions=args.pool_fraction,
        policies=args.policy,
        cache_type=args.cache_type,
    )
    print(json.dumps(result) if args.json else format_policies_bench(result))
    return 0


def run_engine(args: BenchEngineArgs) -> int:
    from app.bench.engine import format_engine_bench, run_engine_bench

    result = run_engine_bench(args.server)
    print(json.dumps(result) if args.json else format_engine_bench(result))
    return 0
