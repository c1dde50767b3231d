"""Control of the host tier: what is backed up and restored, and what becomes of it when something goes wrong."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.builtin import load_builtin_caches
from app.caches.registry import default_registry
from app.caches.tiers.offers import MAX_OFFERS
from app.caches.tiers.span import Span
from app.config.model_config import Component
from app.config.tier_settings import TierSettings
from app.core.keys import Namespace
from app.core.transfers import Backup, PageCounts, PageIds, PreparedTransfers, Restore, TransferEnd
from app.errors import ConfigError
from tests.support.tier_runtime import AT_ONCE, PAGE_BYTES, Fate, TierRig
from tests.support.tree_model import key_of

FULL, SWA, RECURRENT = Component
WRITE_BACK = TierSettings(write_policy="write_back")
X = [1, 1, 2, 2, 3, 3, 4, 4, 99]
Y = [5, 5, 6, 6, 7, 7, 8, 8, 99]


def moved_down(rig: TierRig, tokens: list[int]) -> None:
    """Computed, and now on the host alone."""
    rig.serve(tokens)
    rig.drain()
    rig.cache.evict(100)
    rig.step()
    rig.drain()
    assert (rig.device_has(tokens), rig.host_has(tokens)) == (0, 4)


def waits_for_restore(rig: TierRig, tokens: list[int], request_id: str = "r") -> PageCounts:
    """A request for which a restore was begun with all the room there is."""
    key = key_of(tokens)
    rig.tiers.expect(request_id, key)
    return rig.tiers.begin_restore(request_id, key, rig.reachable())


def test_a_prefix_that_was_evicted_comes_back_with_what_it_held() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)

    assert rig.serve(X) == 8

    assert rig.tiers.counters().restored_tokens == 8
    rig.check()


def test_restored_tokens_are_told_of_a_request_even_after_it_is_forgotten() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    waits_for_restore(rig, X)
    rig.drain()
    assert rig.tiers.restored_tokens("r").host == 8

    rig.tiers.forget("r")

    assert rig.tiers.restored_tokens("r").host == 8
    rig.tiers.expect("r", key_of(X))
    assert rig.tiers.restored_tokens("r").host == 0


def test_write_through_backs_up_what_is_published_while_it_stays_on_the_device() -> None:
    rig = TierRig()

    rig.serve(X)
    rig.drain()

    assert (rig.device_has(X), rig.host_has(X)) == (4, 4)


def test_selective_backs_up_what_was_matched_twice_and_not_by_one_request_that_waits() -> None:
    rig = TierRig(settings=TierSettings(write_policy="write_through_selective", write_min_hits=2))
    rig.serve(X)
    waiting = key_of(X)
    for _ in range(5):
        rig.cache.match(waiting)
    rig.drain()
    assert rig.host_has(X) == 0

    rig.serve(X)
    rig.drain()

    assert rig.host_has(X) == 4


def test_selective_lets_die_what_nobody_came_back_for() -> None:
    rig = TierRig(settings=TierSettings(write_policy="write_through_selective", write_min_hits=2))
    rig.serve(X)

    rig.cache.evict(100)
    rig.drain()

    assert rig.host_has(X) == 0


def test_write_back_copies_only_what_is_about_to_go_with_its_whole_path() -> None:
    rig = TierRig(settings=WRITE_BACK)
    rig.serve([*X[:4], 99])
    rig.serve(X)
    rig.drain()
    assert rig.host_has(X) == 0

    rig.cache.evict(1)  # the leaf, pages 2 and 3; the two before it stay
    rig.step()
    rig.drain()

    assert (rig.device_has(X), rig.host_has(X)) == (2, 4)


def test_a_flush_backs_up_nothing_and_empties_the_host() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    rig.serve(Y)

    rig.cache.flush()
    rig.drain()

    assert (rig.host_has(X), rig.host_has(Y), rig.device_has(Y)) == (0, 0, 0)
    rig.check()


@pytest.mark.parametrize("failure", ["failed", "late"])
def test_a_backup_that_failed_is_not_backed_up_and_its_pages_are_free(failure: str) -> None:
    rig = TierRig(fate=lambda intent: Fate(1, failure))
    rig.serve(X)

    rig.drain()

    assert rig.host_has(X) == 0
    assert rig.tiers.counters().backup_drops == {failure: 1}
    rig.check()
    rig.fate = lambda intent: AT_ONCE
    rig.cache.evict(100)
    rig.drain()
    assert rig.host_has(X) == 4, "it may be backed up later"


def test_a_node_split_under_a_backup_that_then_fails_leaves_nothing_behind() -> None:
    rig = TierRig(fate=lambda intent: Fate(None))
    rig.serve(X)
    rig.step()
    rig.cache.match(key_of([*X[:4], 50]))  # splits the node that is being copied

    rig.end_all("failed")

    rig.check()
    assert rig.host_has(X) == 0


def test_a_node_split_and_evicted_under_its_backup_still_lands() -> None:
    rig = TierRig(fate=lambda intent: Fate(None))
    rig.serve(X)
    rig.step()
    rig.cache.match(key_of([*X[:4], 50]))
    rig.cache.evict(100)

    rig.end_all()

    assert rig.host_has(X) == 4
    rig.check_host([key_of(X)])
    rig.check()


def test_what_is_under_way_is_not_backed_up_again() -> None:
    rig = TierRig(fate=lambda intent: Fate(None))
    rig.serve(X)
    rig.step()

    rig.serve([*X[:8], 9, 9, 99])
    rig.step()

    first, second = (intent.source.pages.size for intent in rig.sent)
    assert (first, second) == (4, 1)
    rig.end_all()
    assert rig.host_has([*X[:8], 9, 9]) == 5


def test_late_data_whose_parents_are_gone_is_freed() -> None:
    """The child's copy was ordered behind its parent's, which then failed."""
    rig = TierRig(fate=lambda intent: Fate(None))
    rig.serve(X)
    rig.step()
    rig.serve([*X[:8], 9, 9, 99])
    rig.step()
    parent, child = rig.sent

    rig.tiers.ended([TransferEnd(number=parent.number, failure="failed"), TransferEnd(number=child.number)])
    rig.under_way.clear()

    assert rig.host_has([*X[:8], 9, 9]) == 0
    assert rig.tiers.counters().backup_drops == {"failed": 1, "unusable": 1}
    rig.check()


def test_an_end_that_nobody_knows_is_ignored() -> None:
    rig = TierRig()
    rig.tiers.ended([TransferEnd(number=12345), TransferEnd(number=12345, failure="failed")])
    rig.check()


def test_backups_refused_by_the_runtime_are_not_backed_up() -> None:
    rig = TierRig(fate=lambda intent: Fate(refused=True))
    rig.serve(X)
    rig.drain()
    assert rig.host_has(X) == 0
    assert rig.tiers.counters().backup_drops == {"refused": 1}


def test_a_refused_plan_keeps_what_is_leaving_for_the_next() -> None:
    rig = TierRig(settings=WRITE_BACK)
    rig.serve(X)
    rig.cache.evict(100)
    assert [each.source.pages.size for each in rig.tiers.plan().backups] == [4]
    rig.tiers.refused()

    rig.step()
    rig.drain()

    assert rig.host_has(X) == 4
    rig.check_host([key_of(X)])


def test_a_refused_plan_undoes_its_restores() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    assert waits_for_restore(rig, X) == PageCounts(4, 0, 0)
    rig.tiers.plan()

    rig.tiers.refused()

    assert not rig.tiers.holds_back("r")
    rig.check()
    assert rig.cache.flush() == 0, "nothing is locked"
    assert rig.host_has(X) == 0


def test_full_pools_that_hold_each_others_victims_restore_whole() -> None:
    """Room for X on the device must come from Y, and Y's room on the host from anything but X."""
    rig = TierRig(num_pages=4, num_host_pages=4, settings=WRITE_BACK)
    moved_down(rig, X)
    rig.serve(Y)
    assert (rig.device_has(Y), rig.host_has(X)) == (4, 4)

    assert rig.serve(X) == 8

    rig.drain()
    rig.check()
    assert rig.device_has(X) == 4
    assert rig.tiers.counters().backup_drops == {"no_room": 1}, "Y had no room beside X, and died"


