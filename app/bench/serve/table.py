"""A result as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.bench.serve.compare import Compared
from app.bench.serve.result import RunResult, Spread, Summary

SAMPLES_FOR = {"p95": 20, "p99": 100}  # with fewer the percentile is the largest sample

_ENDINGS = {
    "complete": "",
    "interrupted": "interrupted: the figures are over what was done until then",
    "server gone": "the server went away: the figures are over what was done until then",
}


def print_run(result: RunResult, console: Console) -> None:
    """What was sent to what, how long it took, what was reused, what failed, and what to know about it."""
    server, summary = result.server, result.summary
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items() if value is not None)
    console.print(
        f"{escape(result.label)}, page {server.page_size or 'unknown'}, {escape(server.url)}", highlight=False
    )
    console.print(escape(settings), highlight=False)
    times = _shown_times(result)
    console.print(_times(times))
    console.print(_totals(summary))
    notes = [_ENDINGS[result.ending], *result.notes]
    if any(_thin_marks(spread) for _, spread in times):
        needed = " and ".join(f"{name} needs {least}" for name, least in SAMPLES_FOR.items())
        notes.append(f"* too few samples, so this is the largest one ({needed})")
    for note in filter(None, notes):
        console.print(f"note: {escape(note)}", highlight=False)


def print_comparison(first: RunResult, second: RunResult, compared: Sequence[Compared], console: Console) -> None:
    """Every figure of both with its ratio, then what to know about each run."""
    for name, result in (("first", first), ("second", second)):
        server = result.server
        about = f"{name}: {result.label}, page {server.page_size or 'unknown'}, {server.url}, {result.started_at}"
        console.print(escape(about), highlight=False)
    table = Table()
    table.add_column("figure")
    for name in ("unit", "first", "second", "second / first"):
        table.add_column(name, justify="right" if name != "unit" else "left")
    for row in compared:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.name, row.unit, _number(row.first), _number(row.second), ratio)
    console.print(table)
    completed = (first.summary.completed, second.summary.completed)
    if completed[0] != completed[1]:
        console.print(f"note: the figures are over {completed[0]} and {completed[1]} requests: not the same prompts")
    for name, result in (("first", first), ("second", second)):
        for note in result.notes:
            console.print(f"note on {name}: {escape(note)}", highlight=False)


def _shown_times(result: RunResult) -> list[tuple[str, Spread]]:
    summary = result.summary
    rows = [
        ("TTFT, to the first text", summary.ttft),
        ("ITL, between events with text", summary.itl),
        ("TPOT, per token after the first", summary.tpot),
        ("E2E, the whole reply", summary.e2e),
    ]
    if result.settings.get("rate") != "0":  # else nothing is due at a time
        rows.append(("sent late, all slots taken", summary.late))
    return [(title, spread) for title, spread in rows if spread is not None]


def _times(rows: Sequence[tuple[str, Spread]]) -> Table:
    table = Table(title="times in ms")
    table.add_column("what")
    for name in ("n", "mean", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for title, spread in rows:
        table.add_row(title, str(spread.n), *_cells(spread))
    return table


def _cells(spread: Spread) -> Iterator[str]:
    marks = _thin_marks(spread)
    values = {"mean": spread.mean, "p50": spread.p50, "p95": spread.p95, "p99": spread.p99, "max": spread.max}
    for name, seconds in values.items():
        yield f"{1e3 * seconds:,.1f}{'*' if name in marks else ''}"


def _thin_marks(spread: Spread) -> list[str]:
    """The percentiles that this many samples do not carry."""
    return [name for name, least in SAMPLES_FOR.items() if spread.n < least]


def _totals(summary: Summary) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    failures = ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())
    rows = (
        ("requests completed / failed / not sent", f"{summary.completed} / {summary.failed} / {summary.not_sent}"),
        ("failures", failures or "none"),
        ("duration", f"{summary.duration_s:,.1f} s"),
        ("requests", f"{summary.requests_per_s:,.2f} / s"),
        ("prompt tokens", f"{summary.prompt_tokens:,}, {summary.prompt_tokens_per_s:,.1f} / s"),
        ("output tokens", f"{summary.output_tokens:,}, {summary.output_tokens_per_s:,.1f} / s"),
        (
            "prompt tokens from the cache",
            "not reported" if summary.cached_tokens is None else f"{summary.cached_tokens:,}",
        ),
        ("token hit rate, measured", _percent(summary.hit_rate)),
        ("token hit rate, ideal (one request at a time)", _percent(summary.ideal_hit_rate)),
        ("measured / ideal", _percent(summary.of_ideal)),
    )
    for name, text in rows:
        table.add_row(name, escape(text))
    return table


def _percent(rate: float | None) -> str:
    return "not known" if rate is None else f"{100 * rate:.2f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
