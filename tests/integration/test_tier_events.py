"""KV events of a whole engine: replayed, they say exactly what each tier holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, page_hashes
from app.observability.kv_events import KvEventRecorder, KvEventReplica
from tests.support.engine import opened

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
