"""Control of the storage tier: what is written, looked for, brought to the host, and for how long it is waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.caches.tiers.needs import Needs
from app.config.tier_settings import TierSettings
from app.core.keys import Namespace, RadixKey
from app.core.transfers import OfEachPool, PageCounts, TransferEnd
from tests.support.storage import IDENTITY
from tests.support.stored_prefixes import PAGE_SIZE, StorageSite, Stored, key_of

PLAIN = Needs(page_size=PAGE_SIZE)
WINDOWED = Needs(page_size=PAGE_SIZE, window=3)  # the last two pages
RECURRENT = Needs(page_size=PAGE_SIZE, has_states=True)
MIXED = Needs(page_size=PAGE_SIZE, window=3, has_states=True)
KEY = key_of(range(6))


@pytest.fixture
def site() -> Iterator[Callable[..., StorageSite]]:
    """Opens sites; after the test each is settled, and every page is in one hand."""
    opened: list[StorageSite] = []

    def opening(needs: Needs = PLAIN, stored: Stored | None = None, **given: object) -> StorageSite:
        opened.append(StorageSite(needs, {} if stored is None else stored, **given))  # type: ignore[arg-type]
        return opened[-1]

    yield opening
    for each in opened:
        each.check()
        each.settle()
        each.check()
        assert not each.host.locks


def stored_by_another(site: Callable[..., StorageSite], key: RadixKey = KEY, needs: Needs = PLAIN) -> Stored:
    """What a server has left that backed up and stored this key's whole pages."""
    first: StorageSite = site(needs)
    first.backed_up(key)
    first.settle()
    return first.stored


def tokens_on_host(there: StorageSite, key: RadixKey = KEY) -> int:
    return there.host.probe(key)


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [PLAIN, WINDOWED, RECURRENT, MIXED])
def test_a_second_server_finds_what_the_first_one_stored(site: Callable[..., StorageSite], needs: Needs) -> None:
    there = site(needs, stored_by_another(site, needs=needs))

    there.tier.expect("a", KEY, 0)
    there.settle()

    assert tokens_on_host(there) == 6 * PAGE_SIZE
    assert there.tier.fetched_tokens("a") == 6 * PAGE_SIZE
    counters = there.tier.counters
    assert (counters.looked_up_tokens, counters.found_tokens, counters.fetched_tokens) == (12, 12, 12)


def test_only_what_a_prefix_needs_is_fetched(site: Callable[..., StorageSite]) -> None:
    there = site(MIXED, stored_by_another(site, needs=MIXED))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()

    (fetch,) = there.plan().fetches

    assert tuple(map(len, fetch.keys)) == (6, 2, 1)


