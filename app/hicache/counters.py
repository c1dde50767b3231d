"""What the host tier moved, in plain figures."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from app.core.transfers import TransferEnd


@dataclass(slots=True)
class DirectionCounters:
    """Totals of one direction since the start. seconds: summed over transfers, which may run side by side."""

    num_transfers: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_refused: int = 0  # by prepare
    failures: Counter[str] = field(default_factory=Counter)

    def count(self, end: TransferEnd, num_pages: int) -> None:
        """num_pages: that were to be moved."""
        self.num_transfers += 1
        self.num_bytes += end.num_bytes
        self.seconds += end.seconds
        if end.arrived is not None:
            self.num_pages += sum(int(each.sum()) for each in end.arrived)
        elif end.failure is None:
            self.num_pages += num_pages
        if end.failure is not None:
            self.failures[end.failure] += 1


@dataclass(slots=True)
class TierCounters:
    """Totals since the start, and the staging memory.

    waited_s: that nothing else was done while something was waited for, in plans without rows. All other time of a copy
    lay behind steps.
    """

    backup: DirectionCounters = field(default_factory=DirectionCounters)
    restore: DirectionCounters = field(default_factory=DirectionCounters)
    store: DirectionCounters = field(default_factory=DirectionCounters)
    fetch: DirectionCounters = field(default_factory=DirectionCounters)
    lookup: DirectionCounters = field(default_factory=DirectionCounters)
    waited_s: float = 0.0
    staging_bytes: int = 0
    most_staging_bytes: int = 0

    def snapshot(self) -> TierCounters:
        return copy.deepcopy(self)