def test_a_source_is_locked_until_its_restore_ends() -> None:
    rig = TierRig(num_pages=4, num_host_pages=4, settings=WRITE_BACK, fate=lambda intent: Fate(None))
    rig.serve(X)
    rig.cache.evict(100)
    rig.step()
    rig.end_all()
    assert waits_for_restore(rig, X)

    assert not rig.tiers.host.make_room(PageCounts(1))

    rig.step()
    assert not rig.tiers.host.make_room(PageCounts(1))
    rig.end_all()
    assert rig.tiers.host.make_room(PageCounts(4))
    assert rig.host_has(X) == 0


def test_restoring_counts_what_can_be_evicted_as_room() -> None:
    rig = TierRig(num_pages=4, num_host_pages=16, settings=WRITE_BACK)
    moved_down(rig, X)
    rig.serve(Y)
    assert rig.device.allocators.pages.port.available() == 0

    assert rig.serve(X) == 8
    rig.drain()
    assert rig.host_has(Y) == 4


def test_with_little_room_a_part_is_restored() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    rig.tiers.expect("r", key_of(X))

    assert rig.tiers.begin_restore("r", key_of(X), PageCounts(3)) == PageCounts(3, 0, 0)

    rig.drain()
    assert (rig.device_has(X), rig.tiers.restored_tokens("r").host) == (3, 6)
    rig.check()


