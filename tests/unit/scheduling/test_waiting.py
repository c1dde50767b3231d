"""The queue's order, and waiting for another request's prefix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from app.caches.tiers.ports import NO_TIERS, CacheTiers
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey
from app.core.sampling import SamplingParams
from app.scheduling.request import Request, Sequence
from app.scheduling.waiting import LPM_PATIENCE, LPM_QUEUE_LIMIT, InBatchDedup, WaitingQueue

PAGE_SIZE = 4


@dataclass
class Cache:
    """What queue and dedup ask of the adapter: a cache that holds some prefixes."""

    cached: dict[bytes, int] = field(default_factory=dict)
    below: dict[bytes, int] = field(default_factory=dict)  # in a lower tier
    reuses_prefixes: bool = True
    page_size: int = PAGE_SIZE
    probes: int = 0
    tiers: CacheTiers = NO_TIERS

    def probe(self, key: RadixKey) -> int:
        self.probes += 1
        return self.cached.get(key.raw, 0)

    def probe_all(self, key: RadixKey) -> int:
        return max(self.probe(key), self.below.get(key.raw, 0))


def sequence_of(arrival: int, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> Sequence:
    request = Request(request_id=f"r{arrival}", prompt_token_ids=np.array(tokens, np.int32), namespace=namespace)
    return Sequence(request, SamplingParams(seed=0), arrival)


def order_of(queue: WaitingQueue) -> list[int]:
    return [sequence.arrival for sequence in queue.in_order()]


def test_arrival_order_survives_removal_and_return() -> None:
    queue = WaitingQueue("fcfs", Cache())
    sequences = [sequence_of(index, [index]) for index in range(5)]
    for sequence in sequences:
        queue.add(sequence)

    for index in (0, 3, 1):
        queue.remove(sequences[index])
        queue.remove(sequences[index])
    assert order_of(queue) == [2, 4]

    for index in (3, 0, 1):
        queue.add(sequences[index])
    assert order_of(queue) == [0, 1, 2, 3, 4]
    assert len(queue) == 5


def test_who_is_owed_a_token_is_passed_over() -> None:
    queue = WaitingQueue("fcfs", Cache())
    first, second = sequence_of(0, [1]), sequence_of(1, [2])
    queue.add(first)
    queue.add(second)
    first.owed = True

    assert order_of(queue) == [1]
    assert len(queue) == 2


def test_lpm_puts_longer_prefixes_first_and_equals_by_arrival() -> None:
    cache = Cache()
    queue = WaitingQueue("lpm", cache)
    for arrival, cached in enumerate((0, 8, 4, 8)):
        sequence = sequence_of(arrival, [arrival] * 12)
        cache.cached[sequence.key.raw] = cached
        queue.add(sequence)

    assert order_of(queue) == [1, 3, 2, 0]


def test_lpm_counts_what_a_lower_tier_has() -> None:
    cache = Cache()
    queue = WaitingQueue("lpm", cache)
    for arrival, (cached, below) in enumerate([(4, 0), (8, 4), (4, 12), (0, 0)]):
        sequence = sequence_of(arrival, [arrival] * 16)
        cache.cached[sequence.key.raw], cache.below[sequence.key.raw] = cached, below
        queue.add(sequence)

    assert order_of(queue) == [2, 1, 0, 3]


def test_lpm_lets_nobody_starve() -> None:
    """Warm requests keep coming: those that were passed by often enough come first, in order of arrival."""
    cache = Cache()
    queue = WaitingQueue("lpm", cache)
    for arrival in (0, 1):
        queue.add(sequence_of(arrival, [arrival] * 12))
    passed = 0
    for arrival in range(2, 2 * LPM_PATIENCE):
        warm = sequence_of(arrival, [7] * 12)
        cache.cached[warm.key.raw] = 8
        queue.add(warm)
        first = next(iter(queue.in_order()))
        if first is not warm:
            break
        queue.remove(warm)
        passed += 1

    assert passed == LPM_PATIENCE
    assert order_of(queue)[:2] == [0, 1]


@pytest.mark.parametrize(("size", "reuses"), [(LPM_QUEUE_LIMIT + 1, True), (5, False)])
def test_lpm_asks_nothing_when_it_would_cost_too_much_or_gain_nothing(size: int, reuses: bool) -> None:
    cache = Cache(reuses_prefixes=reuses)
    queue = WaitingQueue("lpm", cache)
    for arrival in range(size):
        queue.add(sequence_of(arrival, [1, 2]))

    assert order_of(queue) == list(range(size))
    assert cache.probes == 0


def test_fcfs_looks_no_further_than_it_is_asked() -> None:
    """The order of a long queue costs nothing for those who do not get in."""
    queue = WaitingQueue("fcfs", Cache())
    for arrival in range(10_000):
        queue.add(sequence_of(arrival, [1]))

    order = iter(queue.in_order())

    assert next(order).arrival == 0
    assert not isinstance(order, list)


# -- waiting for a prefix ------------------------------------------------------------------------------------------

LONG = list(range(20))


@pytest.mark.parametrize(
    ("mine", "peer", "waits"),
    [
        ([*LONG, 1], [*LONG, 2], True),
        (LONG[:5], [*LONG, 2], True),
        (LONG[:4], [*LONG, 2], False),  # a match never covers the last token
        ([*LONG[:3], 99, 1, 2], [*LONG, 2], False),  # they part within the page
        ([*LONG, 1], LONG[:3], False),  # the peer computes no whole page
        ([*LONG, 1], LONG[:4], True),
    ],
)
def test_one_waits_when_a_whole_page_is_gained(mine: list[int], peer: list[int], waits: bool) -> None:
    dedup = InBatchDedup(Cache(), chunk_tokens=16, unit_tokens=PAGE_SIZE)

    assert dedup.should_wait(sequence_of(1, mine), [sequence_of(0, peer)]) is waits


def test_one_waits_only_for_pages_that_are_not_cached_yet() -> None:
    cache = Cache()
    dedup = InBatchDedup(cache, chunk_tokens=16, unit_tokens=PAGE_SIZE)
    mine = sequence_of(1, [*LONG[:8], 1, 2])

    assert dedup.should_wait(mine, [sequence_of(0, LONG)])
    cache.cached[mine.key.raw] = 8

    assert not dedup.should_wait(mine, [sequence_of(0, LONG)])


def test_nobody_waits_without_peers_reuse_or_a_common_namespace() -> None:
    peer = sequence_of(0, LONG)

    assert not InBatchDedup(Cache(), 16, PAGE_SIZE).should_wait(sequence_of(1, LONG), [])
    assert not InBatchDedup(Cache(reuses_prefixes=False), 16, PAGE_SIZE).should_wait(sequence_of(1, LONG), [peer])
    other = sequence_of(1, LONG, Namespace(salt=""))
    assert not InBatchDedup(Cache(), 16, PAGE_SIZE).should_wait(other, [peer])


@pytest.mark.parametrize(("chunk", "rounds"), [(100, 4), (20, 4), (5, 10)])
def test_waiting_ends_after_twice_the_chunks_of_the_prompt(chunk: int, rounds: int) -> None:
    dedup = InBatchDedup(Cache(), chunk_tokens=chunk, unit_tokens=PAGE_SIZE)
    mine, peer = sequence_of(1, LONG), sequence_of(0, [*LONG, 1])

    waits = [dedup.should_wait(mine, [peer]) for _ in range(rounds + 5)]

    assert waits == [True] * rounds + [False] * 5
