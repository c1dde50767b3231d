"""A host tier whose restores end when a test says so, and the runtime's part of it.

The contents of pages are kept and written back as they were, so that a request that starts on a wrong page, or on one
that has not landed, gets other tokens than its cold twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from dependency_injector import providers

from app.caches.base import CacheDeps, LockReceipt
from app.caches.radix_cache import RadixCache
from app.caches.tiers.counters import TierCounters
from app.caches.tiers.ports import RestoredTokens
from app.core.batch import BatchCompletion, BatchPlan, PreparedBatch
from app.core.keys import TOKEN_BYTES, RadixKey
from app.core.transfers import (
    NO_IDS,
    NO_TRANSFERS,
    PageCounts,
    PageIds,
    PreparedTransfers,
    Restore,
    TransferEnd,
    TransferPlan,
)
from app.errors import IntegrityError, OutOfPagesError
from app.providers.testing import Override
from app.runtime.plan_rows import page_needs
from tests.support.engine import Engine, opened


@dataclass
class Restoring:
    """Pages first .. of a key, on their way with what they hold; `pages` once they are known."""

    number: int
    request_id: str
    key: RadixKey
    first: int
    contents: list[Any]
    receipt: LockReceipt
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def count(self) -> int:
        return len(self.contents)


class ScriptedTiers:
    """CacheTiers over one cache of full pages. What the host has is what `keep` was told."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._numbers = itertools.count()
        self._contents: dict[tuple[Any, bytes], Any] = {}  # by namespace and everything up to the page's end
        self._restored: dict[str, int] = {}
        self.expected: dict[str, int] = {}  # requests that wait, and how often they were announced
        self.held: set[str] = set()  # requests for which something comes from storage
        self.num_queued = 0  # transfers that wait to be sent, as backups do
        self.max_pages = 10**6  # of one restore
        self.begun: list[Restoring] = []
        self.in_flight: dict[int, Restoring] = {}
        self.num_begun = 0
        self.num_refused_plans = 0
        self.plans: list[TransferPlan] = []
        self.steps: list[tuple[int, int, float]] = []

    def keep(self, key: RadixKey, contents: Sequence[Any]) -> None:
        """The host has these pages, from the key's first on."""
        for index, content in enumerate(contents):
            self._contents[self._name(key, index)] = content

    # -- CacheTiers --------------------------------------------------------------------------------------------------

    def expect(self, request_id: str, key: RadixKey) -> None:
        assert request_id not in self.expected, "announced twice"
        self.expected[request_id] = key.num_tokens

    def forget(self, request_id: str) -> None:
        self.expected.pop(request_id, None)
        self._restored.pop(request_id, None)

    def holds_back(self, request_id: str) -> bool:
        return request_id in self.held or any(each.request_id == request_id for each in self._moving())

    def probe(self, key: RadixKey) -> int:
        page_size = self._cache.page_size
        count = 0
        while (count + 1) * page_size < key.num_tokens and self._name(key, count) in self._contents:
            count += 1
        return count * page_size

    def restorable(self, request_id: str, key: RadixKey, num_tokens: int) -> PageCounts:
        assert request_id in self.expected, "asked for a request that does not wait"
        page_size = self._cache.page_size
        first = last = num_tokens // page_size
        while (last + 1) * page_size < key.num_tokens and self._name(key, last) in self._contents:
            last += 1
        return PageCounts(last - first)

    def begin_restore(self, request_id: str, key: RadixKey, room: PageCounts) -> PageCounts:
        found = self._cache.match(key)
        count = min(self.restorable(request_id, key, found.num_tokens).pages, room.pages, self.max_pages)
        if count <= 0:
            return PageCounts()
        first, receipt = found.pages.size, self._cache.lock(found)
        contents = [self._contents[self._name(key, index)] for index in range(first, first + count)]
        self.begun.append(Restoring(next(self._numbers), request_id, key, first, contents, receipt))
        self.num_begun += 1
        return PageCounts(count)

    def restored_tokens(self, request_id: str) -> RestoredTokens:
        return RestoredTokens(host=self._restored.get(request_id, 0))

    @property
    def is_urgent(self) -> bool:
        return bool(self.begun or self.num_queued)

    @property
    def num_under_way(self) -> int:
        return len(self.begun) + len(self.in_flight) + self.num_queued

    def plan(self, wait_s: float = 0.0) -> TransferPlan:
        sources = [PageIds(np.arange(1, each.count + 1, dtype=np.int32)) for each in self.begun]
        restores = tuple(Restore(number=each.number, source=ids) for each, ids in zip(self.begun, sources, strict=True))
        return TransferPlan(restores=restores, wait_s=wait_s) if restores or wait_s else NO_TRANSFERS

    def prepared(self, transfers: PreparedTransfers) -> None:
        for moving, ids in zip(self.begun, transfers.restores, strict=True):
            assert ids.pages.size == moving.count
            moving.pages = ids.pages
            self.in_flight[moving.number] = moving
        self.begun.clear()
        self.num_queued = 0

    def refused(self) -> None:
        self.num_refused_plans += 1
        for moving in self.begun:
            self._cache.unlock(moving.receipt)
        self.begun.clear()

    def ended(self, ends: Sequence[TransferEnd]) -> None:
        for end in ends:
            moving = self.in_flight.pop(end.number, None)
            if moving is None:
                continue
            loose = moving.pages
            if end.failure is None:
                num_pages = moving.first + moving.count
                held = self._cache.match(moving.key).pages[: moving.first]
                result = self._cache.insert(
                    moving.key.head(num_pages * self._cache.page_size), np.concatenate([held, moving.pages])
                )
                loose = moving.pages[moving.pages != result.pages[moving.first :]]
                tokens = moving.count * self._cache.page_size
                self._restored[moving.request_id] = self._restored.get(moving.request_id, 0) + tokens
            if loose.size:
                self._cache.token_allocator.free(loose)
            self._cache.unlock(moving.receipt)

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        self.steps.append((prompt_tokens, decode_rows, seconds))

    def note_copies(self, *, restored_bytes_per_s: float) -> None:
        """Nothing is decided by it."""

    def in_flight_ids(self) -> PageIds:
        if not self.in_flight:
            return NO_IDS
        return PageIds(np.concatenate([each.pages for each in self.in_flight.values()]))

    def reset_device(self) -> None:
        self.begun.clear()
        self.in_flight.clear()

    def flush(self) -> None:
        self._contents.clear()

    def counters(self) -> TierCounters:
        return TierCounters()

    def check_integrity(self) -> None:
        if self.begun:
            raise IntegrityError(owner="ScriptedTiers", broken="a restore was begun that no plan carried")

    def _moving(self) -> Iterator[Restoring]:
        yield from self.begun
        yield from self.in_flight.values()

    def _name(self, key: RadixKey, page_index: int) -> tuple[Any, bytes]:
        return key.namespace, key.raw[: (page_index + 1) * self._cache.page_size * TOKEN_BYTES]