def test_a_prefix_with_windows_and_states_is_restored_to_where_it_is_usable() -> None:
    rig = TierRig(components=frozenset({FULL, SWA, RECURRENT}), settings=TierSettings(write_policy="write_through"))
    rig.serve([*X[:4], 99])  # a snapshot after two pages, and one after four
    rig.serve(X)
    rig.drain()
    rig.cache.evict(100)
    rig.drain()
    assert rig.tiers.host.probe(key_of(X)) == 8

    taken = rig.tiers.begin_restore("r", key_of(X), PageCounts(3, 16, 16))

    assert taken == PageCounts(2, 2, 1)
    rig.drain()
    found = rig.cache.match(key_of(X))
    assert found.num_tokens == 4
    rig.check_match(key_of(X), found)
    rig.check()


def test_no_room_restores_nothing_and_locks_nothing() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    assert rig.tiers.begin_restore("r", key_of(X), PageCounts()) == PageCounts()
    assert not rig.tiers.holds_back("r")
    assert rig.tiers.host.make_room(PageCounts(32))


def test_a_restore_that_fails_is_a_miss_and_is_tried_twice() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    rig.fate = lambda intent: Fate(0, "failed") if isinstance(intent, Restore) else AT_ONCE

    assert rig.serve(X) == 0

    counters = rig.tiers.counters()
    assert (counters.host_hits, counters.restore_failures, counters.restored_tokens) == (2, {"failed": 2}, 0)
    rig.check()


def test_a_request_with_the_same_prefix_waits_for_the_restore_of_another() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    waits_for_restore(rig, X, "first")
    rig.tiers.expect("second", key_of([*X[:6], 50, 50, 99]))
    rig.tiers.expect("other", key_of(Y))

    assert rig.tiers.holds_back("second")
    assert not rig.tiers.holds_back("other")

    rig.drain()
    assert not rig.tiers.holds_back("second")
    assert rig.cache.match(key_of([*X[:6], 50, 50, 99])).num_tokens == 6


def test_what_the_device_computed_meanwhile_makes_duplicates_that_are_freed() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    waits_for_restore(rig, X)
    rig.fate = lambda intent: Fate(None)
    rig.step()
    rig.compute(key_of(X), rig.cache.match(key_of(X)))

    rig.end_all()

    rig.check()
    assert rig.device_has(X) == 4


def test_after_a_restore_the_host_copy_goes_first() -> None:
    rig = TierRig(num_pages=12, num_host_pages=8, settings=WRITE_BACK)
    moved_down(rig, X)
    moved_down(rig, Y)
    rig.serve(X)  # X is now used later than Y, and is on the device too
    rig.drain()

    assert rig.tiers.host.make_room(PageCounts(4))

    assert (rig.host_has(X), rig.host_has(Y)) == (0, 4)


def test_what_leaves_the_device_again_is_no_longer_the_first_to_go() -> None:
    rig = TierRig(num_pages=12, num_host_pages=8, settings=WRITE_BACK)
    moved_down(rig, Y)
    moved_down(rig, X)
    rig.serve(X)
    rig.drain()
    rig.cache.evict(100)
    rig.step()

    moved_down(rig, [10, 10, 11, 11, 12, 12, 13, 13, 99])

    assert (rig.host_has(X), rig.host_has(Y)) == (4, 0)


