"""The journal: bounded, by the second, and what a snapshot shows no later write changes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import pytest

from app.observability.cache_journal import CacheJournal


@dataclass
class Watch:
    now: float = 5000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def journal(watch: Watch) -> CacheJournal:
    return CacheJournal(watch)


def admit(journal: CacheJournal, request_id: str = "r", prompt: int = 10, cached: int = 4) -> None:
    journal.admitted(
        request_id=request_id,
        prompt_tokens=prompt,
        cached_tokens=cached,
        reason="ends",
        sentence="It ends.",
        in_namespace=False,
    )


def evict(journal: CacheJournal, num_tokens: int = 16, head: tuple[int, ...] = (1, 2)) -> None:
    journal.evicted(num_tokens=num_tokens, prefix_tokens=32, idle_s=1.5, hits=3, head=array("i", head).tobytes())


def seconds(journal: CacheJournal) -> list[tuple[int, int, int, int]]:
    return [
        (each.second, each.prompt_tokens, each.cached_tokens, each.evicted_tokens)
        for each in journal.snapshot().seconds
    ]


def test_tokens_are_added_up_by_the_second(journal: CacheJournal, watch: Watch) -> None:
    # when
    admit(journal, prompt=10, cached=4)
    evict(journal, 16)
    watch.now += 0.7
    admit(journal, prompt=20, cached=0)
    watch.now += 0.1
    evict(journal, 8)
    watch.now += 60
    admit(journal, prompt=1, cached=0)

    # then
    assert seconds(journal) == [(5000, 30, 4, 16), (5001, 0, 0, 8), (5061, 1, 0, 0)]


def test_what_is_older_than_a_quarter_of_an_hour_is_not_told(journal: CacheJournal, watch: Watch) -> None:
    # given something in each second of twenty minutes
    for _ in range(1200):
        watch.now += 1
        admit(journal)

    # then
    told = seconds(journal)
    assert (len(told), told[0][0], told[-1][0]) == (900, 5301, 6200)

    # when nothing happens for a while
    watch.now += 890
    assert [second for second, *_ in seconds(journal)] == list(range(6191, 6201))
    watch.now += 100
    assert seconds(journal) == []


def test_the_last_admissions_and_evictions_are_kept_latest_first(journal: CacheJournal, watch: Watch) -> None:
    # given
    for index in range(200):
        watch.now += 1
        admit(journal, request_id=str(index))
        evict(journal, num_tokens=index)

    # then
    snapshot = journal.snapshot()
    assert [each.request_id for each in snapshot.admissions] == [str(index) for index in range(199, 135, -1)]
    assert [each.num_tokens for each in snapshot.evictions] == list(range(199, 135, -1))
    assert snapshot.admissions[0].at == snapshot.evictions[0].at == snapshot.at == watch.now


def test_an_admission_and_an_eviction_are_told_as_they_were_written(journal: CacheJournal, watch: Watch) -> None:
    # when
    journal.admitted(
        request_id="a",
        prompt_tokens=40,
        cached_tokens=16,
        reason="differs",
        sentence="One differs.",
        in_namespace=True,
        same=(1, 2),
        prompt_goes_on=(3,),
        cached_goes_on=(4, 5),
    )
    evict(journal, head=(7, -1, 2**31 - 1))

    # then
    (admission,), (eviction,) = journal.snapshot().admissions, journal.snapshot().evictions
    assert (admission.at, admission.request_id, admission.prompt_tokens, admission.cached_tokens) == (
        watch.now,
        "a",
        40,
        16,
    )
    assert (admission.reason, admission.sentence, admission.in_namespace) == ("differs", "One differs.", True)
    assert (admission.same, admission.prompt_goes_on, admission.cached_goes_on) == ((1, 2), (3,), (4, 5))
    assert (eviction.num_tokens, eviction.prefix_tokens, eviction.idle_s, eviction.hits) == (16, 32, 1.5, 3)
    assert eviction.head == (7, -1, 2**31 - 1)


def test_a_snapshot_stays_as_it_was(journal: CacheJournal) -> None:
    # given
    admit(journal)
    evict(journal)
    before = journal.snapshot()
    copy = replace(before)

    # when the same second goes on
    admit(journal)
    evict(journal)

    # then
    assert before == copy
    assert before.seconds[0].prompt_tokens == 10
    assert (len(before.admissions), len(before.evictions)) == (1, 1)