class TieredCache(RadixCache):
    """A radix cache above scripted tiers."""

    def __init__(self, deps: CacheDeps) -> None:
        super().__init__(deps)
        self._tiers = ScriptedTiers(self)

    @property
    def tiers(self) -> ScriptedTiers:
        return self._tiers


class ScriptedCopies:
    """Stands before a runtime and does what its host tier would, with copies that take `steps_to_land` completions."""

    def __init__(self, engine: Engine, tiers: ScriptedTiers) -> None:
        self._engine, self._tiers = engine, tiers
        runtime = engine.runtime
        self._prepare, self._execute = runtime.prepare_batch, runtime.execute_batch
        runtime.prepare_batch, runtime.execute_batch = self.prepare_batch, self.execute_batch
        self._plans: dict[int, BatchPlan] = {}
        self._ages: dict[int, int] = {}  # completions read since the restore was prepared
        self.steps_to_land = 1
        self.failures: set[int] = set()  # numbers of restores that fail
        self.fail_all = False
        self.waits: list[float] = []  # of plans without rows, as executed
        self.rows: list[int] = []  # of each executed plan

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatch:
        allocator, rows = self._engine.container.token_allocator(), self._engine.container.req_to_token_pool()
        counts = [restore.source.pages.size for restore in plan.transfers.restores]
        need = int(page_needs(plan, rows, allocator.page_size).sum()) + sum(counts)
        free = allocator.num_free + plan.free_pages.size
        if need > free:
            raise OutOfPagesError(need=need, free=free)
        prepared = self._prepare(replace(plan, transfers=NO_TRANSFERS))  # the runtime has no tiers of its own
        pages = tuple(PageIds(allocator.allocate(count)) for count in counts)
        self._ages.update((restore.number, 0) for restore in plan.transfers.restores)
        self._plans[prepared.batch_id] = plan
        return replace(prepared, transfers=PreparedTransfers(restores=pages))

    def execute_batch(self, prepared: PreparedBatch) -> ScriptedStep:
        plan = self._plans.pop(prepared.batch_id)
        self.rows.append(plan.num_rows)
        if not plan.num_rows:
            self.waits.append(plan.transfers.wait_s)
        return ScriptedStep(self._execute(prepared), self)

    def land_after(self, steps: int) -> None:
        """What moves now lands after so many more completions, the oldest of it."""
        self.steps_to_land = max(self._ages.values(), default=0) + steps

    def take_ends(self, completion: BatchCompletion) -> tuple[TransferEnd, ...]:
        """A completion was read: what has ended with it. Contents are written before that is told."""
        ends = []
        for number in list(self._ages):
            self._ages[number] += 1
            lost = number not in self._tiers.in_flight or completion.failure is not None
            if not lost and self._ages[number] < self.steps_to_land:
                continue
            del self._ages[number]
            failed = lost or self.fail_all or number in self.failures
            if not failed:
                moving = self._tiers.in_flight[number]
                self._write(moving.pages, moving.contents)
            ends.append(TransferEnd(number=number, failure="failed" if failed else None))
        return tuple(ends)

    def read(self, pages: np.ndarray) -> list[Any]:
        """What pages hold, (n,) int32."""
        pool = self._engine.container.device_pool()
        buffers = pool.take()
        contents = [jax.tree.map(lambda array, page=page: np.asarray(array[page]), buffers) for page in pages.tolist()]
        pool.put(buffers)
        return contents

    def _write(self, pages: np.ndarray, contents: Sequence[Any]) -> None:
        pool = self._engine.container.device_pool()
        buffers = pool.take()
        for page, content in zip(pages.tolist(), contents, strict=True):
            buffers = jax.tree.map(lambda array, new, page=page: array.at[page].set(new), buffers, content)
        pool.put(buffers)