def test_buffer_only_lets_go_of_what_was_restored() -> None:
    """What a fetch brought: without a storage to go to, nothing that comes from the device stays."""
    rig = TierRig(settings=TierSettings(write_policy="write_back", host_mode="buffer_only"))
    rig.serve(X)
    held = rig.cache.match(key_of([*X, 9])).pages
    fetched = rig.host.allocate(PageCounts(held.size))
    assert fetched is not None
    rig.host.write(fetched, rig.device.read(PageIds(held)))
    rig.tiers.host.insert(key_of(X), Span(0, fetched.pages))
    rig.cache.evict(100)
    rig.step()
    assert (rig.device_has(X), rig.host_has(X)) == (0, 4)

    rig.serve(X)

    assert (rig.device_has(X), rig.host_has(X)) == (4, 0)
    rig.check()


def test_a_burst_of_offers_is_bounded_in_the_queue_and_in_bytes() -> None:
    """A thousand prefixes pass the threshold in one step, and the copies are slow."""
    rig = TierRig(num_pages=2000, num_host_pages=2000, staging_bytes=100, fate=lambda intent: Fate(None))
    for number in range(MAX_OFFERS + 100):
        rig.cache.insert(key_of([number, number]), rig.device.allocate(PageCounts(1)).pages)  # type: ignore[union-attr]
    for page in range(1, MAX_OFFERS + 101):
        rig.device.contents.pages[page] = b"whatever"
    counters = rig.tiers.counters()
    assert (counters.queue_length, counters.backup_drops) == (MAX_OFFERS, {"queue_full": 100})

    for _ in range(20):
        rig.step()
        assert rig.tiers.counters().bytes_in_flight <= 100
    assert rig.tiers.counters().backups_in_flight == 100 // PAGE_BYTES.pages

    rig.cache.evict(2000)
    rig.step()
    assert rig.tiers.counters().bytes_in_flight <= 100
    rig.check()
    rig.end_all("failed")
    rig.cache.flush()
    rig.check()
    assert rig.tiers.num_under_way == 0
    assert rig.host.allocators.pages.port.available() == 2000


def test_offers_wait_while_restores_are_under_way_and_what_leaves_does_not() -> None:
    rig = TierRig(num_pages=12)
    moved_down(rig, X)
    rig.fate = lambda intent: Fate(None)
    waits_for_restore(rig, X)
    rig.step()
    rig.compute(key_of(Y), rig.cache.match(key_of(Y)))
    rig.step()
    assert [type(each) for each in rig.sent][-1] is Restore

    rig.cache.evict(4)
    rig.step()

    assert [type(each) for each in rig.sent][-1] is Backup
    rig.end_all()
    rig.check()


def test_a_restore_slower_than_computing_is_not_taken_but_tried_again_some_day() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    rig.serve(X)
    rig.cache.evict(100)
    rig.step()
    for _ in range(50):
        rig.tiers._restores.choice.note_restore(num_bytes=1, seconds=1.0)
        rig.tiers.note_step(prompt_tokens=1000, decode_rows=0, seconds=0.1)

    taken = [bool(rig.tiers.restorable("r", key_of(X), 0)) for _ in range(40)]

    assert taken.count(True) == 1
    assert rig.tiers.counters().not_worth_restoring == 39


def test_the_device_pool_lost_under_transfers_leaves_the_host_as_it_was() -> None:
    rig = TierRig(settings=WRITE_BACK)
    moved_down(rig, X)
    rig.serve(Y)
    rig.fate = lambda intent: Fate(None)
    waits_for_restore(rig, X)
    rig.cache.evict(100)
    rig.step()
    assert (rig.tiers.counters().restores_in_flight, rig.tiers.counters().backups_in_flight) == (1, 1)

    rig.lose_device()
    rig.tell_ends()

    assert rig.tiers.in_flight_ids().pages.size == 0
    assert (rig.host_has(X), rig.host_has(Y)) == (4, 0)
    rig.check()
    rig.fate = lambda intent: AT_ONCE
    assert rig.serve(X) == 8


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_reopened_runtime_finds_both_tiers_empty(is_sent: bool) -> None:
    rig = TierRig(settings=WRITE_BACK, fate=lambda intent: Fate(None))
    rig.serve(X)
    rig.cache.evict(100)
    rig.step()
    rig.end_all()
    waits_for_restore(rig, X)
    if is_sent:
        rig.step()

    rig.reopen()

    assert rig.cache.match(key_of(X)).num_tokens == 0
    assert rig.host_has(X) == 0
    assert rig.tiers.num_under_way == 0
    rig.check()


