"""`tpukv bench serve` and `tpukv bench compare`: a running server under real workloads, and two such runs."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from app.bench.serve.settings import LoadSettings, Target, WorkloadSettings, check_together
from app.errors import ConfigError

if TYPE_CHECKING:
    from app.bench.serve.result import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchArgs:
    """Measure a running server that speaks the OpenAI API: times, throughput, and its cache against the ideal."""

    workload: WorkloadSettings
    """What is sent."""

    load: LoadSettings = field(default_factory=LoadSettings)
    """How fast it is sent."""

    target: Target = field(default_factory=Target)
    """The server."""

    output: Path | None = None
    """JSON file for the result; by default named after workload, cache type and time, in the current folder."""

    picture: Path | None = None
    """PNG file for the picture; by default beside the JSON file, with its name."""

    def __post_init__(self) -> None:
        check_together(self.workload, self.load)
        _check_writable("output", self.output, ".json")
        _check_writable("picture", self.picture, ".png")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareArgs:
    """Two results of `tpukv bench serve` side by side, with the ratio second / first of every figure."""

    first: Path
    """JSON file of the first run."""

    second: Path
    """JSON file of the second run."""

    picture: Path | None = None
    """PNG file for a picture of both; none by default."""

    def __post_init__(self) -> None:
        _check_writable("picture", self.picture, ".png")


def run_serve(args: ServeBenchArgs) -> int:
    """0 when every request was answered whole, else 1. An interrupted run is saved, then raises KeyboardInterrupt."""
    from app.bench.serve.failures import require_extra

    require_extra()

    import asyncio

    from rich.console import Console

    from app.bench.serve.picture import draw_picture
    from app.bench.serve.result import write_result
    from app.bench.serve.run import ServeBench
    from app.bench.serve.table import print_run

    if args.output is None:
        _check_writable("output", Path("result.json"), ".json")  # before the run, not after it
    bench = ServeBench(target=args.target, workload=args.workload, load=args.load, say=_say)
    result = asyncio.run(bench.run())
    output = args.output or Path(_default_name(result))
    picture = args.picture or output.with_suffix(".png")
    with _writing("output", output):
        write_result(output, result)
    print_run(result, Console())
    print(f"result: {output}")
    with _writing("picture", picture):
        draw_picture(picture, [result])
    print(f"picture: {picture}")
    if result.ending == "interrupted":
        raise KeyboardInterrupt
    return _report_failures(result)


def run_compare(args: CompareArgs) -> int:
    from rich.console import Console

    from app.bench.serve.compare import check_comparable, compare
    from app.bench.serve.result import read_result
    from app.bench.serve.table import print_comparison

    if args.picture is not None:
        from app.bench.serve.failures import require_extra

        require_extra()
    first, second = read_result(args.first, "first"), read_result(args.second, "second")
    check_comparable(first, second, str(args.first), str(args.second))
    print_comparison(first, second, compare(first, second), Console())
    if args.picture is not None:
        from app.bench.serve.picture import draw_picture

        with _writing("picture", args.picture):
            draw_picture(args.picture, [first, second])
        print(f"picture: {args.picture}")
    return 0


def _report_failures(result: RunResult) -> int:
    """-> 1 if a request was not answered whole, after one line that says why."""
    summary = result.summary
    if result.ending == "server gone":
        num_rows = len(result.rows)
        _say(
            f"error: the server at {result.server.url} went away after {summary.completed} completed requests; "
            f"{num_rows + summary.not_sent - summary.completed} were not completed"
        )
        return 1
    if not summary.failed:
        return 0
    first = next(row for row in result.rows if row.failure is not None)
    _say(
        f"error: {summary.failed} of {len(result.rows)} requests failed, the first (request {first.request}, "
        f"{first.conversation}, turn {first.turn + 1}) with {first.failure}: {first.failure_message}"
    )
    return 1


def _default_name(result: RunResult) -> str:
    cache_type = re.sub(r"[^A-Za-z0-9_.-]+", "-", result.server.cache_type or "unknown-cache")
    return f"{result.settings['workload']}-{cache_type}-{datetime.now():%Y%m%d-%H%M%S}.json"


def _check_writable(field: str, path: Path | None, suffix: str) -> None:
    """A result that cannot be saved is found out before it is measured."""
    if path is None:
        return
    if path.suffix != suffix:
        raise ConfigError(field=field, value=str(path), allowed=f"a file name that ends in {suffix}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(field=field, value=str(path), allowed="a file in a folder that exists and can be written to")


@contextlib.contextmanager
def _writing(field: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(field=field, value=str(path), allowed=f"it cannot be written: {reason}") from error


def _say(text: str) -> None:
    print(f"tpukv: {' '.join(text.split())}", file=sys.stderr)
