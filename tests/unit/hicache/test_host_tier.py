"""Moving pages between the device, host memory and storage: what is copied when, what it may take, what goes wrong."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest

from app.core.transfers import NO_IDS, Fetch, Lookup, OfEachPool, PageIds, PageKeys, Store, TierLimits, TransferPlan
from app.errors import ConfigError, DoubleFreeError, OutOfPagesError, OwnershipError, RuntimeClosedError
from app.hicache.host_tier import POLL_S
from app.hicache.staging import Staging
from app.tpu.slow_copies import SlowCopies
from tests.support.runtime import ints
from tests.support.scripted_lane import ScriptedLane
from tests.support.tier_rig import HOST, TierRig, opened_tiers


def keys(*names: str) -> PageKeys:
    return PageKeys(pages=tuple(name.encode().ljust(32, b"-") for name in names))


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -- there and back -----------------------------------------------------------------------------------------------


def there_and_back(rig: TierRig, counts: tuple[int, int, int]) -> None:
    # given: pages with a value each
    source = rig.allocate(*counts)
    rig.fill(source, 100)
    expected = [[100 + index for index in range(count)] for count in counts]

    # when: they are backed up, lost on the device, and restored into others
    target = rig.backed_up(source)
    rig.fill(source, 900)
    restore = rig.restore(target)
    prepared, _ = rig.move(restores=(restore,))
    (end,) = rig.until(restore.number)

    # then
    (back,) = prepared.transfers.restores
    assert rig.host_values(target) == rig.device_values(back) == expected
    assert rig.device_values(source) == [[900 + index for index in range(count)] for count in counts]
    assert not any(np.intersect1d(old, new).size for old, new in zip(source, back, strict=True))
    assert end.failure is None
    assert end.num_bytes == rig.tiers.counters().backup.num_bytes > 0
    assert rig.tiers.counters().staging_bytes == 0
    rig.check()


def test_pages_come_back_as_they_left() -> None:
    with opened_tiers() as rig:
        there_and_back(rig, (11, 0, 0))


def test_window_pages_and_snapshots_come_back_as_they_left() -> None:
    with opened_tiers(hybrid_model=True) as rig:
        there_and_back(rig, (3, 2, 4))


def test_a_restore_larger_than_staging_comes_in_pieces_and_ends_once() -> None:
    with opened_tiers(staging_pages=3) as rig:
        source = rig.allocate(3)
        rig.fill(source, 10)
        first = rig.backed_up(source)
        rig.fill(source, 20)
        second = rig.backed_up(source)
        both = PageIds(np.concatenate([first.pages, second.pages]))

        restore = rig.restore(both)
        prepared, _ = rig.move(restores=(restore,))
        (end,) = rig.until(restore.number)

        assert end.failure is None
        assert rig.device_values(prepared.transfers.restores[0])[0] == [10, 11, 12, 20, 21, 22]
        counters = rig.tiers.counters()
        assert counters.most_staging_bytes <= rig.tiers.counters().backup.num_bytes // 2
        assert (counters.restore.num_transfers, counters.restore.num_pages, counters.staging_bytes) == (1, 6, 0)
        rig.check()


# -- what it may take ---------------------------------------------------------------------------------------------


def test_staging_must_hold_a_page() -> None:
    limits = TierLimits(page_bytes=OfEachPool(10, 0, 30), staging_bytes=29)
    with pytest.raises(ConfigError, match="staging_bytes=29 is not allowed: at least 30"):
        Staging(limits)


def test_backups_that_do_not_fit_are_refused_and_nothing_is_taken() -> None:
    with opened_tiers(host_pages=4, staging_pages=3) as rig:
        source = rig.allocate(5)
        small, too_large = PageIds(source.pages[:2]), PageIds(source.pages[:4])
        prepared, _ = rig.move(backups=(rig.backup(too_large), rig.backup(small), rig.backup(small)))

        refused, taken, no_staging = prepared.transfers.backups
        assert refused is None
        assert no_staging is None
        assert taken is not None
        rig.until(2)
        assert list(rig.ended) == [2]
        prepared, _ = rig.move(backups=(rig.backup(PageIds(source.pages[:3])),))
        assert prepared.transfers.backups == (None,)  # two host pages are left
        assert rig.tiers.counters().backup.num_refused == 3
        rig.check()


def test_a_burst_of_backups_over_a_slow_copier_stays_within_staging() -> None:
    """A thousand pages become worth keeping in one step."""
    num_pages, staging = 1000, 16
    with opened_tiers(
        host_pages=num_pages,
        staging_pages=staging,
        max_total_tokens=4 * num_pages,
        copies=partial(SlowCopies, late=dict.fromkeys(range(num_pages), 20)),
    ) as rig:
        pages = rig.allocate(num_pages)
        rig.fill(PageIds(pages.pages[:staging]), 1)
        backups = tuple(rig.backup(PageIds(page)) for page in pages.pages.reshape(-1, 1))
        prepared, _ = rig.move(backups=backups)

        taken = [target for target in prepared.transfers.backups if target is not None]
        page_bytes = rig.tiers.counters().most_staging_bytes // staging
        assert len(taken) == staging
        assert rig.tiers.counters().backup.num_refused == num_pages - staging
        # evicting what is being backed up is safe: it was gathered
        rig.free_device(pages)
        rig.until(*range(1, staging + 1))
        assert [rig.host_values(target)[0] for target in taken] == [[1 + index] for index in range(staging)]
        assert rig.tiers.counters().most_staging_bytes == staging * page_bytes
        rig.check()


def test_pieces_of_a_restore_land_in_any_order() -> None:
    """The first one is begun while a backup has half of staging, and is over long after the second one."""
    with opened_tiers(staging_pages=4, copies=partial(SlowCopies, late={1: 3, 2: 40})) as rig:
        source, other = rig.allocate(4), rig.allocate(2)
        rig.fill(source, 10)
        target = rig.backed_up(source)
        identity = rig.runtime.identity

        rig.move(backups=(rig.backup(other),))
        restore = rig.restore(target)
        prepared, _ = rig.move(restores=(restore,))
        (end,) = rig.until(restore.number)

        assert (end.failure, rig.runtime.identity) == (None, identity)
        assert rig.device_values(prepared.transfers.restores[0])[0] == [10, 11, 12, 13]
        rig.check()


def test_a_restore_that_waits_for_staging_comes_before_new_backups() -> None:
    with opened_tiers(staging_pages=4, copies=partial(SlowCopies, late={1: 50})) as rig:
        source = rig.allocate(4)
        rig.fill(source, 10)
        host = rig.backed_up(source)  # copy 0

        # given: a backup that takes all of staging, and a restore behind it
        slow, restore = rig.backup(source), rig.restore(host)
        rig.move(backups=(slow,))
        rig.move(restores=(restore,))

        # when
        prepared, _ = rig.move(backups=(rig.backup(PageIds(source.pages[:1])),))

        # then
        assert prepared.transfers.backups == (None,)
        assert [end.failure for end in rig.until(slow.number, restore.number)] == [None, None]
        assert list(rig.ended)[-2:] == [slow.number, restore.number]
        rig.check()


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_backup_that_fails_leaves_its_host_pages_empty_and_held() -> None:
    with opened_tiers(copies=partial(SlowCopies, fail={0})) as rig:
        backup = rig.backup(rig.allocate(2))
        prepared, _ = rig.move(backups=(backup,))
        (end,) = rig.until(backup.number)
        (target,) = prepared.transfers.backups

        assert (end.failure, end.num_bytes) == ("failed", 0)
        with pytest.raises(OwnershipError):
            rig.host.get(target)
        rig.free_host(target)  # control's, until it says so
        rig.move()
        assert rig.host.num_free().pages == 16
        counters = rig.tiers.counters()
        assert counters.backup.failures == {"failed": 1}
        assert counters.staging_bytes == 0
        rig.check()


def test_a_restore_that_fails_is_told_and_the_pool_lives_on() -> None:
    with opened_tiers(copies=partial(SlowCopies, fail={1})) as rig:
        source = rig.allocate(2)
        rig.fill(source, 5)
        host = rig.backed_up(source)
        restore, again = rig.restore(host), rig.restore(host)
        prepared, _ = rig.move(restores=(restore,))
        (end,) = rig.until(restore.number)

        assert end.failure == "failed"
        rig.free_device(prepared.transfers.restores[0])
        prepared, _ = rig.move(restores=(again,))
        assert rig.until(again.number)[0].failure is None
        assert rig.device_values(prepared.transfers.restores[0])[0] == [5, 6]
        rig.check()


@pytest.mark.parametrize("polls", [1, 7])
def test_late_copies_land_late_and_right(polls: int) -> None:
    with opened_tiers(copies=partial(SlowCopies, late={0: polls, 1: polls})) as rig:
        there_and_back(rig, (5, 0, 0))


def test_a_copy_that_never_lands_is_given_up_and_its_bytes_stay_counted() -> None:
    clock = Clock()
    with opened_tiers(staging_pages=4, deadline_s=3.0, copies=partial(SlowCopies, never={0}), clock=clock) as rig:
        backup = rig.backup(rig.allocate(3))
        rig.move(backups=(backup,))
        rig.move()
        assert backup.number not in rig.ended
        clock.now += 3.1
        rig.move()

        assert rig.ended[backup.number].failure == "late"
        counters = rig.tiers.counters()
        assert counters.staging_bytes == counters.most_staging_bytes > 0
        prepared, _ = rig.move(backups=(rig.backup(rig.allocate(2)),))
        assert prepared.transfers.backups == (None,)
        rig.check()


def test_a_backup_that_lands_after_it_was_given_up_fills_nothing() -> None:
    clock = Clock()
    with opened_tiers(deadline_s=3.0, copies=partial(SlowCopies, late={0: 8}), clock=clock) as rig:
        source = rig.allocate(2)
        backup = rig.backup(source)
        prepared, _ = rig.move(backups=(backup,))
        clock.now += 4
        rig.move()
        assert rig.ended[backup.number].failure == "late"
        (target,) = prepared.transfers.backups

        # when: control gives the host pages to somebody else, and the copy lands
        rig.free_host(target)
        rig.fill(source, 70)
        other = rig.backed_up(source)
        for _ in range(10):
            rig.move()

        assert rig.host_values(other)[0] == [70, 71]
        assert rig.tiers.counters().staging_bytes == 0
        rig.check()


def test_a_restore_that_waits_for_ever_ends_late() -> None:
    clock = Clock()
    with opened_tiers(staging_pages=2, deadline_s=3.0, copies=partial(SlowCopies, never={1}), clock=clock) as rig:
        source = rig.allocate(2)
        host = rig.backed_up(source)
        stuck, waiting = rig.backup(source), rig.restore(host)
        rig.move(backups=(stuck,))
        rig.move(restores=(waiting,))
        clock.now += 3.1
        rig.move()

        assert {number: end.failure for number, end in rig.ended.items() if number != 1} == {
            stuck.number: "late",
            waiting.number: "late",
        }
        rig.check()


# -- storage ------------------------------------------------------------------------------------------------------


def stored(rig: TierRig, values: int, *names: str) -> PageIds:
    """Host pages with values `values`, ..., in storage under these names."""
    source = rig.allocate(len(names))
    rig.fill(source, values)
    host = rig.backed_up(source)
    store = Store(number=next(rig.numbers), keys=keys(*names), source=host)
    rig.move(stores=(store,))
    (end,) = rig.until(store.number)
    assert end.failure is None
    assert end.arrived is not None
    assert end.arrived.pages.all()
    return host


def fetch_of(rig: TierRig, *names: str) -> Fetch:
    return Fetch(number=next(rig.numbers), keys=keys(*names), deadline_s=9.0)


def test_what_was_stored_is_fetched_into_other_host_pages() -> None:
    with opened_tiers() as rig:
        stored(rig, 40, "a", "b")
        fetch = fetch_of(rig, "b", "x", "a")
        prepared, _ = rig.move(fetches=(fetch,))
        (end,) = rig.until(fetch.number)

        (target,) = prepared.transfers.fetches
        assert end.arrived is not None
        assert end.arrived.pages.tolist() == [True, False, True]
        assert rig.host_values(PageIds(target.pages[[0, 2]]))[0] == [41, 40]
        with pytest.raises(OwnershipError):
            rig.host.get(PageIds(target.pages[[1]]))
        rig.check()


def test_kinds_of_pages_travel_to_storage_under_keys_of_their_own() -> None:
    with opened_tiers(hybrid_model=True) as rig:
        source = rig.allocate(2, 1, 1)
        rig.fill(source, 40)
        host = rig.backed_up(source)
        wanted = PageKeys(pages=(b"a", b"b"), window_pages=(b"b",), states=(b"b",))
        store = Store(number=next(rig.numbers), keys=wanted, source=host)
        fetch = Fetch(number=next(rig.numbers), keys=wanted, deadline_s=9.0)
        rig.move(stores=(store,))
        rig.until(store.number)
        prepared, _ = rig.move(fetches=(fetch,))
        rig.until(fetch.number)

        assert rig.host_values(prepared.transfers.fetches[0]) == [[40, 41], [40], [40]]
        rig.check()


def test_an_answer_with_too_few_pages_is_a_miss() -> None:
    with opened_tiers(lane=ScriptedLane()) as rig:
        stored(rig, 40, "a", "b")
        fetch = fetch_of(rig, "a", "b")
        rig.lane.cut.add(fetch.number)
        rig.move(fetches=(fetch,))
        (end,) = rig.until(fetch.number)

        assert end.arrived is not None
        assert not end.arrived.pages.any()
        assert end.num_bytes == 0
        rig.check()


def test_lookups_and_failures_of_the_lane_are_told_as_they_are() -> None:
    with opened_tiers() as rig:
        host = stored(rig, 40, "a", "b")
        lookup = Lookup(number=next(rig.numbers), keys=keys("a", "x"), deadline_s=9.0)
        store = Store(number=next(rig.numbers), keys=keys("c", "d"), source=host)
        rig.lane.failures[store.number] = "queue_full"
        rig.move(lookups=(lookup,), stores=(store,))
        found, refused = rig.until(lookup.number, store.number)

        assert found.arrived is not None
        assert found.arrived.pages.tolist() == [True, False]
        assert refused.failure == "queue_full"
        assert rig.tiers.counters().store.failures == {"queue_full": 1}


class BrokenLane(ScriptedLane):
    """Raises whatever it is asked."""

    def store(self, intent: Store, contents: object) -> None:
        raise ValueError("a bug of the lane's")

    def lookup(self, intent: Lookup) -> None:
        raise ValueError("a bug of the lane's")

    def fetch(self, intent: Fetch) -> None:
        raise ValueError("a bug of the lane's")


def test_a_lane_that_raises_costs_the_transfer_and_not_the_device_pool() -> None:
    with opened_tiers(lane=BrokenLane()) as rig:
        host = rig.backed_up(rig.allocate(1))
        store = Store(number=next(rig.numbers), keys=keys("a"), source=host)
        lookup = Lookup(number=next(rig.numbers), keys=keys("a"), deadline_s=9.0)
        fetch = fetch_of(rig, "b")
        identity = rig.runtime.identity

        prepared, _ = rig.move(stores=(store,), lookups=(lookup,), fetches=(fetch,))
        ends = rig.until(store.number, lookup.number, fetch.number)

        assert [end.failure for end in ends] == ["failed"] * 3
        assert rig.runtime.identity == identity
        rig.free_host(prepared.transfers.fetches[0])
        rig.move()
        rig.check()


def test_a_fetch_without_host_pages_is_refused_and_a_cancelled_one_ends() -> None:
    lane = ScriptedLane(is_held=True)
    with opened_tiers(host_pages=2, lane=lane) as rig:
        first, second = fetch_of(rig, "a", "b"), fetch_of(rig, "c")
        prepared, _ = rig.move(fetches=(first, second))
        assert prepared.transfers.fetches[1] is None
        rig.move(cancels=(first.number, second.number))
        rig.move()

        assert rig.ended[first.number].failure == "cancelled"
        assert second.number not in rig.ended
        assert rig.tiers.counters().fetch.num_refused == 1
        rig.free_host(prepared.transfers.fetches[0])
        rig.move()
        assert rig.host.num_free().pages == 2
        rig.check()


def test_a_source_may_be_freed_once_the_plan_is_prepared() -> None:
    with opened_tiers(host_pages=2) as rig:
        host = stored(rig, 40, "a", "b")
        restore = rig.restore(host)
        store = Store(number=next(rig.numbers), keys=keys("c", "d"), source=host)
        rig.free_host(host)  # in the very plan that reads them
        prepared, _ = rig.move(restores=(restore,), stores=(store,))
        rig.until(restore.number, store.number)

        assert rig.device_values(prepared.transfers.restores[0])[0] == [40, 41]
        one, other = (rig.lane.values[0, keys(name).pages[0]] for name in ("d", "b"))
        assert [np.asarray(array).tolist() for array in one] == [np.asarray(array).tolist() for array in other]
        assert rig.host.num_free().pages == 2
        rig.check()


# -- waiting ------------------------------------------------------------------------------------------------------


def test_a_plan_without_rows_waits_for_news_or_its_time() -> None:
    lane = ScriptedLane(is_held=True)
    with opened_tiers(lane=lane) as rig:
        fetch = fetch_of(rig, "a")
        rig.move(fetches=(fetch,))

        # nothing comes: its time runs out
        handle = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.plan(wait_s=0.02)))
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.0)
        assert handle.wait().transfers == ()

        # storage answers in a thread of its own
        handle = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.plan(wait_s=300.0)))
        assert not handle.done()
        answer = threading.Timer(0.02, lane.release)
        answer.start()
        completion = handle.wait()
        answer.join()
        assert [end.number for end in completion.transfers] == [fetch.number]
        assert handle.done()
        assert handle.wait() is completion
        assert rig.tiers.counters().waited_s > 0


def test_waiting_for_storage_looks_at_nothing_and_waiting_for_copies_looks_seldom() -> None:
    looks: list[float] = []

    def counted() -> float:
        looks.append(time.monotonic())
        return looks[-1]

    lane = ScriptedLane(is_held=True)
    with opened_tiers(lane=lane, copies=partial(SlowCopies, never={0}), clock=counted) as rig:
        rig.move(fetches=(fetch_of(rig, "a"),))
        handle = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.plan(wait_s=0.1)))
        looks.clear()
        handle.wait()
        assert len(looks) < 20

        backup = rig.backup(rig.allocate(1))
        handle = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.plan(wait_s=0.1, backups=(backup,))))
        looks.clear()
        handle.wait()
        assert len(looks) < 20 + 3 * 0.1 / POLL_S


def test_a_copy_that_lands_ends_a_plan_that_waits() -> None:
    with opened_tiers(copies=partial(SlowCopies, late={0: 3})) as rig:
        backup = rig.backup(rig.allocate(1))
        rig.move(backups=(backup,))
        _, completion = rig.move(wait_s=300.0)
        assert [end.number for end in completion.transfers] == [backup.number]


# -- plans that are refused ---------------------------------------------------------------------------------------


def test_what_a_plan_may_not_name_is_refused_without_a_trace() -> None:
    lane = ScriptedLane(is_held=True)
    with opened_tiers(lane=lane) as rig:
        source = rig.allocate(2)
        host = rig.backed_up(source)
        fetch = fetch_of(rig, "a")
        prepared, _ = rig.move(fetches=(fetch,))
        (fetching,) = prepared.transfers.fetches
        free_device = PageIds(ints(32))
        before = (rig.snapshot(), rig.host.num_free(), rig.host.filled().pages.tolist(), rig.tiers.counters())

        twice = rig.backup(source)
        same_number = Lookup(number=fetch.number, keys=keys("a"), deadline_s=1.0)
        wrong = [
            (rig.plan(backups=(twice, twice)), OwnershipError),
            (
                rig.plan(restores=(rig.restore(host),), lookups=(same_number,)),
                OwnershipError,
            ),
            (rig.plan(backups=(rig.backup(free_device),)), OwnershipError),
            (rig.plan(restores=(rig.restore(fetching),)), OwnershipError),
            (rig.plan(restores=(rig.restore(PageIds(ints(16))),)), OwnershipError),
            (rig.plan(stores=(Store(number=77, keys=keys("a"), source=fetching),)), OwnershipError),
            (rig.plan(backups=(rig.backup(PageIds(source.pages, ints(1))),)), OwnershipError),
            (rig.plan(restores=(rig.restore(PageIds(host.pages, NO_IDS.pages, ints(1))),)), OwnershipError),
            (rig.plan(restores=tuple(rig.restore(host) for _ in range(16))), OutOfPagesError),
        ]
        for plan, error in wrong:
            with pytest.raises(error):
                rig.runtime.prepare_batch(plan)
        builder = rig.builder()
        builder.transfer(TransferPlan(free_host=host))
        with pytest.raises(DoubleFreeError):
            rig.runtime.prepare_batch(builder.build())
        assert before == (rig.snapshot(), rig.host.num_free(), rig.host.filled().pages.tolist(), rig.tiers.counters())

        rig.free_host(fetching)
        with pytest.raises(OwnershipError, match="freed while they are written"):
            rig.runtime.prepare_batch(rig.plan())


def test_pages_that_a_restore_is_to_write_are_nobody_elses() -> None:
    with opened_tiers(copies=partial(SlowCopies, never={1})) as rig:
        host = rig.backed_up(rig.allocate(2))
        prepared, _ = rig.move(restores=(rig.restore(host),))
        (target,) = prepared.transfers.restores
        with pytest.raises(OwnershipError, match="backed up while a restore"):
            rig.runtime.prepare_batch(rig.plan(backups=(rig.backup(target),)))
        rig.free_device(target)
        with pytest.raises(OwnershipError, match="freed while a restore"):
            rig.runtime.prepare_batch(rig.plan())


# -- the end ------------------------------------------------------------------------------------------------------


def test_closing_with_everything_under_way_drops_it_and_opening_begins_anew() -> None:
    lane = ScriptedLane(is_held=True)
    with opened_tiers(lane=lane, copies=partial(SlowCopies, never={1, 2})) as rig:
        source = rig.allocate(2)
        host = rig.backed_up(source)
        rig.move(backups=(rig.backup(source),), fetches=(fetch_of(rig, "a"),))
        rig.move(restores=(rig.restore(host),))
        rig.runtime.prepare_batch(rig.plan(backups=(rig.backup(source),)))
        identity = rig.runtime.identity

        rig.runtime.close()
        rig.runtime.close()

        assert len(lane.close_timeouts) == 1
        assert rig.host.num_bytes == 0
        with pytest.raises(RuntimeClosedError):
            rig.runtime.prepare_batch(rig.plan())

        rig.runtime.open()

        assert rig.runtime.identity.generation == identity.generation + 1
        assert rig.host.allocators.pages.identity == HOST._replace(generation=HOST.generation + 1)
        assert rig.host.num_free().pages == 16
        lane.release()
        assert rig.move()[1].transfers == ()  # numbers of before are forgotten
        rig.check()