def test_namespaces_share_nothing_on_the_host() -> None:
    rig = TierRig(settings=WRITE_BACK, num_host_pages=16)
    moved_down(rig, X)

    assert rig.tiers.host.probe(key_of(X, Namespace(salt="other"))) == 0
    assert rig.serve(X, Namespace(salt="other")) == 0
    assert rig.serve(X) == 8


def test_a_window_page_alone_follows_when_its_pages_are_there() -> None:
    """Its prefix was backed up for a longer one, which needed no such old window page."""
    rig = TierRig(components=frozenset({FULL, SWA}), window=2, settings=WRITE_BACK)
    rig.serve([*X[:4], 99])
    rig.serve(X)
    rig.cache.evict(1)
    rig.step()
    rig.drain()
    assert rig.tiers.host.probe(key_of([*X[:4], 50])) == 0

    rig.cache.evict_window(100)
    rig.step()
    rig.drain()

    assert rig.tiers.host.probe(key_of([*X[:4], 50])) == 4
    assert rig.sent[-1].source.counts() == PageCounts(0, 1, 0)
    rig.check_host([key_of(X)])
    rig.check()


@pytest.mark.parametrize("name", ["radix_cache", "chunk_cache"])
def test_other_cache_types_refuse_a_host_tier(name: str) -> None:
    load_builtin_caches()
    deps = TierRig().deps
    with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
        default_registry.seal().get(name).ctor(deps)


def test_storage_seed_names_the_pages_in_events_too() -> None:
    from dataclasses import replace

    from app.caches.unified_radix_cache import UnifiedRadixCache
    from app.core.keys import page_hashes
    from app.observability.kv_events import KvEventRecorder, KvEventReplica

    rig = TierRig()
    assert rig.deps.host_tier is not None
    parts = replace(rig.deps.host_tier(), storage_seed=lambda namespace: b"seed" * 8)
    recorder, replica = KvEventRecorder(page_size=2), KvEventReplica()
    cache = UnifiedRadixCache(replace(rig.deps, host_tier=lambda: parts, events=recorder))

    cache.insert(key_of(X[:8]), np.arange(1, 5, dtype=np.int32))

    replica.apply(recorder.drain())
    assert replica.page_hashes == set(page_hashes(b"seed" * 8, key_of(X[:8]).raw, 2))


def test_nothing_prepared_is_fine_for_an_empty_plan() -> None:
    rig = TierRig()
    plan = rig.tiers.plan(wait_s=0.25)
    assert (plan.wait_s, plan.backups, plan.restores) == (0.25, (), ())
    rig.tiers.prepared(PreparedTransfers())
    rig.check()


def passed_by(rig: TierRig, last_token: int) -> list[int]:
    """A prompt that shares three pages with X, and whose own page is used no more while these are."""
    tokens = [*X[:6], last_token, last_token, 99]
    rig.serve(tokens)
    rig.cache.match(key_of(X))
    return tokens


def test_a_page_that_was_passed_by_does_not_take_what_is_above_it_down() -> None:
    rig = TierRig(settings=WRITE_BACK)
    rig.serve(X)
    branch = passed_by(rig, 7)

    rig.cache.evict(1)
    rig.drain()

    assert (rig.device_has(branch), rig.host_has(X)) == (3, 0)
    assert rig.tiers.counters().backup_drops == {"not_worth": 1}
    rig.check()


def test_pages_that_were_passed_by_go_down_once_they_are_as_many_as_what_is_above_them() -> None:
    rig = TierRig(settings=WRITE_BACK)
    rig.serve(X)
    for last_token in (5, 6):
        passed_by(rig, last_token)
        rig.cache.evict(1)
        rig.drain()
    branch = passed_by(rig, 7)

    rig.cache.evict(1)
    rig.drain()

    assert rig.host_has(branch) == 4
    assert rig.tiers.counters().backup_drops == {"not_worth": 2}
    rig.check()


def test_what_leaves_together_goes_down_whole() -> None:
    rig = TierRig(settings=WRITE_BACK)
    rig.serve(X)
    rig.serve([*X[:6], 7, 7, 99])
    rig.cache.match(key_of(X))

    rig.cache.evict(100)
    rig.drain()

    assert rig.host_has(X) == 4
    rig.check()
