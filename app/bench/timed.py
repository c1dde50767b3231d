"""Stand-ins that pass every call on and add up the processor time that the calling thread spent in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from app.caches.base import NO_PAGES, BasePrefixCache, InsertResult, LockReceipt, MatchResult
from app.core.batch import BatchPlan, PreparedBatch, StepHandle
from app.core.handles import CacheIdentity
from app.core.keys import RadixKey
from app.runtime.interface import RuntimeInterface

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Clock:
    """Processor nanoseconds of the calling thread inside `time`d calls; the outermost call counts."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def reset(self) -> None:
        self.nanoseconds = 0

    def time(self, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        began = time.thread_time_ns()
        try:
            return call(*args, **kwargs)
        finally:
            self.nanoseconds += time.thread_time_ns() - began


class TimedHandle:
    """A StepHandle whose waiting is the device's time."""

    def __init__(self, handle: StepHandle, clock: Clock) -> None:
        self._handle = handle
        self._clock = clock
        self.batch_id = handle.batch_id
        self.done = handle.done

    def wait(self, timeout: float | None = None):  # type: ignore[no-untyped-def]
        return self._clock.time(self._handle.wait, timeout)


class TimedRuntime:
    """A RuntimeInterface; `prepare_clock` is control's, `device_clock` holds dispatching and waiting."""

    def __init__(self, runtime: RuntimeInterface) -> None:
        self._runtime = runtime
        self.prepare_clock = Clock()
        self.device_clock = Clock()
        self.open = runtime.open
        self.close = runtime.close
        self.discard_batch = runtime.discard_batch

    @property
    def identity(self) -> CacheIdentity:
        return self._runtime.identity

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatch:
        return self.prepare_clock.time(self._runtime.prepare_batch, plan)

    def execute_batch(self, prepared: PreparedBatch) -> StepHandle:
        return TimedHandle(self.device_clock.time(self._runtime.execute_batch, prepared), self.device_clock)


class TimedCache(BasePrefixCache):
    """A prefix cache; `clock` holds the time in its verbs."""

    def __init__(self, cache: BasePrefixCache) -> None:
        self._cache = cache
        self.token_allocator = cache.token_allocator
        self.window_allocator = cache.window_allocator
        self.state_allocator = cache.state_allocator
        self.sliding_window = cache.sliding_window
        self.page_size = cache.page_size
        self.clock = Clock()

    @property
    def reuses_prefixes(self) -> bool:
        return self._cache.reuses_prefixes

    def match(self, key: RadixKey) -> MatchResult:
        return self.clock.time(self._cache.match, key)

    def probe(self, key: RadixKey) -> int:
        return self.clock.time(self._cache.probe, key)

    def lock(self, found: MatchResult | InsertResult) -> LockReceipt:
        return self.clock.time(self._cache.lock, found)

    def unlock(self, receipt: LockReceipt) -> None:
        self.clock.time(self._cache.unlock, receipt)

    def relock(self, receipt: LockReceipt, found: InsertResult) -> LockReceipt:
        return self.clock.time(self._cache.relock, receipt, found)

    def insert(
        self,
        key: RadixKey,
        pages: np.ndarray,
        window_pages: np.ndarray = NO_PAGES,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        return self.clock.time(self._cache.insert, key, pages, window_pages, state, after)

    def unlock_window(self, receipt: LockReceipt) -> None:
        self.clock.time(self._cache.unlock_window, receipt)

    def evict(self, num_pages: int) -> int:
        return self.clock.time(self._cache.evict, num_pages)

    def evict_window(self, num_pages: int) -> int:
        return self.clock.time(self._cache.evict_window, num_pages)

    def evict_states(self, num_states: int) -> int:
        return self.clock.time(self._cache.evict_states, num_states)

    @property
    def evictable_pages(self) -> int:
        return self._cache.evictable_pages

    @property
    def protected_pages(self) -> int:
        return self._cache.protected_pages

    @property
    def evictable_window_pages(self) -> int:
        return self._cache.evictable_window_pages

    @property
    def protected_window_pages(self) -> int:
        return self._cache.protected_window_pages

    @property
    def evictable_states(self) -> int:
        return self._cache.evictable_states

    @property
    def protected_states(self) -> int:
        return self._cache.protected_states

    def cached_window_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        return self._cache.cached_window_page_ids()

    def cached_states(self) -> tuple[np.ndarray, np.ndarray]:
        return self._cache.cached_states()

    def cached_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        return self._cache.cached_page_ids()

    def reset(self) -> None:
        self._cache.reset()

    def flush(self) -> int:
        return self._cache.flush()

    def check_integrity(self) -> None:
        self._cache.check_integrity()
