"""The queue of requests that have no row, the order in which they get one, and who waits for another's prefix.

The order is by priority, and within a priority by the policy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from app.core.keys import TOKEN_BYTES
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.request import Sequence

SchedulePolicy = Literal["fcfs", "lpm"]

# Probing every waiting request costs O(prompt) each; past this many, arrival order is used (as SGLang does).
LPM_QUEUE_LIMIT = 128
# Requests that may leave the queue since one was queued; then it comes first, in order of arrival: none starves.
LPM_PATIENCE = 64


class WaitingQueue:
    """Sequences without a row, in arrival order. A retracted one comes back to its old place.

    The tiers below the cache know who is in here.
    """

    def __init__(self, policy: SchedulePolicy, adapter: SchedulerAdapter) -> None:
        self._sequences: dict[str, Sequence] = {}  # in order of arrival
        self._latest = -1  # the highest arrival that was ever added
        self._num_prioritised = 0  # those with another priority than 0
        self._num_removed = 0
        self._queued_at: dict[str, int] = {}  # `_num_removed` when the sequence was queued
        self.version = 0  # grows when somebody comes or goes
        self._adapter = adapter
        orders: dict[SchedulePolicy, Callable[[], Iterable[Sequence]]] = {
            "fcfs": self._by_arrival,
            "lpm": self._by_longest_prefix,
        }
        self._order = orders[policy]

    def add(self, sequence: Sequence) -> None:
        """O(1) for a new request; O(queue) for one that comes back."""
        self._sequences[sequence.request_id] = sequence
        self._num_prioritised += sequence.request.priority != 0
        if sequence.arrival < self._latest:
            self._sequences = dict(sorted(self._sequences.items(), key=lambda item: item[1].arrival))
        self._latest = max(self._latest, sequence.arrival)
        self._queued_at[sequence.request_id] = self._num_removed
        self.version += 1
        self._adapter.tiers.expect(sequence.request_id, sequence.key)

    def remove(self, sequence: Sequence) -> None:
        """Idempotent."""
        if self._sequences.pop(sequence.request_id, None) is None:
            return
        self._num_prioritised -= sequence.request.priority != 0
        self._num_removed += 1
        del self._queued_at[sequence.request_id]
        self.version += 1
        self._adapter.tiers.forget(sequence.request_id)

    def in_order(self) -> Iterable[Sequence]:
        """Those that may be admitted now, first to be admitted first. The queue must not change meanwhile."""
        order = self._order()
        return sorted(order, key=_priority) if self._num_prioritised else order

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences.values()))

    def _by_arrival(self) -> Iterator[Sequence]:
        return (seq for seq in self._sequences.values() if not seq.owed)

    def _by_longest_prefix(self) -> Iterable[Sequence]:
        if len(self._sequences) > LPM_QUEUE_LIMIT or not self._adapter.reuses_prefixes:
            return self._by_arrival()
        overdue = self._num_removed - LPM_PATIENCE
        ranked = []
        for seq in self._by_arrival():
            is_patient = self._queued_at[seq.request_id] > overdue
            ranked.append((-self._adapter.probe_all(seq.key) if is_patient else -sys.maxsize, seq.arrival, seq))
        return [seq for _, _, seq in sorted(ranked, key=lambda each: each[:2])]


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority


class InBatchDedup:
    """Makes a request wait while another one computes the next page that it needs, instead of computing it twice.

    Bounded: each request waits at most as many planning rounds as the prompt it waits for could take in chunks, twice.
    """

    def __init__(self, adapter: SchedulerAdapter, chunk_tokens: int, unit_tokens: int) -> None:
        """unit_tokens: what a prefix is published by: a page, or more where only snapshots make it usable."""
        self._adapter = adapter
        self._unit_tokens = unit_tokens
        self._chunk_tokens = chunk_tokens

    def should_wait(self, sequence: Sequence, computing: Iterable[Sequence]) -> bool:
        """`computing`: sequences with a row whose prompt is not all published yet, those of this plan included."""
        if not self._adapter.reuses_prefixes or sequence.dedup_waits >= self._limit(sequence):
            return False
        peers = [peer for peer in computing if peer.request.namespace == sequence.request.namespace]
        if not peers:
            return False
        key = sequence.key
        # A match never covers the last token, so the page must end before it.
        wanted = (self._adapter.probe(key) // self._unit_tokens + 1) * self._unit_tokens * TOKEN_BYTES
        if wanted >= len(key.raw):
            return False
        head = key.raw[:wanted]
        if not any(peer.key.raw.startswith(head) for peer in peers):
            return False
        sequence.dedup_waits += 1
        return True

    def _limit(self, sequence: Sequence) -> int:
        return 2 + 2 * -(-sequence.known // self._chunk_tokens)
