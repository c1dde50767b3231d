"""KV events: a listener learns what the cache holds, and the same things are one thing to both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from pytest_mock import MockerFixture

from app.caches.tree import telling
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, page_hashes
from app.observability.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventRecorder, KvEventReplica
from tests.support.tree_model import CacheRig, key_of


@pytest.fixture
def recorder() -> KvEventRecorder:
    return KvEventRecorder(page_size=4)


@pytest.fixture
def rig(recorder: KvEventRecorder) -> Iterator[CacheRig]:
    rig = CacheRig("radix_cache", events=recorder)
    yield rig
    rig.check()


def hashes_of(key: RadixKey) -> tuple[bytes, ...]:
    return tuple(page_hashes(key.namespace.seed(), key.raw, 4))


def test_storing_tells_hashes_tokens_parent_and_namespace(rig: CacheRig, recorder: KvEventRecorder) -> None:
    # given
    namespace = Namespace(adapter="a", salt="s", extra_key="k", dp_rank=3)
    chain = hashes_of(key_of(range(16), namespace))

    # when
    rig.store(range(8), namespace)
    rig.store(range(16), namespace)

    # then
    first, second = recorder.drain()
    assert first == BlockStored(
        page_hashes=chain[:2],
        parent_hash=None,
        token_ids=tuple(range(8)),
        page_size=4,
        adapter="a",
        salt="s",
        extra_key="k",
        dp_rank=3,
        medium="device",
    )
    assert second == replace(first, page_hashes=chain[2:], parent_hash=chain[1], token_ids=tuple(range(8, 16)))
    assert recorder.drain() == []


def test_a_match_and_what_is_there_already_tell_nothing(rig: CacheRig, recorder: KvEventRecorder) -> None:
    # given
    rig.store(range(16))
    recorder.drain()

    # when: a split, a repeated insert, a lock
    rig.matched(range(9))
    rig.store(range(16))
    rig.cache.unlock(rig.cache.lock(rig.cache.match(key_of(range(17)))))

    # then
    assert recorder.drain() == []


def test_a_removal_names_only_what_was_removed(rig: CacheRig, recorder: KvEventRecorder) -> None:
    """H32: the same tokens under two salts, an adapter and none; one of them is evicted."""
    # given
    namespaces = [Namespace(salt="1"), Namespace(salt="2"), Namespace(adapter="1"), DEFAULT_NAMESPACE]
    replica = KvEventReplica()
    for namespace in namespaces:
        rig.store(range(16), namespace)
    replica.apply(recorder.drain())
    chains = [hashes_of(key_of(range(16), namespace)) for namespace in namespaces]
    assert len(replica.page_hashes) == len({page for chain in chains for page in chain}) == 16

    # when
    rig.cache.evict(1)

    # then
    (event,) = recorder.drain()
    assert event == BlockRemoved(page_hashes=chains[0], medium="device")
    replica.apply([event])
    assert [replica.num_cached_pages(chain) for chain in chains] == [0, 4, 4, 4]


def test_a_split_splits_the_hashes_too(rig: CacheRig, recorder: KvEventRecorder) -> None:
    # given a node that is split, and its upper part locked
    rig.store(range(16))
    receipt = rig.cache.lock(rig.cache.match(key_of(range(9))))
    recorder.drain()

    # when
    rig.cache.evict(100)

    # then
    chain = hashes_of(key_of(range(16)))
    assert recorder.drain() == [BlockRemoved(page_hashes=chain[2:], medium="device")]
    rig.cache.unlock(receipt)


@pytest.mark.parametrize("lose", ["reset", "pool"])
def test_a_reset_clears_the_listener(rig: CacheRig, recorder: KvEventRecorder, lose: str) -> None:
    # given
    replica = KvEventReplica()
    rig.store(range(16))

    # when
    rig.lose_pool()
    if lose == "reset":
        rig.cache.reset()
    rig.cache.probe(key_of([1]))

    # then
    events = recorder.drain()
    assert events[-1] == AllBlocksCleared()
    replica.apply(events)
    assert replica.page_hashes == set()


def test_every_route_finds_a_page_by_one_key(rig: CacheRig, recorder: KvEventRecorder) -> None:
    """H27: memory, probe, events and hash chain agree on the length of a hit."""
    # given
    tokens = np.arange(30, dtype=np.int32)
    rig.store(tokens[:22])
    replica = KvEventReplica()
    replica.apply(recorder.drain())

    # when
    whole = RadixKey.of(tokens)

    # then
    for key in (whole, whole.head(30), RadixKey.of(tokens.copy())):
        routes = {
            "match": rig.cache.match(key).num_tokens,
            "probe": rig.cache.probe(key),
            "insert": sum(count * 4 for _, count in rig.store(key.tokens()[:22]).duplicates),
            "events": replica.num_cached_pages(hashes_of(key)) * 4,
        }
        assert set(routes.values()) == {20}, routes


def test_a_listener_that_joined_late_never_believes_too_much(rig: CacheRig, recorder: KvEventRecorder) -> None:
    # given
    rig.store(range(16))
    recorder.drain()
    late = KvEventReplica()

    # when
    rig.store([*range(16), *range(50, 54)])
    late.apply(recorder.drain())

    # then: it knows a page, but not the way to it
    assert len(late.page_hashes) == 1
    assert late.num_cached_pages(hashes_of(key_of([*range(16), *range(50, 54)]))) == 0
    rig.cache.flush()
    late.apply(recorder.drain())
    assert late.page_hashes == set()


def test_what_nobody_drains_is_forgotten_and_listeners_believe_less() -> None:
    # given a recorder that holds three events, and a listener of the first one
    recorder = KvEventRecorder(page_size=4, max_events=3)
    rig = CacheRig("radix_cache", events=recorder)
    replica = KvEventReplica()
    rig.store(range(8))
    replica.apply(recorder.drain())

    # when
    for first in range(100, 108):
        rig.store(range(first, first + 4))

    # then
    events = recorder.drain()
    assert events[0] == AllBlocksCleared()
    assert len(events) <= 3
    assert recorder.num_forgotten > 0
    replica.apply(events)
    assert 0 < len(replica.page_hashes) < 10
    held = {page for first in range(100, 108) for page in hashes_of(key_of(range(first, first + 4)))}
    assert replica.page_hashes <= held


def test_a_listener_of_one_medium_ignores_the_others() -> None:
    device, host = KvEventRecorder(page_size=4), KvEventRecorder(page_size=4, medium="host")
    replicas = {"device": KvEventReplica(), "host": KvEventReplica("host")}
    for recorder in (device, host):
        CacheRig("radix_cache", events=recorder).store(range(8))
    host.cleared()

    for replica in replicas.values():
        replica.apply([*device.drain(), *host.drain()])

    assert (len(replicas["device"].page_hashes), len(replicas["host"].page_hashes)) == (2, 0)


def test_nothing_is_hashed_while_nobody_listens(mocker: MockerFixture) -> None:
    # given
    hashing = mocker.spy(telling, "page_hashes")
    rig = CacheRig("radix_cache")

    # when
    rig.store(range(16))
    rig.matched(range(9))
    rig.cache.flush()

    # then
    assert hashing.call_count == 0
