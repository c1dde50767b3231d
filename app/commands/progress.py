"""What is being done while a model converts, loads and compiles: on stderr, and only where somebody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1."""


@contextlib.contextmanager
def progress_bar() -> Iterator[Report]:
    """One bar, with the stage that was reported last, while the context lasts; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda stage, fraction: bars.update(task, description=stage, completed=fraction)


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
