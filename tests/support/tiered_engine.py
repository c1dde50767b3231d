"""A whole engine with its host tier and, if wanted, a storage, driven a step at a time with every invariant checked.

Everything is as it is served, but that a restore is always taken to be worth its time, and that copies and storage may
be doubles. What is loose on the device is overwritten after each step; a host page that was freed cannot be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dependency_injector import providers

from app.caches.tiers.counters import TierCounters
from app.caches.tiers.restore_choice import RestoreChoice
from app.containers import Container
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.hicache.host_tier import HostTier
from app.hicache.storage.base import HiCacheStorage
from app.providers.testing import Override
from app.scheduling.request import RequestOutput
from app.tpu.page_carrier import PoolContents
from app.tpu.slow_copies import SlowCopies
from app.tpu.tier_copies import DeviceCopies, TierCopies, TierCopy
from tests.support.engine import Engine, opened
from tests.support.tier_rig import LandedCopies

# What the fake models have beside layers of full attention.
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "swa": {"window": 6},
    "recurrent": {"recurrent": True},
    "all": {"window": 6, "recurrent": True},
}
MAX_STEPS = 3000


class AlwaysWorth(RestoreChoice):
    """Whatever the rates: how fast this machine is must decide nothing in a test."""

    def is_worth(self, *, num_bytes: int, num_tokens: int) -> bool:
        return True


@dataclass
class Hits:
    """Of one answered request: prompt tokens by where they came from, and the reply."""

    device: int
    host: int
    storage: int
    output: RequestOutput


class TieredSite:
    """`engine` and what is below it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tiers = engine.container.tree_cache().tiers
        self.tiers._restores.choice = AlwaysWorth()

    def ask(
        self, prompt: Iterable[int], max_tokens: int = 4, namespace: Namespace = DEFAULT_NAMESPACE, **sampling: Any
    ) -> Hits:
        """One request from start to end, with its reply checked; what it leaves to be moved is moved."""
        request_id = self.engine.add(prompt, max_tokens=max_tokens, namespace=namespace, **sampling)
        self.finish()
        output = self.engine.outputs[request_id]
        return Hits(**output.cached_by_tier, output=output)

    def finish(self) -> None:
        """Until nothing runs, waits or moves. Not getting there is a failure."""
        for _ in range(MAX_STEPS):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"no end after {MAX_STEPS} steps: {self.counters()}")

    @property
    def is_busy(self) -> bool:
        scheduler = self.engine.scheduler
        return bool(scheduler.has_work() or scheduler.has_background_work())

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            self.engine.check()
            self.poison()

    def leave_device(self) -> None:
        """All that the device has cached and nobody reads goes, as when others need the room."""
        adapter = self.engine.adapter
        adapter.make_room(adapter.reachable())
        self.finish()
        assert self.engine.scheduler.ledger()["cached_evictable"] == 0

    def leave_host(self) -> None:
        """The same of the host."""
        self.tiers.host.flush()
        self.finish()

    def poison(self) -> None:
        """What is free on the device. Not what was recorded: until its plan is sent, it may still be backed up."""
        container, pool = self.engine.container, self.engine.container.device_pool()
        pool.poison(_padded(self.engine.adapter.ledger()["free"], container.token_allocator().capacity))
        window, states = self.engine.adapter.window_ledger(), self.engine.adapter.snapshot_ledger()
        if window:
            pool.poison_window(_padded(window["free"], container.window_allocator().capacity))
        if states and states["free"].size:  # slot 0 is read, so what is left over goes to a free one again
            free = states["free"]
            slots = np.full(container.state_allocator().capacity, free[0], np.int32)
            slots[: free.size] = free
            pool.poison_states(slots)

    def counters(self) -> TierCounters:
        return self.tiers.counters()


def _padded(pages: np.ndarray, capacity: int) -> np.ndarray:
    """(capacity,) int32: one shape for any number; nothing reads page 0."""
    padded = np.zeros(capacity, np.int32)
    padded[: pages.size] = pages
    return padded


class FatedCopies:
    """Copies that go as the test says from now on; one that goes well is over when it has begun.

    polls_late: how often it is not ready yet. is_never, is_failing: every copy, until it is turned off.
    """

    def __init__(self) -> None:
        self.polls_late = 0
        self.is_never = False
        self.is_failing = False
        self._now = itertools.count()

    def begin(self, carriers: Any) -> TierCopies:
        self._copies = LandedCopies(DeviceCopies(carriers))
        return self

    def clock(self) -> float:
        """A time that goes on whenever somebody looks: no test depends on how fast the machine is."""
        return next(self._now) * 1e-3

    def to_host(self, contents: PoolContents) -> TierCopy:
        return self._next().to_host(contents)

    def to_device(self, contents: PoolContents) -> TierCopy:
        return self._next().to_device(contents)

    def _next(self) -> SlowCopies:
        late = {0: self.polls_late}
        return SlowCopies(self._copies, late=late, never=[0] * self.is_never, fail=[0] * self.is_failing)


def with_copies(copies: FatedCopies) -> dict[str, Override]:
    """An override: these, and their clock, move what is moved."""

    def override(container: Container) -> providers.Provider[object]:
        return providers.ThreadSafeSingleton(
            _mover,
            container.host_size,
            container.host_pool,
            container.page_carriers,
            container.device_pool,
            container.storage_lane,
            providers.Object(copies),
        )

    return {"tier_mover": override}


def _mover(size: Any, host_pool: Any, carriers: Any, device_pool: Any, lane: Any, copies: FatedCopies) -> HostTier:
    return HostTier(
        host_pool=host_pool,
        carriers=carriers,
        device_pool=device_pool,
        limits=size.limits,
        lane=lane,
        copies=copies.begin(carriers),
        clock=copies.clock,
    )


def with_storage(storage: HiCacheStorage) -> dict[str, Override]:
    """The storage that is opened, whatever the settings name."""
    return {"storage_opener": lambda _: providers.Object(lambda: storage)}


def tier_fields(**fields: Any) -> dict[str, Any]:
    """Fields of ServerArgs: a roomy host pool and staging, whatever is published goes down at once."""
    return {
        "cache_type": None,
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_through",
        "hicache_ratio": 8.0,
        "hicache_staging_size": 1e-3,
        **fields,
    }


def storage_fields(**fields: Any) -> dict[str, Any]:
    """Fields of ServerArgs: with a storage, for whose pages requests wait, and a queue to it that is not the limit."""
    given = {
        "hicache_storage_backend": "memory",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_ratio": 128.0,
    }
    return tier_fields(**{**given, **fields})


def file_fields(folder: Path, **fields: Any) -> dict[str, Any]:
    """The same, over files."""
    return storage_fields(hicache_storage_backend="file", hicache_storage_path=str(folder), **fields)


@contextmanager
def tiered_site(model: str = "full", **fields: Any) -> Iterator[TieredSite]:
    """An engine over one of MODELS. Drained and checked when the block is left without error."""
    kind = dict(MODELS[model])
    page_size = fields.get("page_size", 4)
    if "recurrent" in kind:
        kind |= {"recurrent_track_interval": max(8, page_size), "max_recurrent_snapshots": 24}
    with opened(**{**kind, **fields}) as engine:
        site = TieredSite(engine)
        yield site
        site.finish()
        engine.check_replies()
