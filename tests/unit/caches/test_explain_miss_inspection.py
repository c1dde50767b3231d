"""Why a prompt's cached part ended where it did, as the radix tree tells it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.caches.tree.evicted import EvictionMemory
from app.caches.tree.inspection import CHILDREN
from app.core.keys import Namespace
from tests.support.tree_model import key_of
from tests.support.watched_cache import WatchedRig


@pytest.fixture
def rig() -> Iterator[WatchedRig]:
    rig = WatchedRig()
    yield rig
    rig.check()


# -- why was this not a hit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [17, 18, 20])
def test_whole_when_everything_that_can_be_reused_was(rig: WatchedRig, length: int) -> None:
    rig.store(range(16))
    miss = rig.why(range(length))
    assert (miss.reason, miss.num_matched) == ("whole", 16)
    assert f"16 of {length} tokens" in miss.sentence


def test_whole_for_a_cached_prompt_that_is_sent_again(rig: WatchedRig) -> None:
    """Of 16 cached tokens 12 are reused: the last token is computed, and a page is shared whole."""
    rig.store(range(16))
    miss = rig.why(range(16))
    assert (miss.reason, miss.num_matched) == ("whole", 12)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_short_when_the_prompt_has_no_whole_page_before_its_last_token(rig: WatchedRig, length: int) -> None:
    rig.store(range(16))
    miss = rig.why(range(length))
    assert miss.reason == "short"
    assert f"{length} tokens. Reuse begins with 5" in miss.sentence


@pytest.mark.parametrize("stored", [[], [*range(50, 66)]], ids=["an empty cache", "other prompts"])
def test_unseen_when_nothing_begins_like_the_prompt(rig: WatchedRig, stored: list[int]) -> None:
    rig.store(stored)
    assert rig.why(range(20)).reason == "unseen"


@pytest.mark.parametrize("differs_at", range(1, 16))
def test_differs_names_the_first_token_that_is_not_the_cached_ones(rig: WatchedRig, differs_at: int) -> None:
    # given
    rig.store(range(32))

    # when
    prompt = [*range(differs_at), 77, *range(900, 920)]
    miss = rig.why(prompt)

    # then
    assert (miss.reason, miss.same_tokens, miss.num_matched) == ("differs", differs_at, differs_at // 4 * 4)
    assert miss.same == tuple(range(max(0, differs_at - 8), differs_at))
    assert miss.prompt_goes_on == tuple(prompt[differs_at : differs_at + 8])
    assert miss.cached_goes_on == tuple(range(differs_at, differs_at + 8))


def test_differs_at_the_first_token_is_unseen(rig: WatchedRig) -> None:
    rig.store(range(32))
    assert rig.why([77, *range(1, 32)]).reason == "unseen"


def test_differs_compares_with_the_continuation_that_stays_equal_longest(rig: WatchedRig) -> None:
    # given
    rig.store(range(4))
    for third_page in ([9, 9, 9, 9], [4, 5, 9, 9], [4, 9, 9, 9], [4, 5, 6, 9], [8, 8, 8, 8]):
        rig.store([*range(4), *third_page])

    # when
    miss = rig.why([*range(4), 4, 5, 6, 7, 0])

    # then
    assert (miss.reason, miss.same_tokens) == ("differs", 7)
    assert (miss.prompt_goes_on, miss.cached_goes_on) == ((7, 0), (9,))


def test_differs_looks_at_a_bounded_number_of_continuations_the_latest_first() -> None:
    # given one continuation that nearly fits, and then more than are looked at that do not
    rig = WatchedRig(num_pages=1000)
    rig.store([0, 1, 2, 99])
    for other in range(CHILDREN):
        rig.store([1000 + other, 0, 0, 0])

    # then
    assert rig.why(range(5)).reason == "unseen"
    rig.store([0, 98, 98, 98])
    assert rig.why(range(5)).same_tokens == 1


def test_ends_when_the_cached_prompt_simply_ended(rig: WatchedRig) -> None:
    rig.store(range(16))
    miss = rig.why(range(40))
    assert (miss.reason, miss.num_matched) == ("ends", 16)
    assert "ends after 16 tokens" in miss.sentence


def test_late_when_the_page_came_after_the_match(rig: WatchedRig) -> None:
    """Two requests with one prompt at the same time: each computed it."""
    # given
    key = key_of(range(20))
    matched = rig.cache.match(key).num_tokens

    # when
    rig.store(range(8))

    # then: at a node's end, and within an edge
    assert rig.cache.explain_miss(key, matched).reason == "late"
    assert rig.cache.explain_miss(key, 4).reason == "late"


def test_what_left_after_the_match_is_explained_from_where_it_ends_now(rig: WatchedRig) -> None:
    # given
    rig.store(range(8))
    key = key_of(range(20))
    matched = rig.cache.match(key).num_tokens

    # when
    rig.cache.flush()

    # then
    miss = rig.cache.explain_miss(key, matched)
    assert (miss.reason, miss.num_matched) == ("evicted", 0)


# -- evicted ---------------------------------------------------------------------------------------------------------


def test_evicted_tells_how_long_ago(rig: WatchedRig) -> None:
    # given a prompt whose second half is evicted
    rig.store(range(8))
    receipt = rig.cache.lock(rig.cache.match(key_of(range(9))))
    rig.store(range(16))
    rig.cache.evict(1)
    rig.cache.unlock(receipt)

    # when
    rig.watch.now += 12

    # then
    miss = rig.why(range(20))
    assert (miss.reason, miss.num_matched, miss.evicted_s_ago) == ("evicted", 8, 12.0)
    assert miss.sentence == "The tokens after the first 8 were cached, but were evicted 12 seconds earlier."


def test_evicted_is_known_when_nothing_of_the_namespace_is_left(rig: WatchedRig) -> None:
    """The root went with its last child."""
    tenant = Namespace(salt="t")
    rig.store(range(16), tenant)
    rig.store(range(100, 116))
    rig.cache.flush()

    assert rig.why(range(20), tenant).reason == "evicted"
    assert rig.why(range(20)).reason == "unseen"
    assert rig.why(range(100, 120)).reason == "evicted"


def test_evicted_is_only_said_of_the_very_page_that_was_there(rig: WatchedRig) -> None:
    # given
    rig.store(range(8))
    rig.store(range(16))
    rig.cache.evict(1)

    # then
    assert rig.why([*range(8), 8, 9, 10, 11, 0]).reason == "evicted"
    assert rig.why([*range(8), 8, 9, 10, 77, 0]).reason == "ends"


def test_a_node_that_is_split_remembers_what_followed_it(rig: WatchedRig) -> None:
    """The lower half ends where the node ended, and so do its lost children."""
    # given
    rig.store(range(8))
    rig.store(range(16))
    rig.cache.evict(1)

    # when
    rig.matched(range(5))

    # then
    assert rig.why(range(17)).reason == "evicted"
    assert rig.why([*range(4), *range(8, 12), 0]).reason == "differs"


def test_halves_of_a_split_node_that_are_evicted_one_after_the_other_are_both_known(rig: WatchedRig) -> None:
    # given
    rig.store(range(16))
    rig.matched(range(9))

    # when the lower half leaves
    rig.cache.evict(1)
    rig.watch.now += 3

    # then
    assert rig.why(range(20)).evicted_s_ago == 3.0

    # when the upper half leaves too
    rig.cache.evict(1)
    rig.watch.now += 4
    miss = rig.why(range(20))
    assert (miss.num_matched, miss.evicted_s_ago) == (0, 4.0)


def test_what_was_below_a_node_that_left_too_is_not_said_to_be_evicted_without_knowing(rig: WatchedRig) -> None:
    """Parents evicted later: the new node is another place, and what is not known of it is not claimed."""
    # given a chain of two that left whole
    rig.store(range(8))
    rig.store(range(16))
    rig.cache.flush()

    # then the first missing page is known
    assert rig.why(range(20)).reason == "evicted"

    # when only the first half comes back
    rig.store(range(8))

    # then
    assert rig.why(range(20)).reason == "ends"


def test_a_page_that_came_back_counts_from_its_last_eviction(rig: WatchedRig) -> None:
    # given evicted, back, evicted again
    for _ in range(2):
        rig.store(range(16))
        rig.cache.flush()
        rig.watch.now += 10

    # then
    assert rig.why(range(20)).evicted_s_ago == 10.0

    # when it is back
    rig.store(range(16))
    assert rig.why(range(40)).reason == "ends"


def test_a_lost_pool_leaves_no_memory_of_evictions(rig: WatchedRig) -> None:
    rig.store(range(16))
    rig.cache.flush()
    rig.lose_pool()
    assert rig.why(range(20)).reason == "unseen"


def test_the_memory_of_evictions_is_bounded_and_keeps_the_latest() -> None:
    # given
    memory = EvictionMemory()
    for index in range(20_000):
        memory.remember(index, b"page", float(index), 0)
        assert len(memory) <= 4096

    # then
    assert [memory.when(index, b"page") for index in (20_000 - 2048, 19_999)] == [17_952.0, 19_999.0]
    assert memory.when(0, b"page") is None
    assert memory.when(19_999, b"other") is None


# -- namespaces ------------------------------------------------------------------------------------------------------

OTHERS = [
    (Namespace(salt="tenant-b"), "cache salt"),
    (Namespace(extra_key="secret"), "extra key"),
    (Namespace(adapter="lora-7"), "adapter"),
    (Namespace(dp_rank=3), "data-parallel rank"),
    (Namespace(adapter="lora-7", salt="tenant-b"), "adapter and another cache salt"),
]


@pytest.mark.parametrize(("other", "words"), OTHERS)
def test_other_namespace_tells_the_field_and_never_its_value(rig: WatchedRig, other: Namespace, words: str) -> None:
    # given
    rig.store(range(16), other)

    # when
    miss = rig.why(range(20))

    # then
    assert miss.reason == "other_namespace"
    assert f"under another {words}, which" in miss.sentence
    assert not any(str(value) in miss.sentence for value in ("tenant-b", "secret", "lora-7"))


def test_other_namespace_names_the_one_that_differs_least(rig: WatchedRig) -> None:
    rig.store(range(16), Namespace(salt="b", adapter="x", dp_rank=1))
    rig.store(range(16), Namespace(salt="b"))
    rig.store(range(16), Namespace(salt="b", adapter="x"))
    assert rig.why(range(20)).other_fields == ("salt",)


def test_other_namespace_needs_the_whole_next_page(rig: WatchedRig) -> None:
    """What another tenant shares no further than this one had is no reason."""
    # given both have the first page
    rig.store(range(4))
    rig.store(range(4), Namespace(salt="b"))
    assert rig.why(range(20)).reason == "ends"

    # when the other one has the second too
    rig.store(range(10), Namespace(salt="b"))

    # then
    assert (rig.why(range(20)).reason, rig.why(range(20)).num_matched) == ("other_namespace", 4)


def test_comparing_with_other_namespaces_is_bounded() -> None:
    # given more tenants than are looked at, of which only the last has the page
    rig = WatchedRig(num_pages=200)
    for tenant in range(100):
        rig.store([tenant + 1, 0, 0, 0], Namespace(salt=str(tenant)))

    # then
    assert rig.why([5, 0, 0, 0, 0]).reason == "other_namespace"
    assert rig.why([100, 0, 0, 0, 0]).reason == "unseen"
