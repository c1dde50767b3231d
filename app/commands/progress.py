"""What is being done while a model converts, loads and compiles: on stderr, and only where somebody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1."""


@contextlib.contextmanager
def progress_bars() -> Iterator[Report]:
    """A bar for each stage that is reported, while the context lasts; nothing at all if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield report


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
