"""KV events of a whole engine: replayed, they say exactly what each tier holds."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.caches.tiers.storage_events import StorageEvents
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, page_hashes
from app.hicache.storage.base import Outcome
from app.observability.kv_events import AllBlocksCleared, KvEvent, KvEventRecorder, KvEventReplica
from tests.support.engine import opened
from tests.support.tiered_engine import storage_fields, tiered_site

PAGE_SIZE = 4
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 12},
    "recurrent": {"recurrent": True, "recurrent_track_interval": 16},
}


def recording(recorder: KvEventRecorder) -> object:
    return lambda _: providers.Object(recorder)


@pytest.mark.parametrize("storage", [None, "memory"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("parts", MODELS)
def test_each_tiers_events_replay_to_what_it_holds(parts: str, policy: str, storage: str | None) -> None:
    device, host = KvEventRecorder(page_size=PAGE_SIZE), KvEventRecorder(page_size=PAGE_SIZE, medium="host")
    replicas = KvEventReplica(), KvEventReplica("host")
    prompts = [[*range(first, first + 50)] for first in range(1, 9)]
    namespaces = [DEFAULT_NAMESPACE, Namespace(salt="other")]
    removed = 0
    with opened(
        **MODELS[parts],
        cache_type=None,
        enable_hierarchical_cache=True,
        hicache_write_policy=policy,
        hicache_storage_backend=storage,
        hicache_ratio=1.5,
        overrides={"events": recording(device), "host_events": recording(host)},
    ) as engine:
        cache = engine.container.tree_cache()
        seed = engine.container.storage_ids().pages.seed if storage else Namespace.seed
        keys: list[RadixKey] = []

        def check() -> int:
            """-> pages on the host."""
            events = [*device.drain(), *host.drain()]
            held = []
            for replica, tier in zip(replicas, (cache, cache.tiers.host), strict=True):
                replica.apply(events)
                chains = [page_hashes(seed(key.namespace), key.raw, PAGE_SIZE)[: tier.num_present(key)] for key in keys]
                held.append({page for chain in chains for page in chain})
                assert replica.page_hashes == held[-1]
            nonlocal removed
            removed += sum(type(event).__name__ == "BlockRemoved" for event in events if event.medium == "host")
            return len(held[-1])

        # when: more than both tiers hold, and some of it again
        for turn, namespace in enumerate([*namespaces, *namespaces]):
            for prompt in prompts:
                output = engine.serve(prompt, namespace=namespace, request_id=f"{turn}-{prompt[0]}", max_tokens=6)
                keys.append(RadixKey.of(np.array([*prompt, *output.token_ids], np.int32), namespace))
                most = check()
        for _ in range(200):
            if not engine.scheduler.has_background_work():
                break
            engine.step()

        # then
        assert check() > 0 < most
        assert removed > 0
        engine.scheduler.flush_cache()
        assert check() == 0


def test_events_of_storage_say_what_it_is_known_to_have() -> None:
    recorder, replica = KvEventRecorder(page_size=PAGE_SIZE, medium="storage"), KvEventReplica("storage")
    prompts = [[*range(first, first + 50)] for first in range(1, 5)]
    fields = storage_fields(overrides={"storage_events": recording(recorder)})
    with tiered_site(**fields) as site:
        control, attached = site.tiers, site.engine.container.storage()
        seed = site.engine.container.storage_ids().pages.seed
        start = seed(DEFAULT_NAMESPACE)
        chains = [page_hashes(start, np.array(prompt, np.int32).tobytes(), PAGE_SIZE) for prompt in prompts]
        pages = {page for chain in chains for page in chain}

        def told() -> list[KvEvent]:
            events = recorder.drain()
            replica.apply(events)
            return events

        def there() -> set[bytes]:
            chosen = sorted(pages)
            found = attached.storage.exists(chosen, time.monotonic() + 9)
            return {page for page, is_there in zip(chosen, found, strict=True) if is_there is Outcome.HIT}

        # when: everything is stored
        for prompt in prompts:
            site.ask(prompt)
        told()

        # then: nothing is told that is not there, and what is missing is only the part of a page
        assert replica.page_hashes & pages == there()
        assert len(there()) == 4 * 12
        assert [replica.num_cached_pages(chain) for chain in chains] == [12] * 4

        # when: others empty it behind the back of this one
        attached.storage.clear(time.monotonic() + 9)
        site.leave_device()
        site.leave_host()
        site.ask(prompts[0], max_tokens=1)
        told()

        # then: it is found out when it is asked for, and the prompt is stored anew or not
        assert replica.num_cached_pages(chains[0]) == len(there())
        assert [replica.num_cached_pages(chain) for chain in chains[1:]] == [12] * 3

        # when: it is forgotten, and found again
        control.detach_storage()
        assert [type(event) for event in told()] == [AllBlocksCleared]
        assert not replica.page_hashes
        control.attach_storage(seed)
        for prompt in prompts[:2]:
            site.leave_device()
            site.leave_host()
            site.ask(prompt, max_tokens=1)
        told()

        # then
        assert replica.page_hashes & pages == there()


def test_a_listener_of_storage_is_told_what_is_remembered() -> None:
    """Runs of pages become one event each; what is known, or was not asked for, none; the oldest go."""
    recorder, replica = KvEventRecorder(page_size=PAGE_SIZE, medium="storage"), KvEventReplica("storage")
    events = StorageEvents(recorder, PAGE_SIZE, max_told=5)
    key = RadixKey.of(np.arange(41, dtype=np.int32))
    hashes = page_hashes(b"", key.raw, PAGE_SIZE)

    events.answered(key, 2, hashes[2:8], [True, True, False, True, None, True], hashes[1])

    stored = recorder.drain()
    replica.apply(stored)
    assert [event.page_hashes for event in stored] == [tuple(hashes[2:4]), (hashes[5],), (hashes[7],)]
    assert [event.parent_hash for event in stored] == [hashes[1], hashes[4], hashes[6]]
    assert [event.token_ids for event in stored] == [tuple(range(8, 16)), tuple(range(20, 24)), tuple(range(28, 32))]

    events.answered(key, 0, hashes, [True, None, True, *[None] * 5, True, True], None)

    replica.apply(recorder.drain())
    assert replica.page_hashes == {hashes[each] for each in (7, 0, 2, 8, 9)}

    events.answered(key, 0, hashes[:3], [False, False, None], None)
    events.answered(key, 0, hashes[:2], [False, False], None)

    (removed,) = recorder.drain()
    assert removed.page_hashes == (hashes[0],)
