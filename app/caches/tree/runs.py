"""Page ids of the nodes of a path, one run of them a node."""

from __future__ import annotations

import numpy as np


def sealed(pages: np.ndarray) -> np.ndarray:
    """The tree hands out its own arrays, so nobody may write to them."""
    pages.setflags(write=False)
    return pages


def joined(runs: list[np.ndarray]) -> np.ndarray:
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def spans(runs: list[np.ndarray], num_pages: int) -> tuple[tuple[int, int], ...]:
    """(first page index, page count) of each run within the first `num_pages` pages."""
    found = []
    first = 0
    for run in runs:
        if first == num_pages:
            break
        found.append((first, run.size))
        first += run.size
    return tuple(found)
