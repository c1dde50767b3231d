"""Page ids of the nodes of a path, one run of them a node."""

from __future__ import annotations

import numpy as np


def sealed(pages: np.ndarray) -> np.ndarray:
    """The tree hands out its own arrays, so nobody may write to them."""
    pages.setflags(write=False)
    return pages


def joined(runs: list[np.ndarray]) -> np.ndarray:
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def spans(runs: list[np.ndarray], first: int, end: int) -> tuple[tuple[int, int], ...]:
    """(first page index, page count) of each run that ends by page index `end`, if they begin at `first`."""
    found = []
    for run in runs:
        if first == end:
            break
        found.append((first, run.size))
        first += run.size
    return tuple(found)
