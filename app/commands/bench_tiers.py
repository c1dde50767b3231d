"""`tpukv bench overlap` and `tpukv bench tiers`: what the tiers below the device pool are worth, and what they cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from app.config.server_args import EvictionPolicy, ServerArgs
from app.config.tier_settings import WritePolicy
from app.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOverlapArgs:
    """Measure copies between tiers beside compute, and hits in each tier against computing; takes some minutes."""

    json: bool = False
    """Print one JSON object instead of a table."""

    timeline: Path | None = None
    """Draw when steps ran and pages travelled into this file, as SVG."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine; its pool, its tiers and its rows are set by the measurement."""

    def __post_init__(self) -> None:
        if self.timeline is not None and not self.timeline.absolute().parent.is_dir():
            raise ConfigError(field="timeline", value=str(self.timeline), allowed="a file in a folder that exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTiersArgs:
    """Replay a trace with two or three tiers, beside one tier of their summed size; needs no model."""

    trace: Path
    """Trace file: JSON lines of requests, with the hashes of their blocks."""

    requests: int | None = None
    """Requests to replay, from the start of the trace; by default all."""

    page_size: int = 16
    """Tokens in a page."""

    device: float = 0.1
    """Size of the device tier, as a part of the distinct tokens of these requests."""

    host: float = 0.1
    """Size of the host tier, likewise."""

    storage: float = 0.0
    """Size of the storage tier, likewise; by default there is none."""

    policy: tuple[WritePolicy, ...] = ()
    """Write policy to replay; by default all."""

    eviction_policy: EvictionPolicy = "lru"
    """Which unlocked cached pages leave the device first when room is needed."""

    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        limits = (
            ("requests", self.requests is None or self.requests >= 1, "1 or more"),
            ("page_size", self.page_size >= 1, "1 or more"),
            ("device", 0.0 < self.device <= 1.0, "more than 0, at most 1"),
            ("host", 0.0 < self.host <= 1.0, "more than 0, at most 1"),
            ("storage", 0.0 <= self.storage <= 1.0, "0 to 1"),
        )
        for name, good, allowed in limits:
            if not good:
                raise ConfigError(field=name, value=getattr(self, name), allowed=allowed)
        if not self.trace.is_file():
            raise ConfigError(field="trace", value=str(self.trace), allowed="a file that exists")


def run_overlap(args: BenchOverlapArgs) -> int:
    from app.bench.overlap.run import run_overlap_bench
    from app.bench.overlap.table import format_overlap_bench

    result, timeline = run_overlap_bench(args.server)
    if args.timeline is not None:
        args.timeline.write_text(timeline, encoding="utf-8")
    print(json.dumps(result) if args.json else format_overlap_bench(result))
    return 0


def run_tiers(args: BenchTiersArgs) -> int:
    from app.bench.tiers import format_tiers_bench, run_tiers_bench

    result = run_tiers_bench(
        args.trace,
        device=args.device,
        host=args.host,
        storage=args.storage,
        num_requests=args.requests,
        page_size=args.page_size,
        policies=args.policy,
        eviction_policy=args.eviction_policy,
    )
    print(json.dumps(result) if args.json else format_tiers_bench(result))
    return 0
