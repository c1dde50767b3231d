"""A cache with device, host and storage tiers: what one server stored, a second one brings back, page by page right.

Control is real from the cache down to the plan, and so is the lane with its threads; only bytes and devices are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.caches.tiers.tiers import Tiers
from app.caches.unified_radix_cache import UnifiedRadixCache
from app.config.model_config import Component
from app.config.tier_settings import TierSettings
from app.core.keys import DEFAULT_NAMESPACE, Namespace, StorageIdentity
from app.core.transfers import OfEachPool, PageCounts, PageIds, PageKeys, PreparedTransfers, TransferPlan
from app.hicache.storage.base import HiCacheStorage
from app.hicache.storage.doubles import CorruptStorage, FailingStorage, FullStorage, SlowStorage, flipped_bit
from app.hicache.storage.memory import MemoryStorage
from app.hicache.storage.workers import WorkerLimits
from app.hicache.storage_lane import WorkersLane
from tests.support.byte_pages import BYTES
from tests.support.storage import IDENTITY
from tests.support.tier_runtime import TierRig
from tests.support.tree_model import key_of

CONTENT_BYTES = 32
FULL, SWA, RECURRENT = Component.FULL, Component.SWA, Component.RECURRENT
MODELS = [{FULL}, {FULL, SWA}, {FULL, RECURRENT}, {FULL, SWA, RECURRENT}]
SETTINGS = TierSettings(write_policy="write_through", prefetch_policy="wait_complete")
PROMPT = list(range(100, 125))  # 12 whole pages, and a token


class StoredRig(TierRig):
    """A TierRig whose host pages go to a storage and come back."""

    def __init__(self, storage: HiCacheStorage, identity: StorageIdentity = IDENTITY, **given: object) -> None:
        given = {"settings": SETTINGS, "clock": lambda: 0.0, "num_host_pages": 64, "num_pages": 64, **given}
        super().__init__(**given)  # type: ignore[arg-type]
        host_tier = self.deps.host_tier
        assert host_tier is not None
        parts = replace(host_tier(), storage_seed=identity.seed)
        self.cache = UnifiedRadixCache(replace(self.deps, host_tier=lambda: parts))
        assert isinstance(self.cache.tiers, Tiers)
        self.tiers = self.cache.tiers
        kinds = ("full", "window", "states")
        self.lane = WorkersLane(
            page_bytes=OfEachPool(*(CONTENT_BYTES,) * 3),
            identities=OfEachPool(*(replace(identity, layout=kind) for kind in kinds)),
            forms=OfEachPool(BYTES, BYTES, BYTES),
            limits=WorkerLimits(concurrency=2, backoff_s=0.001),
        )
        self.lane.attach(storage)
        self.awake = threading.Event()
        self.lane.wake_with(self.awake)
        self.fetching: dict[int, PageIds] = {}
        self._tell, self.tiers.prepared = self.tiers.prepared, self._prepared  # type: ignore[method-assign]
        self._plan, self.tiers.plan = self.tiers.plan, self._planned  # type: ignore[method-assign]

    def _planned(self, wait_s: float = 0.0) -> TransferPlan:
        self.plan = self._plan(wait_s)
        self.sources = [self.host.read(store.source) for store in self.plan.stores]
        return self.plan

    def _prepared(self, transfers: PreparedTransfers) -> None:
        fetches = []
        for fetch in self.plan.fetches:
            ids = self.host.allocate(_counts(fetch.keys))
            assert ids is not None, "control promised more host pages than there are"
            fetches.append(ids)
            self.fetching[fetch.number] = ids
        self._tell(replace(transfers, fetches=tuple(fetches)))
        for number in self.plan.cancels:
            self.lane.cancel(number)
        for store, source in zip(self.plan.stores, self.sources, strict=True):
            self.lane.store(
                store, OfEachPool(*([(np.frombuffer(each, np.uint8),) for each in kind] for kind in source))
            )
        for lookup in self.plan.lookups:
            self.lane.lookup(lookup)
        for fetch in self.plan.fetches:
            self.lane.fetch(fetch)

    def tell_ends(self) -> None:
        if self.lane.num_under_way:
            self.awake.wait(0.02)
        self.awake.clear()
        ends = []
        for each in self.lane.take_ends():
            ids = self.fetching.pop(each.end.number, None)
            if ids is not None and each.contents is not None:
                for contents, of_kind, arrived in zip(self.host.contents, ids, each.contents, strict=True):
                    for page, content in zip(of_kind.tolist(), arrived, strict=True):
                        if content is not None:
                            contents[page] = BYTES.to_bytes(content).tobytes()
            ends.append(each.end)
        self.tiers.ended(ends)
        super().tell_ends()

    def serve_and_settle(self, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        found = self.serve(tokens, namespace, most_plans=2000)
        self.drain()
        self.check()
        return found


def _counts(keys: PageKeys) -> PageCounts:
    return PageCounts(*map(len, keys))


@pytest.fixture
def server() -> Iterator[Callable[..., StoredRig]]:
    opened: list[StoredRig] = []

    def opening(storage: HiCacheStorage, **given: object) -> StoredRig:
        opened.append(StoredRig(storage, **given))  # type: ignore[arg-type]
        return opened[-1]

    yield opening
    for each in opened:
        each.check()
        each.lane.close(10)
        each.lane.check_integrity()


@pytest.mark.parametrize("components", MODELS, ids=lambda model: "+".join(sorted(each.value for each in model)))
def test_a_second_server_serves_what_the_first_one_stored(
    server: Callable[..., StoredRig], components: set[Component]
) -> None:
    storage = MemoryStorage(2**20)
    given = {"components": frozenset(components), "window": 5}
    whole = PROMPT[:24]
    first = server(storage, **given)
    assert first.serve_and_settle(whole) == 0
    assert first.tiers.counters().storage.stored_tokens == 24

    second = server(storage, **given)

    assert second.serve_and_settle(PROMPT) == 24
    assert second.host_has(PROMPT) == 12
    assert second.tiers.counters().storage.fetched_tokens == 24
    other = server(storage, **given, identity=replace(IDENTITY, weights="other"))
    assert other.serve_and_settle(PROMPT) == 0
    assert second.serve_and_settle(PROMPT, Namespace(salt="s")) == 0


@pytest.mark.parametrize("components", MODELS, ids=lambda model: "+".join(sorted(each.value for each in model)))
@pytest.mark.parametrize(
    ("spoilt", "comes"),
    [
        (lambda inner: inner, True),
        (FullStorage, False),
        (lambda inner: FailingStorage(inner, 1000), False),
        (lambda inner: SlowStorage(inner, 0.002), True),
        (lambda inner: CorruptStorage(inner, flipped_bit), False),
    ],
    ids=["sound", "full", "failing", "slow", "corrupt"],
)
def test_whatever_storage_does_every_page_holds_what_its_key_says(
    server: Callable[..., StoredRig],
    components: set[Component],
    spoilt: Callable[[HiCacheStorage], HiCacheStorage],
    comes: bool,
) -> None:
    """Two servers, small pools and prompts that share beginnings; `serve` looks at every page that it is given."""
    storage = MemoryStorage(2**20)
    given = {"components": frozenset(components), "window": 5, "num_pages": 16, "num_host_pages": 20}
    servers = [server(spoilt(storage), **given) for _ in range(2)]
    random = np.random.default_rng(7)
    prompts = [
        [*range(100, 100 + 4 * int(random.integers(0, 4))), *random.integers(0, 3, 9).tolist()] for _ in range(25)
    ]
    served = []
    num_fetched = 0

    for turn, prompt in enumerate([*prompts, *prompts]):
        there = servers[turn % 2]
        there.serve(prompt, most_plans=2000)
        served.append(key_of(prompt))
        there.check()
        there.check_host(served)

    for each in servers:
        each.drain()
        each.check()
        each.check_host(served)
        num_fetched += each.tiers.counters().storage.fetched_tokens
    assert (num_fetched > 0) == comes
