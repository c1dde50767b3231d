"""Whose every page of one pool is."""

from __future__ import annotations

import numpy as np

from app.core.ports import TokenAllocator
from app.errors import IntegrityError


def page_classes(
    allocator: TokenAllocator, cached: tuple[np.ndarray, np.ndarray], requests: np.ndarray, restoring: np.ndarray
) -> dict[str, np.ndarray]:
    """Page ids by class, (n,) int32 each. cached: evictable and protected ones. O(capacity)."""
    return {
        "cached_evictable": cached[0],
        "cached_protected": cached[1],
        "requests": requests,
        "restoring": restoring,
        "recorded": allocator.recorded_frees(),
        "free": allocator.free_page_ids(),
    }


def check_ledger(what: str, classes: dict[str, np.ndarray], capacity: int) -> None:
    """Raise IntegrityError unless the classes are disjoint and together are 1..capacity. O(capacity)."""
    owners = np.zeros(capacity + 1, np.int32)
    for pages in classes.values():
        np.add.at(owners, pages, 1)
    double = np.flatnonzero(owners[1:] > 1) + 1
    leaked = np.flatnonzero(owners[1:] == 0) + 1
    if double.size or leaked.size or owners[0]:
        counts = {name: int(pages.size) for name, pages in classes.items()}
        raise IntegrityError(
            owner=f"ledger of {what}",
            broken=f"double owned: {double[:8].tolist()} ({double.size}), leaked: {leaked[:8].tolist()} "
            f"({leaked.size}), padding page owned: {bool(owners[0])}; counts {counts}, capacity {capacity}",
        )
