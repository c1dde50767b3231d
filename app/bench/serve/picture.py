"""One or two runs as a picture of four panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.bench.serve.result import RequestRow, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 1600, 1000  # pixels

_DOTS_PER_INCH = 100
_COLOURS = ("#1f6fb4", "#d9722b")
_DARK = ("#0b2f4f", "#6b2f08")
_LINES = ("-", (0, (5, 2)))
_SPANS = 40  # parts of a run for the throughput


def draw_picture(path: Path, runs: Sequence[RunResult]) -> None:
    """Write a PNG of 1600 x 1000 pixels: one run, or two over each other. Replaces the file. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / _DOTS_PER_INCH, HEIGHT / _DOTS_PER_INCH), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(runs), fontsize=14)
    grid = figure.add_gridspec(2, 2)
    _first_text_over_time(figure.add_subplot(grid[0, 0]), runs)
    _first_text_distribution(figure.add_subplot(grid[0, 1]), runs)
    _hit_rate(figure.add_subplot(grid[1, 0]), runs)
    halves = grid[1, 1].subgridspec(2, 1, hspace=0.08)
    upper = figure.add_subplot(halves[0])
    _throughput(upper, runs, "prompt tokens / s", _prompt_events)
    _throughput(figure.add_subplot(halves[1], sharex=upper), runs, "output tokens / s", _output_events)
    upper.set_title("Throughput")
    upper.set_xlabel("")
    upper.tick_params(labelbottom=False)
    figure.savefig(path, format="png")


def _title(runs: Sequence[RunResult]) -> str:
    first = runs[0]
    shown = ("concurrency", "rate", "max_tokens", "length_scale")
    settings = [f"{name.replace('_', ' ')} {first.settings[name]}" for name in shown if name in first.settings]
    names = " and ".join(dict.fromkeys(run.label for run in runs))
    return f"{first.settings.get('workload', 'workload')}: {names}\n{', '.join(settings)}"


def _first_text_over_time(axes: Axes, runs: Sequence[RunResult]) -> None:
    for run, name, colour, _line in _styled(runs):
        rows = _answered(run)
        times = [1e3 * (row.delta_s[0] - row.sent_s) for row in rows]
        axes.scatter([row.sent_s for row in rows], times, s=18, alpha=0.7, color=colour, label=name)
        failed = [row.sent_s for row in run.rows if row.failure is not None]
        if failed:
            # x in seconds, y as a part of the panel's height: failures have no time to show
            axes.scatter(
                failed,
                [0.02] * len(failed),
                marker="x",
                color=colour,
                transform=axes.get_xaxis_transform(),
                label=f"{name}: failed ({len(failed)})",
            )
    _finish(axes, "Time to first text, by request", "sent after (s)", "ms")


def _first_text_distribution(axes: Axes, runs: Sequence[RunResult]) -> None:
    for run, name, colour, line in _styled(runs):
        times = np.sort([1e3 * (row.delta_s[0] - row.sent_s) for row in _answered(run)])
        if times.size:
            share = 100 * np.arange(1, times.size + 1) / times.size
            spread = run.summary.ttft
            label = name if spread is None else f"{name}: p50 {1e3 * spread.p50:,.0f}, p95 {1e3 * spread.p95:,.0f} ms"
            axes.step(times, share, where="post", color=colour, linestyle=line, label=f"{label}, n {times.size}")
    axes.set_ylim(0, 102)
    _finish(axes, "Time to first text: requests that had it within", "ms", "% of requests")


def _hit_rate(axes: Axes, runs: Sequence[RunResult]) -> None:
    """By turn where conversations have several; else over the run."""
    several = any(row.turn > 0 for run in runs for row in run.rows)
    highest = 0.0
    groups, label = (_by_turn, "turn of the conversation") if several else (_so_far, "requests so far")
    for (run, name, colour, line), dark in zip(_styled(runs), _DARK, strict=False):
        rows = [row for row in run.rows if row.failure is None]
        places, grouped = groups(rows)
        marker = "o" if several else None
        measured = [_rate([row.cached_tokens for row in group], group) for group in grouped]
        ideal = [_rate([row.ideal_cached_tokens for row in group], group) for group in grouped]
        axes.plot(places, measured, color=colour, linestyle=line, marker=marker, label=f"{name}: measured")
        # dark and on top: a good cache's line lies on its ideal
        axes.plot(places, ideal, color=dark, linestyle=":", linewidth=2, zorder=3, label=f"{name}: ideal")
        highest = max(highest, *np.nan_to_num([*measured, *ideal, 0.0]))
    axes.set_ylim(0, min(102.0, 1.3 * highest) or 102.0)
    _finish(axes, "Prompt tokens from the cache", label, "% of prompt tokens")


def _throughput(
    axes: Axes, runs: Sequence[RunResult], label: str, events: Callable[[RequestRow], list[tuple[float, float]]]
) -> None:
    ends = [row.end_s for run in runs for row in _answered(run)]
    edges = np.linspace(0.0, max(ends, default=1.0), _SPANS + 1)
    for run, name, colour, line in _styled(runs):
        counted = [event for row in _answered(run) for event in events(row)]
        if counted:
            seconds, tokens = (np.array(column) for column in zip(*counted, strict=True))
            summed, _ = np.histogram(seconds, edges, weights=tokens)
            axes.stairs(summed / (edges[1] - edges[0]), edges, color=colour, linestyle=line, label=name)
    _finish(axes, "", "after (s)", label)


def _prompt_events(row: RequestRow) -> list[tuple[float, float]]:
    """A prompt counts when the first text is there."""
    return [(row.delta_s[0], row.prompt_tokens)]


def _output_events(row: RequestRow) -> list[tuple[float, float]]:
    """An event counts as an equal share of the reply's tokens."""
    return [(second, row.completion_tokens / len(row.delta_s)) for second in row.delta_s]


def _by_turn(rows: Sequence[RequestRow]) -> tuple[list[int], list[list[RequestRow]]]:
    turns = sorted({row.turn for row in rows})
    return [turn + 1 for turn in turns], [[row for row in rows if row.turn == turn] for turn in turns]


def _so_far(rows: Sequence[RequestRow]) -> tuple[list[int], list[list[RequestRow]]]:
    """Up to 200 points, each over all requests before it."""
    places = [int(place) for place in np.unique(np.linspace(1, len(rows), 200).round())] if rows else []
    return places, [list(rows[:place]) for place in places]


def _rate(tokens: Sequence[int | None], rows: Sequence[RequestRow]) -> float:
    """Per cent; NaN, which draws nothing, where a count is not known."""
    known = [count for count in tokens if count is not None]
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    return 100 * sum(known) / prompt_tokens if len(known) == len(rows) and prompt_tokens else float("nan")


def _answered(run: RunResult) -> list[RequestRow]:
    """Completed requests with some text."""
    return [row for row in run.rows if row.failure is None and row.delta_s]


def _styled(runs: Sequence[RunResult]) -> list[tuple[RunResult, str, str, str | tuple[int, tuple[int, int]]]]:
    """-> run, name for the legend, colour, line. Runs with the same name are numbered."""
    names = [run.label for run in runs]
    if len(set(names)) < len(names):
        names = [f"{place}. {name}" for place, name in enumerate(names, 1)]
    return list(zip(runs, names, _COLOURS, _LINES, strict=False))


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