class ScriptedStep:
    """A step handle whose completion also tells what has moved."""

    def __init__(self, handle: Any, copies: ScriptedCopies) -> None:
        self._handle, self._copies = handle, copies
        self._completion: BatchCompletion | None = None
        self.batch_id = handle.batch_id

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, timeout: float | None = None) -> BatchCompletion:
        if self._completion is None:
            completion = self._handle.wait(timeout)
            self._completion = replace(completion, transfers=self._copies.take_ends(completion))
        return self._completion


@dataclass
class TieredEngine:
    """An engine with its tiers and their copies."""

    engine: Engine
    tiers: ScriptedTiers
    copies: ScriptedCopies

    def back_up(self, tokens: Sequence[int], **namespace: Any) -> int:
        """The host gets what the device has of `tokens`. -> pages."""
        key = RadixKey.of(np.array([*tokens, 0], np.int32), **namespace)
        found = self.engine.container.tree_cache().match(key)
        self.tiers.keep(key, self.copies.read(found.pages))
        return int(found.pages.size)

    def host(self, *prompts: Sequence[int]) -> None:
        """These prefixes are on the host, and on the device no more."""
        for prompt in prompts:
            self.engine.serve([*prompt, 0], max_tokens=1)
            self.back_up(prompt)
        self.engine.container.tree_cache().flush()
        assert self.engine.cached_pages == 0
        for record in (self.copies.waits, self.copies.rows, self.tiers.steps):
            record.clear()


TIERED_CACHE: dict[str, Override] = {
    "tree_cache": lambda container: providers.ThreadSafeSingleton(TieredCache, container.cache_deps)
}


@contextmanager
def tiered(**fields: Any) -> Iterator[TieredEngine]:
    """An engine over the fake model with scripted tiers; drained and checked when the block is left without error."""
    with opened(overrides={**TIERED_CACHE, **fields.pop("overrides", {})}, **fields) as engine:
        yield with_copies(engine)


def with_copies(engine: Engine) -> TieredEngine:
    """An engine whose container has TIERED_CACHE."""
    tiers = engine.container.tree_cache().tiers
    return TieredEngine(engine, tiers, ScriptedCopies(engine, tiers))
