"""A cache with a host tier, and the little of a runtime that control can see of it: pages by id, and what is in them.

A page's content is the digest of the prefix that it ends, so that one wrong page shows wherever it is read. Freed
device pages are poisoned. Transfers end as a `Fate` says.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from app.caches.base import LockReceipt, MatchResult
from app.caches.tiers.ports import TierParts
from app.caches.tiers.tiers import Tiers
from app.caches.unified_radix_cache import UnifiedRadixCache
from app.config.model_config import Component
from app.config.tier_settings import TierSettings
from app.core.keys import DEFAULT_NAMESPACE, TOKEN_BYTES, Namespace, RadixKey
from app.core.transfers import (
    Backup,
    OfEachPool,
    PageCounts,
    PageIds,
    PreparedTransfers,
    Restore,
    TierLimits,
    TransferEnd,
)
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from tests.support.tree_model import CacheRig, identity, key_of

POISON = b"freed"
PAGE_BYTES = OfEachPool(4, 2, 8)


@dataclass(frozen=True)
class Fate:
    """What becomes of a transfer: after how many plans it ends (never: None), and how."""

    plans: int | None = 0
    failure: str | None = None
    refused: bool = False


AT_ONCE = Fate()


@dataclass
class _UnderWay:
    end: TransferEnd
    plans_left: int | None
    land: Callable[[], None]


@dataclass
class Pools:
    """One tier's pools, and what is in each page."""

    allocators: OfEachPool[PagedTokenToKVPoolAllocator]
    contents: OfEachPool[dict[int, bytes]] = field(default_factory=lambda: OfEachPool({}, {}, {}))

    def apply_frees(self, freed: PageIds) -> None:
        for allocator, contents, ids in zip(self.allocators, self.contents, freed, strict=True):
            allocator.apply_frees(ids)
            contents.update(dict.fromkeys(ids.tolist(), POISON))

    def recorded(self) -> PageIds:
        return PageIds(*(allocator.port.recorded_frees() for allocator in self.allocators))

    def allocate(self, counts: PageCounts) -> PageIds | None:
        """None, and no change, if any pool is short."""
        if any(need > pool.num_free for need, pool in zip(counts, self.allocators, strict=True)):
            return None
        return PageIds(*(pool.allocate(need) for need, pool in zip(counts, self.allocators, strict=True)))

    def read(self, ids: PageIds) -> list[list[bytes]]:
        return [[held[page] for page in each.tolist()] for held, each in zip(self.contents, ids, strict=True)]

    def write(self, ids: PageIds, values: list[list[bytes]]) -> None:
        for held, each, new in zip(self.contents, ids, values, strict=True):
            held.update(zip(each.tolist(), new, strict=True))


