"""The cache as a scheduler sees it: leases, each verb whole or not at all, every page with one owner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from app.caches.base import CacheDeps
from app.caches.chunk_cache import ChunkCache
from app.caches.radix_cache import RadixCache
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.keys import Namespace, RadixKey
from app.core.ports import PoolSpec
from app.errors import DoubleFreeError, IntegrityError, LockedPageError, OwnershipError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.scheduler_adapter import SchedulerAdapter

PAGES, PAGE_SIZE = 16, 4
CACHES = {"radix_cache": RadixCache, "chunk_cache": ChunkCache}


class Pool:
    """A device pool as control sees it: its shape."""

    spec = PoolSpec(num_pages=PAGES, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class Rig:
    """An adapter and the allocator that a runtime would own."""

    def __init__(self, cache_type: str) -> None:
        identity = CacheIdentity(RuntimeId("test"), Generation(1))
        self.allocator = PagedTokenToKVPoolAllocator(PAGES, PAGE_SIZE, identity)
        deps = CacheDeps(token_allocator=self.allocator.port, device_pool=Pool(), page_size=PAGE_SIZE)
        self.adapter = SchedulerAdapter(CACHES[cache_type](deps))

    def prepare(self, request_id: str, num_pages: int) -> np.ndarray:
        """What a plan does: apply recorded frees, hand out pages."""
        self.allocator.apply_frees(self.adapter.recorded_frees().pages)
        pages = self.allocator.allocate(num_pages)
        self.adapter.extend(request_id, pages)
        return pages

    def serve(self, request_id: str, tokens: range) -> None:
        """A request from admission to its end."""
        prefix = self.adapter.admit(request_id, key(tokens))
        self.prepare(request_id, -(-len(tokens) // PAGE_SIZE) - prefix.num_tokens // PAGE_SIZE)
        self.adapter.finish(request_id, key(tokens))

    def counts(self) -> dict[str, int]:
        return {name: pages.size for name, pages in self.adapter.ledger().items()}


def key(tokens: range | list[int], namespace: Namespace = Namespace()) -> RadixKey:  # noqa: B008
    return RadixKey.of(np.array(tokens, np.int32), namespace)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("radix_cache")
    yield rig
    rig.adapter.check_integrity()
    rig.allocator.check_integrity()


@pytest.fixture(params=CACHES)
def any_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.adapter.check_integrity()
    rig.allocator.check_integrity()


def test_a_finished_request_leaves_its_whole_pages_to_the_next(rig: Rig) -> None:
    rig.serve("a", range(10))

    prefix = rig.adapter.admit("b", key(range(10)))

    assert prefix.num_tokens == 8
    assert prefix.extent.pages().size == 2
    assert rig.counts()["cached_protected"] == 2
    rig.adapter.release("b")


def test_a_release_frees_what_was_not_published_and_only_that(rig: Rig) -> None:
    rig.adapter.admit("a", key(range(10)))
    rig.prepare("a", 3)
    rig.adapter.publish("a", key(range(8)))

    rig.adapter.release("a")

    assert rig.counts() == {
        "cached_evictable": 2,
        "cached_protected": 0,
        "requests": 0,
        "restoring": 0,
        "recorded": 1,
        "free": PAGES - 3,
    }


def test_a_second_end_of_a_request_changes_nothing(any_rig: Rig) -> None:
    """H01: one release path, idempotent."""
    any_rig.adapter.admit("a", key(range(10)))
    any_rig.prepare("a", 3)
    any_rig.adapter.finish("a", key(range(9)))
    before = any_rig.counts()

    any_rig.adapter.finish("a", key(range(9)))
    any_rig.adapter.release("a")

    assert any_rig.counts() == before


def test_admitting_a_request_twice_is_refused_and_keeps_its_lease(any_rig: Rig) -> None:
    any_rig.adapter.admit("a", key(range(10)))
    any_rig.prepare("a", 2)

    with pytest.raises(IntegrityError, match="admitted already"):
        any_rig.adapter.admit("a", key(range(10)))

    assert any_rig.adapter.num_pages("a") == 2
    any_rig.adapter.release("a")


def test_two_requests_with_one_prompt_end_up_on_the_same_pages(rig: Rig) -> None:
    """Both computed the prompt at once; the second to publish gives its duplicates back, once."""
    for request_id in ("a", "b"):
        rig.adapter.admit(request_id, key(range(8)))
        rig.prepare(request_id, 2)
    rig.adapter.publish("a", key(range(8)))

    rewrite = rig.adapter.publish("b", key(range(8)))

    assert rewrite is not None
    assert rewrite.first_page_index == 0
    assert rewrite.pages.tolist() == rig.adapter.admit("c", key(range(9))).extent.pages().tolist()
    assert rig.counts()["recorded"] == 2
    for request_id in ("a", "b", "c"):
        rig.adapter.release(request_id)
    assert rig.counts()["cached_evictable"] == 2


def test_publishing_the_same_tokens_again_changes_nothing(rig: Rig) -> None:
    rig.adapter.admit("a", key(range(10)))
    rig.prepare("a", 3)
    rig.adapter.publish("a", key(range(10)))
    before = rig.counts()

    assert rig.adapter.publish("a", key(range(10))) is None
    assert rig.adapter.publish("a", key(range(5))) is None

    assert rig.counts() == before
    rig.adapter.release("a")


def test_an_unsettled_tail_never_enters_the_cache(rig: Rig) -> None:
    """H02: the ids of the last page change again and again; only what is settled is published."""
    rig.adapter.admit("a", key(range(6)))
    rig.prepare("a", 3)
    for draft in range(5):
        rig.adapter.publish("a", key([*range(4), 100 + draft]))
        rig.adapter.check_integrity()

    rig.adapter.finish("a", key([*range(4), 7, 8, 9, 10]))

    assert rig.adapter.probe(key([*range(4), 7, 8, 9, 10, 0])) == 8
    assert rig.adapter.probe(key([*range(4), 100, 8, 9, 10, 0])) == 4
    assert rig.counts()["cached_evictable"] == 2


def test_a_published_page_whose_tokens_change_is_refused_without_a_trace(rig: Rig) -> None:
    """H02: a page in the tree cannot be published again under other tokens: it would have two owners."""
    rig.adapter.admit("a", key(range(8)))
    rig.prepare("a", 3)
    rig.adapter.publish("a", key(range(8)))

    before = rig.counts()
    with pytest.raises(OwnershipError):
        rig.adapter.publish("a", key([0, 1, 2, 3, *range(50, 58)]))

    assert rig.counts() == before
    assert rig.adapter.probe(key([0, 1, 2, 3, *range(50, 58)])) == 4
    assert rig.adapter.probe(key(range(9))) == 8
    rig.adapter.release("a")


def test_make_room_evicts_the_shortfall_and_no_more(rig: Rig) -> None:
    """Callers state the need; eviction gets the difference to what is free."""
    for index in range(4):
        rig.serve(str(index), range(100 * index, 100 * index + 12))
    assert rig.counts()["cached_evictable"] == 12

    assert rig.adapter.make_room(6)

    assert rig.counts()["cached_evictable"] == 9
    assert rig.adapter.available() == 7


def test_make_room_evicts_nothing_when_it_cannot_succeed(rig: Rig) -> None:
    rig.serve("a", range(8))
    rig.adapter.admit("b", key(range(100, 120)))
    rig.prepare("b", 10)
    before = rig.counts()

    assert not rig.adapter.make_room(7)

    assert rig.counts() == before
    rig.adapter.release("b")


def test_the_prefix_of_a_request_survives_pressure(rig: Rig) -> None:
    """H04, H10: room is never made out of what somebody reads."""
    rig.serve("a", range(8))
    prefix = rig.adapter.admit("b", key(range(9)))

    assert not rig.adapter.make_room(PAGES)
    assert rig.adapter.make_room(PAGES - 2)

    assert rig.adapter.probe(key(range(9))) == prefix.num_tokens == 8
    rig.adapter.release("b")


def test_reachable_counts_recorded_and_evictable_pages(any_rig: Rig) -> None:
    any_rig.serve("a", range(10))

    assert any_rig.adapter.reachable() == PAGES


def test_a_flush_is_refused_while_a_request_reads_the_cache(rig: Rig) -> None:
    """H16"""
    rig.serve("a", range(8))
    rig.adapter.admit("b", key(range(9)))

    with pytest.raises(LockedPageError):
        rig.adapter.flush()

    rig.adapter.release("b")
    assert rig.adapter.flush() == 2
    assert rig.adapter.probe(key(range(9))) == 0


def test_a_reset_forgets_every_lease(any_rig: Rig) -> None:
    any_rig.adapter.admit("a", key(range(10)))
    any_rig.prepare("a", 3)
    runtime_id, generation = any_rig.allocator.identity

    any_rig.allocator.reset(CacheIdentity(runtime_id, Generation(generation + 1)))
    any_rig.adapter.reset()

    any_rig.adapter.release("a")
    assert any_rig.counts()["free"] == PAGES
    any_rig.adapter.admit("a", key(range(10)))
    any_rig.adapter.release("a")


def test_pages_of_a_lost_pool_cannot_be_given_to_the_new_one(any_rig: Rig) -> None:
    any_rig.adapter.admit("a", key(range(10)))
    any_rig.prepare("a", 3)
    runtime_id, generation = any_rig.allocator.identity
    any_rig.allocator.reset(CacheIdentity(runtime_id, Generation(generation + 1)))

    with pytest.raises(DoubleFreeError):
        any_rig.adapter.release("a")

    assert any_rig.counts()["free"] == PAGES


@pytest.mark.parametrize(("pages", "word"), [([1], "double owned"), ([], "leaked")], ids=["an excess", "a deficit"])
def test_integrity_tells_an_excess_from_a_deficit(pages: list[int], word: str) -> None:
    """H02: a page with two owners and a page with none are different faults."""
    rig = Rig("radix_cache")
    rig.adapter.admit("a", key(range(8)))
    if pages:
        rig.adapter.extend("a", np.array(pages, np.int32))  # page 1 is free as well
    else:
        rig.allocator.allocate(1)

    with pytest.raises(IntegrityError, match=rf"{word}: \[1\]"):
        rig.adapter.check_integrity()


def test_equal_tokens_of_two_tenants_are_never_shared(rig: Rig) -> None:
    """H12"""
    rig.serve("a", range(8))

    other = rig.adapter.admit("b", key(range(8), Namespace(salt="other")))

    assert other.num_tokens == 0
    rig.adapter.release("b")


def test_the_adapter_tells_why_an_admission_missed_and_what_is_cached(any_rig: Rig) -> None:
    """Between the admission and its publishing, as a scheduler asks."""
    # given
    any_rig.serve("a", range(8))
    reuses = any_rig.adapter.reuses_prefixes
    wanted = key([*range(6), 70, 71, 72])

    # when
    prefix = any_rig.adapter.admit("b", wanted)
    miss = any_rig.adapter.explain_miss(wanted, prefix.num_tokens)

    # then
    assert (miss.reason, miss.same_tokens) == (("differs", 6) if reuses else ("no_reuse", None))
    assert [each.num_tokens for each in any_rig.adapter.top_prefixes(5).prefixes] == ([4, 8] if reuses else [])
    any_rig.adapter.release("b")


def test_pages_are_counted_by_who_has_them(rig: Rig) -> None:
    # given
    rig.serve("a", range(12))
    rig.adapter.admit("b", key(range(9)))
    rig.prepare("b", 4)

    # then
    assert rig.adapter.page_counts() == (PAGES - 3 - 4, 1, 2, 4, 0)
    rig.adapter.release("b")
    assert rig.adapter.page_counts() == (PAGES - 3, 3, 0, 0, 0)
