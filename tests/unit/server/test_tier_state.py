"""Figures of tiers in words: nothing is lost on the way, and nothing divides by zero."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.caches.tiers.counters import TierCounters
from app.caches.tiers.storage_counters import StorageTierTotals
from app.hicache.counters import DirectionCounters
from app.hicache.counters import TierCounters as MoveCounters
from app.hicache.storage.base import Operation, Outcome
from app.hicache.storage.counters import StorageCounters
from app.hicache.storage.workers import WorkerLoad
from app.observability.tier_metrics import TIER_METRICS
from app.server.tier_state import TierReading, figures_of, state_of

LOAD = WorkerLoad(queued_reads=1, queued_writes=2, queued_bytes=3, running=4, given_up=0, breaker_open=True)
READING = TierReading(
    page_size=4,
    control=TierCounters(
        backed_up_tokens=40,
        num_host_pages=10,
        num_host_pages_free=3,
        backup_drops={"no_room": 2},
        storage=StorageTierTotals(stored_tokens=8).snapshot(queued_prefixes=1, queued_stores=2, under_way=3),
    ),
    moved=MoveCounters(backup=DirectionCounters(seconds=3.0, num_bytes=99), waited_s=1.0),
    storage=StorageCounters(),
    load=None,
    is_attached=False,
)


def test_every_metric_gets_samples_with_its_labels() -> None:
    storage = StorageCounters()
    storage.count(Operation.GET, [Outcome.HIT], 1)
    moved = MoveCounters()
    moved.store.failures["late"] = 1

    figures = figures_of(replace(READING, storage=storage, load=LOAD, moved=moved))

    assert figures.keys() == TIER_METRICS.keys()
    for name, samples in figures.items():
        assert samples, name
        assert all(len(labels) == len(TIER_METRICS[name].labels) for labels in samples), name
    assert figures["storage_outcomes"] == {("get", "hit"): 1}
    assert figures["hicache_failures"] == {("store", "late"): 1}
    assert figures["hicache_drops"] == {("backup", "no_room"): 2}
    assert figures["storage_breaker_open"] == {(): True}


@pytest.mark.parametrize(
    ("copied_s", "waited_s", "hidden"), [(0.0, 0.0, 1.0), (0.0, 5.0, 1.0), (4.0, 1.0, 0.75), (1.0, 9.0, 0.0)]
)
def test_what_was_waited_for_is_not_hidden(copied_s: float, waited_s: float, hidden: float) -> None:
    moved = MoveCounters(restore=DirectionCounters(seconds=copied_s), waited_s=waited_s)
    assert replace(READING, moved=moved).hidden_ratio == hidden


def test_the_state_is_json_with_and_without_a_storage() -> None:
    without, with_one = (
        json.loads(json.dumps(state_of(each))) for each in (READING, replace(READING, load=LOAD, is_attached=True))
    )

    assert (without["host"]["used_tokens"], without["host"]["total_tokens"]) == (28, 40)
    assert (without["storage"]["attached"], without["storage"]["workers"]) == (False, None)
    assert with_one["storage"]["workers"]["breaker_open"] is True