class TierRig:
    """A UnifiedRadixCache over device and host pools.

    fate: asked of every backup and restore that is sent.
    """

    def __init__(
        self,
        *,
        components: frozenset[Component] = frozenset({Component.FULL}),
        window: int = 4,
        page_size: int = 2,
        num_pages: int = 16,
        num_host_pages: int = 32,
        staging_bytes: int = 1 << 20,
        settings: TierSettings | None = None,
        fate: Callable[[Backup | Restore], Fate] = lambda intent: AT_ONCE,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.page_size = page_size
        self.window = window
        self.has_window = Component.SWA in components
        self.has_states = Component.RECURRENT in components
        self.device = _pools(num_pages, page_size)
        self.host = _pools(num_host_pages, page_size)
        self.fate = fate
        self.under_way: list[_UnderWay] = []
        self.num_plans = 0
        self.sent: deque[Backup | Restore] = deque(maxlen=1000)
        ports = OfEachPool(*(pool.port for pool in self.host.allocators))
        parts = TierParts(
            token_allocator=ports.pages,
            window_allocator=ports.window_pages if self.has_window else None,
            state_allocator=ports.states if self.has_states else None,
            limits=TierLimits(page_bytes=PAGE_BYTES, staging_bytes=staging_bytes),
            settings=settings or TierSettings(write_policy="write_through"),
        )
        self._seconds = itertools.count()
        rig = CacheRig(
            "unified_radix_cache",
            components=components,
            window=window,
            num_pages=num_pages,
            page_size=page_size,
            clock=clock or (lambda: float(next(self._seconds))),
        )
        self.deps = replace(
            rig.deps,
            token_allocator=self.device.allocators.pages.port,
            window_allocator=self.device.allocators.window_pages.port if self.has_window else None,
            state_allocator=self.device.allocators.states.port if self.has_states else None,
            host_tier=lambda: parts,
        )
        self.cache = UnifiedRadixCache(self.deps)
        assert isinstance(self.cache.tiers, Tiers)
        self.tiers = self.cache.tiers
        self._requests = itertools.count()

    # -- what is true of contents

    def content(self, key: RadixKey, num_pages: int, pool: str) -> bytes:
        """Of the page that ends a prefix of so many pages."""
        raw = key.raw[: num_pages * self.page_size * TOKEN_BYTES]
        return hashlib.sha256(repr(key.namespace).encode() + pool.encode() + raw).digest()

    def check_match(self, key: RadixKey, found: MatchResult) -> None:
        """All that a match names holds what the key says."""
        for index, page in enumerate(found.pages.tolist()):
            assert self.device.contents.pages[page] == self.content(key, index + 1, "pages")
        for index, page in enumerate(found.window_pages.tolist()):
            if page:
                assert self.device.contents.window_pages[page] == self.content(key, index + 1, "window_pages")
        if found.state:
            assert self.device.contents.states[found.state] == self.content(key, found.pages.size, "states")

    def check_host(self, keys: list[RadixKey]) -> None:
        """So does all that the host has of these keys."""
        for key in keys:
            span = self.tiers.host.span(key, 0)
            for pool, ids, contents in zip(PageIds._fields, span[1:], self.host.contents, strict=True):
                for index, page in enumerate(ids.tolist()):
                    assert page == 0 or contents[page] == self.content(key, index + 1, pool), (pool, index)

    # -- plans

    def step(self) -> bool:
        """One plan, and what ended before it. -> whether it was prepared: there was room for its restores."""
        self.tell_ends()
        return self.send()

    def send(self) -> bool:
        plan = self.tiers.plan()
        self.num_plans += 1
        # Gathered at the start of the plan's step: the source is intact, though the same plan frees it.
        gathered = {each.number: self.device.read(each.source) for each in plan.backups}
        held = {each.number: self.host.read(each.source) for each in plan.restores}
        freed = self.device.recorded()
        needed = np.sum([each.source.counts() for each in plan.restores], axis=0).tolist() or [0, 0, 0]
        room = [pool.num_free + ids.size for pool, ids in zip(self.device.allocators, freed, strict=True)]
        if any(need > most for need, most in zip(needed, room, strict=True)):
            self.tiers.refused()
            return False
        self.device.apply_frees(freed)
        self.host.apply_frees(plan.free_host)
        backups: list[PageIds | None] = []
        for backup in plan.backups:
            fate = self.fate(backup)
            ids = None if fate.refused else self.host.allocate(backup.source.counts())
            assert fate.refused or ids is not None, "control promised more host pages than there are"
            backups.append(ids)
            if ids is not None:
                self._begin(backup, fate, self.host, ids, gathered[backup.number])
        restores: list[PageIds] = []
        for restore in plan.restores:
            ids = self.device.allocate(restore.source.counts())
            assert ids is not None
            restores.append(ids)
            self._begin(restore, self.fate(restore), self.device, ids, held[restore.number])
        self.tiers.prepared(PreparedTransfers(backups=tuple(backups), restores=tuple(restores)))
        return True

    def _begin(
        self, intent: Backup | Restore, fate: Fate, into: Pools, ids: PageIds, values: list[list[bytes]]
    ) -> None:
        self.sent.append(intent)
        num_bytes = sum(count * each for count, each in zip(ids.counts(), PAGE_BYTES, strict=True))
        end = TransferEnd(number=intent.number, failure=fate.failure, num_bytes=num_bytes, seconds=1e-6)
        generation = into.allocators.pages.identity

        def land() -> None:
            if fate.failure is None and into.allocators.pages.identity == generation:
                into.write(ids, values)

        self.under_way.append(_UnderWay(end, fate.plans, land))

    def tell_ends(self) -> None:
        """What has ended since is told."""
        ended = [each for each in self.under_way if each.plans_left == 0]
        self.under_way = [each for each in self.under_way if each.plans_left != 0]
        for each in self.under_way:
            if each.plans_left is not None:
                each.plans_left -= 1
        for each in ended:
            each.land()
        self.tiers.ended([each.end for each in ended])

    def end_all(self, failure: str | None = None) -> None:
        """Whatever is under way, also what never ends, ends now."""
        ends = []
        for each in self.under_way:
            if failure is None and each.end.failure is None:
                each.land()
            ends.append(
                each.end if failure is None else TransferEnd(number=each.end.number, failure=failure, seconds=1e-6)
            )
        self.under_way.clear()
        self.tiers.ended(ends)

    def drain(self) -> None:
        """Until nothing moves."""
        for _ in range(1000):
            if not self.tiers.num_under_way:
                return
            self.step()
        raise AssertionError("transfers do not come to an end")

    # -- requests

    def serve(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE, *, most_plans: int = 50) -> int:
        """A request from its arrival to its end, as a scheduler serves it. -> tokens that it found on the device."""
        request_id = f"r{next(self._requests)}"
        key = key_of(tokens, namespace)
        self.tiers.expect(request_id, key)
        for _ in range(most_plans):
            if self.tiers.holds_back(request_id):
                self.step()
                continue
            found = self.cache.match(key)
            if not self.begin_restore(request_id, key, found):
                break
            self.step()
        else:
            raise AssertionError("the request is held back for ever")
        self.tiers.forget(request_id)
        found = self.cache.match(key)
        self.check_match(key, found)
        self.compute(key, found)
        return found.num_tokens

    def begin_restore(self, request_id: str, key: RadixKey, found: MatchResult) -> bool:
        if not self.tiers.restorable(request_id, key, found.num_tokens):
            return False
        receipt = self.cache.lock(found)
        taken = self.tiers.begin_restore(request_id, key, self.reachable())
        self.make_room(taken)
        self.cache.unlock(receipt)
        return bool(taken)

    def reachable(self) -> PageCounts:
        cache, free = self.cache, [pool.port.available() for pool in self.device.allocators]
        return PageCounts(
            free[0] + cache.evictable_pages,
            free[1] + cache.evictable_window_pages,
            free[2] + cache.evictable_states,
        )

    def make_room(self, counts: PageCounts) -> None:
        pools = self.device.allocators
        self.cache.evict(counts.pages - pools.pages.port.available())
        if self.has_window:
            self.cache.evict_window(counts.window_pages - pools.window_pages.port.available())
        if self.has_states:
            self.cache.evict_states(counts.states - pools.states.port.available())

    def compute(self, key: RadixKey, found: MatchResult) -> bool:
        """Compute what is not cached and publish it, with a snapshot where the key ends with a page.

        -> False, and nothing is done, if the pool is too full.
        """
        receipt: LockReceipt | None = self.cache.lock(found)
        num_pages = key.num_tokens // self.page_size
        first = found.pages.size
        counts = PageCounts(
            num_pages - first, num_pages - first if self.has_window else 0, int(self.has_states and num_pages > first)
        )
        self.make_room(counts)
        self.step()
        own = self.device.allocate(counts)
        if own is None or num_pages == first:
            if own is not None:
                self._free(own)
            self.cache.unlock(receipt)
            return own is not None
        values = [
            [self.content(key, index + 1, pool) for index in range(first, num_pages)] if pool != "states" else []
            for pool in PageIds._fields
        ]
        values[1] = values[1] if self.has_window else []
        values[2] = [self.content(key, num_pages, "states")] if self.has_states else []
        self.device.write(own, values)
        pages = np.concatenate([found.pages, own.pages])
        windows = np.concatenate([found.window_pages, own.window_pages])
        state = int(own.states[0]) if self.has_states else 0
        published = key.head(num_pages * self.page_size) if state else key
        result = self.cache.insert(published, pages, windows, state)
        kept = PageIds(result.pages, result.window_pages, own.states if result.state_adopted else own.states[:0])
        self._free(PageIds(*(mine[~np.isin(mine, theirs)] for mine, theirs in zip(own, kept, strict=True))))
        self.cache.unlock(receipt)
        return True

    def _free(self, ids: PageIds) -> None:
        for pool, each in zip(self.device.allocators, ids, strict=True):
            pool.port.free(each)

    # -- loss

    def lose_device(self) -> None:
        """The device pool is made anew; what was under way failed, and is told with the next ends."""
        gone = identity(self.device.allocators.pages.identity.generation + 1)
        for pool in self.device.allocators:
            pool.reset(gone)
        self.under_way = [
            _UnderWay(TransferEnd(number=each.end.number, failure="failed"), 0, lambda: None) for each in self.under_way
        ]

    def reopen(self) -> None:
        """The runtime was closed and opened again: all pools are new, and nothing that was under way is told of."""
        gone = identity(self.device.allocators.pages.identity.generation + 1)
        for pool in (*self.device.allocators, *self.host.allocators):
            pool.reset(gone)
        self.under_way.clear()

    # -- checks

    def check(self) -> None:
        """Every owner's invariants, and both ledgers."""
        self.cache.check_integrity()
        self.tiers.check_integrity()
        held = (self.cache.cached_page_ids(), self.cache.cached_window_page_ids(), self.cache.cached_states())
        for pool, cached, restoring in zip(self.device.allocators, held, self.tiers.in_flight_ids(), strict=True):
            pool.check_integrity()
            assert np.array_equal(np.sort(np.concatenate([*cached, restoring])), pool.held_page_ids())
        for pool in self.host.allocators:
            pool.check_integrity()

    def device_has(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """Pages, usable or not."""
        return self.cache.num_present(key_of(tokens, namespace))

    def host_has(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        return self.tiers.host.num_present(key_of(tokens, namespace))


def _pools(num_pages: int, page_size: int) -> Pools:
    return Pools(
        OfEachPool(
            PagedTokenToKVPoolAllocator(num_pages, page_size, identity()),
            PagedTokenToKVPoolAllocator(num_pages, page_size, identity()),
            PagedTokenToKVPoolAllocator(num_pages, 1, identity()),
        )
    )