def test_a_page_is_written_once(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.backed_up(KEY)
    there.settle()

    there.host.evict_all()
    there.backed_up(KEY)
    there.backed_up(key_of([0, 1, 2, 3, 4, 5, 6]), 6)
    there.plans.clear()
    there.settle()

    written = [key for plan in there.plans for store in plan.stores for key in store.keys.pages]
    assert len(written) == 1
    assert len(there.stored) == 7
    assert there.tier.counters.stored_tokens == 7 * PAGE_SIZE


def test_what_came_from_storage_is_not_written_again(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.settle()
    there.host.evict_all()

    there.backed_up(KEY)

    assert there.plan().stores == ()


def test_a_failed_store_is_tried_again_when_the_page_is_backed_up_again(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.backed_up(KEY)
    (store,) = there.plan().stores
    outcomes = iter([True, True, False, True, True, False])
    there.end(store.number, "full", lambda: next(outcomes))
    assert there.tier.counters.stores_dropped == {"full": 2}

    there.host.evict_all()
    there.backed_up(KEY)
    (again,) = there.plan().stores

    assert again.keys.pages == (store.keys.pages[2], store.keys.pages[5])


def test_what_left_the_host_before_the_plan_is_not_written(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.backed_up(KEY)
    for _ in range(4):
        there.host.evict_one(0)

    (store,) = there.plan().stores

    assert len(store.keys.pages) == 2
    assert there.tier.counters.stores_dropped == {"gone": 4}


def test_a_plan_writes_few_pages_and_the_rest_follows(site: Callable[..., StorageSite]) -> None:
    there = site(MIXED)
    there.backed_up(key_of(range(40)))

    there.settle()

    sizes = [sum(map(len, store.keys)) for plan in there.plans for store in plan.stores]
    assert sum(sizes) == 3 * 40
    assert max(sizes) <= 16


def test_a_storage_that_does_not_answer_bounds_what_is_sent_and_what_waits(site: Callable[..., StorageSite]) -> None:
    there = site(capacity=PageCounts(1000, 0, 0))
    for number in range(500):
        there.backed_up(key_of([number]))
    for _ in range(40):
        there.plan()

    counters = there.tier.counters
    assert sum(len(store.keys.pages) for plan in there.plans for store in plan.stores) == 128
    assert not there.tier.is_urgent
    assert counters.stores_dropped == {"queue_full": 500 - 256}
    assert counters.queued_stores == 256 - 128


def test_a_refused_plan_is_sent_again(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.backed_up(key_of([50, 51]))
    there.tier.expect("a", KEY, 0)
    first = there.refuse()
    assert there.tier.is_urgent

    second = there.plan()
    there.end_all()
    there.refuse()
    there.check()
    third = there.plan()

    assert first.stores[0].keys == second.stores[0].keys
    assert first.lookups[0].keys == second.lookups[0].keys
    assert first.lookups[0].number != second.lookups[0].number
    assert len(third.fetches) == 1


def test_as_a_passage_the_host_lets_go_of_what_is_stored(site: Callable[..., StorageSite]) -> None:
    there = site(MIXED, settings=TierSettings(host_mode="buffer_only"))
    there.backed_up(KEY)
    there.plan()
    assert there.host.num_present(KEY) == 6

    there.settle()

    assert there.host.num_present(KEY) == 0
    assert len(there.stored) == 3 * 6


def test_as_a_passage_the_host_lets_go_of_what_cannot_be_stored(site: Callable[..., StorageSite]) -> None:
    there = site(settings=TierSettings(host_mode="buffer_only"))
    there.backed_up(KEY)
    there.tier.detach()
    there.backed_up(key_of([9]))

    assert there.host.num_present(KEY) == there.host.num_present(key_of([9])) == 0
    assert there.tier.counters.stores_dropped == {"detached": 7}


# -- whose keys --------------------------------------------------------------------------------------------------------

NAMES = [None, "", "x", "y", "xy", "х", "0"]  # the sixth is Cyrillic
NAMESPACES = [
    *(Namespace(*fields) for fields in itertools.product(NAMES[:4], repeat=3)),
    *(Namespace(adapter=name) for name in NAMES[4:]),
    *(Namespace(salt=name) for name in NAMES[4:]),
    Namespace(dp_rank=1),
]


def test_a_namespace_never_gets_anothers_pages(site: Callable[..., StorageSite]) -> None:
    """All pairs: what any one of them stored, none of the others finds."""
    for namespace in NAMESPACES:
        there = site(stored=stored_by_another(site, key_of(range(2), namespace)))
        for other in NAMESPACES:
            there.tier.expect(str(other), key_of(range(2), other), 0)
        while there.tier.num_under_way:
            there.plan()
            there.end_all()

        found = [other for other in NAMESPACES if there.host.probe(key_of(range(2), other))]
        assert found == [namespace]


def test_keys_without_a_salt_are_the_same_after_a_restart(site: Callable[..., StorageSite]) -> None:
    stored = stored_by_another(site)

    assert stored_by_another(site) == stored
    assert not stored.keys() & stored_by_another(site, key_of(range(6), Namespace(salt="s"))).keys()


@pytest.mark.parametrize("other", [{"weights": "v" * 64}, {"model": "n" * 64}, {"dtype": "bfloat16"}, {"tp_size": 2}])
def test_another_model_never_hits(site: Callable[..., StorageSite], other: dict[str, object]) -> None:
    there = site(stored=stored_by_another(site), identity=replace(IDENTITY, **other))

    there.tier.expect("a", KEY, 0)
    there.settle()

    assert tokens_on_host(there) == 0


# -- what is looked for ------------------------------------------------------------------------------------------------


def test_what_device_or_host_have_is_not_looked_for(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.host.put(key_of(range(2), rest=0))

    there.tier.expect("whole", KEY, 12)
    assert not there.tier.is_urgent
    there.tier.expect("a", KEY, 0)

    (lookup,) = there.plan().lookups
    assert len(lookup.keys.pages) == 4


def test_the_last_token_is_left_to_compute(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", key_of(range(6), rest=0), 0)

    (lookup,) = there.plan().lookups

    assert len(lookup.keys.pages) == 5


def test_a_prefix_that_the_device_has_is_fetched_only_if_storage_has_more(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site, key_of(range(4))))

    there.tier.expect("no more", KEY, 8)
    there.settle()
    assert tokens_on_host(there) == 0

    there.tier.forget("no more")
    there.tier.expect("more", KEY, 6)
    there.settle()
    assert tokens_on_host(there) == 8
    assert there.tier.fetched_tokens("more") == 2


def test_requests_with_the_same_prefix_share_a_lookup(site: Callable[..., StorageSite]) -> None:
    stored = stored_by_another(site) | stored_by_another(site, key_of([0, 1, 2, 7, 8]))
    there = site(PLAIN, stored)
    for request in ("a", "b", "c"):
        there.tier.expect(request, KEY, 0)
    there.tier.expect("other end", key_of([0, 1, 2, 7, 8]), 0)

    there.settle()

    lookups = [lookup for plan in there.plans for lookup in plan.lookups]
    assert [len(lookup.keys.pages) for lookup in lookups] == [6, 2]
    assert sum(len(fetch.keys.pages) for plan in there.plans for fetch in plan.fetches) == 8
    assert [there.tier.fetched_tokens(name) for name in ("a", "b", "c", "other end")] == [12, 12, 12, 10]


def test_what_another_one_did_not_find_is_not_looked_for_again(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.tier.expect("a", KEY, 0)
    there.tier.expect("b", key_of([0, 1, 8, 9]), 0)

    there.settle()

    assert sum(len(plan.lookups) for plan in there.plans) == 1


def test_a_long_prefix_comes_in_pieces_which_can_be_used_as_they_come(site: Callable[..., StorageSite]) -> None:
    long = key_of(range(600))
    stored = stored_by_another(lambda *a, **k: site(*a, capacity=PageCounts(700, 0, 0), **k), long)
    there = site(PLAIN, stored, capacity=PageCounts(700, 0, 0))
    there.tier.expect("a", long, 0)
    there.tier.expect("short", key_of(range(100)), 0)
    seen = []

    while there.tier.num_under_way:
        there.plan()
        there.end_all()
        there.check()
        seen.append((there.host.probe(long) // PAGE_SIZE, there.tier.holds_back("short")))

    assert seen == [(0, True), (256, False), (512, False), (600, False)]
    assert [there.tier.fetched_tokens(name) for name in ("a", "short")] == [1200, 200]


def test_a_snapshot_that_is_not_there_shortens_the_prefix(site: Callable[..., StorageSite]) -> None:
    stored = stored_by_another(site, needs=MIXED)
    states = sorted((kind_key for kind_key in stored if kind_key[0] == 2), key=lambda each: len(stored[each][1][1]))
    for lost in states[4:]:
        del stored[lost]
    there = site(MIXED, stored)

    there.tier.expect("a", KEY, 0)
    there.settle()

    assert tokens_on_host(there) == 4 * PAGE_SIZE


def test_a_window_page_that_is_not_there_shortens_the_prefix(site: Callable[..., StorageSite]) -> None:
    stored = stored_by_another(site, needs=WINDOWED)
    windows = sorted((kind_key for kind_key in stored if kind_key[0] == 1), key=lambda each: len(stored[each][1][1]))
    del stored[windows[4]]  # prefixes of 5 and of 6 pages need it
    there = site(WINDOWED, stored)

    there.tier.expect("a", KEY, 0)
    there.settle()

    assert tokens_on_host(there) == 4 * PAGE_SIZE


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_lookup_that_fails_is_a_miss_and_holds_nobody_back(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site), settings=TierSettings(prefetch_policy="wait_complete"))
    there.tier.expect("a", KEY, 0)
    there.tier.expect("b", key_of([0, 9]), 0)
    (lookup,) = there.plan().lookups

    there.end(lookup.number, "late", lambda: False)

    assert not there.tier.holds_back("a")
    assert not there.tier.holds_back("b")
    assert there.tier.counters.fetches_dropped == {"late": 1}
    assert not there.tier.is_urgent


def test_a_transfer_that_never_ran_is_a_miss(site: Callable[..., StorageSite]) -> None:
    """Its end names no keys at all."""
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    (fetch,) = there.plan().fetches

    there.sent.clear()
    assert there.tier.ended(TransferEnd(number=fetch.number, failure="failed"))

    there.check()
    assert tokens_on_host(there) == 0
    assert there.tier.counters.fetches_dropped == {"failed": 1}


def test_of_a_fetch_that_lost_pages_the_unbroken_part_is_kept(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    (fetch,) = there.plan().fetches
    outcomes = iter([True, True, True, False, True, True])

    there.end(fetch.number, "damaged", lambda: next(outcomes))

    there.check()
    assert tokens_on_host(there) == 3 * PAGE_SIZE
    assert there.tier.fetched_tokens("a") == 3 * PAGE_SIZE
    assert there.tier.counters.fetches_dropped == {"damaged": 1}


def test_what_the_workers_had_no_room_for_is_asked_for_again(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    (fetch,) = there.plan().fetches
    outcomes = iter([True, True, False, False, False, False])
    there.end(fetch.number, "queue_full", lambda: next(outcomes))
    assert tokens_on_host(there) == 2 * PAGE_SIZE

    (rest,) = there.plan().fetches
    there.end_all()

    assert len(rest.keys.pages) == 4
    assert tokens_on_host(there) == 6 * PAGE_SIZE


def test_a_fetch_for_which_the_workers_had_no_room_at_all_is_a_miss(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    (fetch,) = there.plan().fetches

    there.end(fetch.number, "queue_full", lambda: False)

    assert not there.plan().fetches
    assert tokens_on_host(there) == 0


def test_a_fetch_without_its_snapshot_is_no_use_and_all_is_freed(site: Callable[..., StorageSite]) -> None:
    there = site(RECURRENT, stored_by_another(site, needs=RECURRENT))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    (fetch,) = there.plan().fetches
    outcomes = iter([True] * 6 + [False])

    there.end(fetch.number, "damaged", lambda: next(outcomes))

    there.check()
    assert tokens_on_host(there) == 0
    assert len(there.host.unused[0]) == 64


def test_what_storage_lost_is_written_again(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.backed_up(KEY)
    there.settle()
    there.stored.clear()
    there.host.evict_all()
    there.tier.expect("a", KEY, 0)
    there.settle()

    there.backed_up(KEY)
    there.settle()

    assert len(there.stored) == 6


def test_a_fetch_that_gets_no_host_pages_is_given_up(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()

    there.plan(grants=False)

    there.check()
    assert there.tier.counters.fetches_dropped == {"no_room": 1}
    assert not there.tier.holds_back("a")
    assert not there.host.locks


def test_as_much_comes_as_the_host_has_room_for(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site), capacity=PageCounts(5, 0, 0))
    there.host.put(key_of([40, 41], rest=0))
    locked = there.host.lock(key_of([40], rest=0))[1]

    there.tier.expect("a", KEY, 0)
    there.settle()

    assert tokens_on_host(there) == 4 * PAGE_SIZE
    assert there.host.num_present(key_of([40, 41])) == 1
    there.host.unlock(locked)


def test_what_a_fetch_continues_is_not_evicted_meanwhile(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site), capacity=PageCounts(6, 0, 0))
    there.host.put(key_of(range(2), rest=0))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    there.plan()

    there.host.evict_all()

    assert there.host.num_present(KEY) == 2
    there.end_all()
    assert tokens_on_host(there) == 6 * PAGE_SIZE


def test_data_whose_prefix_was_evicted_before_the_fetch_is_not_asked_for(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.host.put(key_of(range(2), rest=0))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.host.evict_all()
    there.end_all()

    assert there.plan().fetches == ()

    assert there.tier.counters.fetches_dropped == {"evicted": 1}
    assert not there.tier.holds_back("a")


def test_what_was_inserted_meanwhile_stays_and_the_fetched_pages_are_freed(site: Callable[..., StorageSite]) -> None:
    there = site(MIXED, stored_by_another(site, needs=MIXED))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    there.plan()

    there.host.put(key_of(range(4), rest=0))
    before = there.host.span(KEY, 0)
    there.end_all()

    there.check()
    assert np.array_equal(there.host.span(KEY, 0).pages[:4], before.pages)
    assert tokens_on_host(there) == 6 * PAGE_SIZE


def test_an_end_after_a_reset_is_not_known(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()
    (fetch,) = there.plan().fetches
    there.tier.expect("b", key_of([30]), 0)
    there.backed_up(key_of([40]))

    there.reopen()

    assert not there.tier.ended(TransferEnd(number=fetch.number))
    assert not there.tier.holds_back("a")
    assert there.tier.num_under_way == 0


# -- who waits, and how long -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "held"), [("best_effort", [False] * 3), ("timeout", [True, True, False]), ("wait_complete", [True] * 3)]
)
def test_a_policy_says_how_long_a_request_waits(
    site: Callable[..., StorageSite], policy: str, held: list[bool]
) -> None:
    settings = TierSettings(prefetch_policy=policy, prefetch_timeout_s=2.0)  # type: ignore[arg-type]
    there = site(PLAIN, stored_by_another(site), settings=settings)
    there.tier.expect("a", KEY, 0)

    seen = []
    for there.now in (0.0, 1.9, 2.0):
        seen.append(there.tier.holds_back("a"))
    there.settle()

    assert seen == held
    assert not there.tier.holds_back("a")
    there.tier.forget("a")
    assert there.tier.counters.held_back_s == {"best_effort": 0, "timeout": 1.9, "wait_complete": 2.0}[policy]


def test_a_request_waits_until_the_data_is_there(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site), settings=TierSettings(prefetch_policy="wait_complete"))
    there.tier.expect("a", KEY, 0)
    seen = [there.tier.holds_back("a")]
    for _ in range(2):
        there.plan()
        seen.append(there.tier.holds_back("a"))
        there.end_all()
        seen.append(there.tier.holds_back("a"))

    assert seen == [True, True, True, True, False]


def test_a_request_with_nothing_to_come_is_never_held_back(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.tier.expect("short", key_of([]), 0)
    there.tier.detach()
    there.tier.expect("a", KEY, 0)

    assert not there.tier.holds_back("short")
    assert not there.tier.holds_back("a")
    assert not there.tier.holds_back("never heard of")
    there.tier.forget("never heard of")


def test_what_nobody_waits_for_before_it_was_found_is_not_fetched(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("early", key_of([0, 9]), 0)
    there.tier.forget("early")
    assert there.plan().lookups == ()

    there.tier.expect("a", KEY, 0)
    (lookup,) = there.plan().lookups
    there.tier.forget("a")
    assert there.plan().cancels == (lookup.number,)
    there.end(lookup.number, "cancelled", lambda: False)

    assert there.plan().fetches == ()


def test_what_was_found_still_comes_for_later_requests(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    there.plan()
    there.end_all()

    there.tier.forget("a")
    there.settle()

    assert tokens_on_host(there) == 6 * PAGE_SIZE


def test_who_comes_while_a_lookup_is_cancelled_gets_one_of_its_own(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.tier.expect("a", KEY, 0)
    (lookup,) = there.plan().lookups
    there.tier.forget("a")
    there.tier.expect("b", KEY, 0)
    there.plan()
    there.end(lookup.number, "cancelled", lambda: False)

    there.settle()

    assert there.tier.fetched_tokens("b") == 6 * PAGE_SIZE


# -- storage that comes and goes ---------------------------------------------------------------------------------------


def test_detached_nothing_is_asked_for_and_nobody_waits(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site), settings=TierSettings(prefetch_policy="wait_complete"))
    there.tier.expect("under way", KEY, 0)
    there.plan()
    there.tier.expect("queued", key_of([20, 21]), 0)
    there.backed_up(key_of([30]))

    there.tier.detach()
    there.backed_up(key_of([31]))
    there.tier.expect("later", key_of([22]), 0)

    assert not any(there.tier.holds_back(name) for name in ("under way", "queued", "later"))
    there.check()
    plan = there.plan()
    assert (plan.stores, plan.lookups, plan.fetches) == ((), (), ())
    there.end_all()
    assert there.plan().fetches == ()
    assert not there.tier.is_attached


def test_nothing_that_one_storage_said_is_believed_of_the_next(site: Callable[..., StorageSite]) -> None:
    there = site(PLAIN, stored_by_another(site))
    there.backed_up(key_of([30]))
    there.tier.expect("a", KEY, 0)
    there.plan()

    there.tier.attach(IDENTITY.seed)
    there.end_all()
    there.stored.clear()

    assert there.plan().fetches == ()
    assert there.tier.counters.fetches_dropped == {"stale": 1}
    there.host.evict_all()
    there.backed_up(key_of([30]))
    assert len(there.plan().stores) == 1


def test_after_it_was_cleared_everything_is_written_again(site: Callable[..., StorageSite]) -> None:
    there = site()
    there.backed_up(KEY)
    there.settle()
    there.stored.clear()

    there.tier.cleared()
    there.host.evict_all()
    there.backed_up(KEY)
    there.settle()

    assert len(there.stored) == 6


def test_counters_are_a_snapshot(site: Callable[..., StorageSite]) -> None:
    there = site()
    before = there.tier.counters
    there.backed_up(KEY)
    there.tier.expect("a", key_of([20]), 0)
    queued = there.tier.counters
    there.plan()
    sent = there.tier.counters

    assert (before.queued_stores, before.stored_tokens, before.under_way) == (0, 0, 0)
    assert (queued.queued_stores, queued.queued_prefixes, queued.under_way) == (1, 1, 0)
    assert (sent.queued_stores, sent.queued_prefixes, sent.under_way) == (0, 0, 2)
    with pytest.raises(TypeError):
        before.stores_dropped["gone"] = 1  # type: ignore[index]


def test_an_end_of_somebody_elses_transfer_is_left_to_it(site: Callable[..., StorageSite]) -> None:
    none = np.empty(0, bool)

    assert not site().tier.ended(TransferEnd(number=77, arrived=OfEachPool(none, none, none)))
