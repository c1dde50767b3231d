"""`tpukv bench tree` and `tpukv bench engine`: measurements, each printed with its floor."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from app.config.server_args import ServerArgs
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
    )
    single = run_operations_bench(args.page_size)
    if args.json:
        print(json.dumps({**replay, "single_operations": single}))
    else:
        print(format_tree_bench(replay), format_operations_bench(single), sep="\n\n")
    return 0


def run_engine(args: BenchEngineArgs) -> int:
    from app.bench.engine import format_engine_bench, run_engine_bench

    result = run_engine_bench(args.server)
    print(json.dumps(result) if args.json else format_engine_bench(result))
    return 0
