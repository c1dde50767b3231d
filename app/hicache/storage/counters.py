"""What a storage tier did, in plain figures."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.hicache.storage.base import Operation, Outcome

_NUM_BUCKETS = 40


@dataclass(slots=True)
class LatencyHistogram:
    """Times of calls. Bucket i counts those below 2**i microseconds and not below half of that."""

    buckets: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)
    num_calls: int = 0
    total_ns: int = 0

    def observe(self, elapsed_ns: int) -> None:
        self.buckets[min((elapsed_ns // 1000).bit_length(), _NUM_BUCKETS - 1)] += 1
        self.num_calls += 1
        self.total_ns += elapsed_ns

    def quantile_us(self, share: float) -> int:
        """An upper bound, at most twice the true one; 0 before the first call."""
        wanted = share * self.num_calls
        seen = 0
        for index, count in enumerate(self.buckets):
            seen += count
            if count and seen >= wanted:
                return int(2**index)
        return 0


@dataclass(slots=True)
class StorageCounters:
    """Totals since the start. Every key that was asked for is counted once, by what became of it."""

    outcomes: dict[Operation, Counter[Outcome]] = field(default_factory=lambda: {each: Counter() for each in Operation})
    latency: dict[Operation, LatencyHistogram] = field(
        default_factory=lambda: {each: LatencyHistogram() for each in Operation}
    )  # of calls to the storage, each of one or more keys
    read_bytes: int = 0  # payload of hits
    written_bytes: int = 0  # payload of what was stored
    num_retries: int = 0  # keys asked for once more
    num_too_late: int = 0  # keys whose call came back after they had been given up
    num_callback_errors: int = 0

    def count(self, operation: Operation, outcomes: Iterable[Outcome], page_bytes: int) -> None:
        """`page_bytes`: payload of one page."""
        new = Counter(outcomes)
        self.outcomes[operation] += new
        if operation is Operation.GET:
            self.read_bytes += new[Outcome.HIT] * page_bytes
        self.written_bytes += new[Outcome.STORED] * page_bytes

    def snapshot(self) -> StorageCounters:
        return copy.deepcopy(self)
