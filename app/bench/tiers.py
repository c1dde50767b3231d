"""Hit rates of two and three tiers on a trace, beside one tier of their summed size. Control only: copies take no time.

A request waits until what a tier below has of its prompt is there, as a scheduler lets it wait, and is then served as
in app/bench/tree.py. Nothing moves while the next request arrives: what a request left to move has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from app.bench.instant_runtime import InstantRuntime, InstantStorage
from app.bench.trace import TraceRequest, read_mooncake_trace, working_set_tokens
from app.bench.tree import IDENTITY, TraceReplay, deps_of, left_over, make_cache
from app.caches.base import MatchResult
from app.caches.tiers.ports import TierParts
from app.caches.unified_radix_cache import UnifiedRadixCache
from app.config.tier_settings import TierSettings, WritePolicy
from app.core.keys import Namespace, RadixKey
from app.core.transfers import OfEachPool, PageCounts, TierLimits
from app.errors import ConfigError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator

_PAGE_BYTES = 1
_MOST_PLANS = 10_000  # that a request waits; a bench of a broken tier comes to its end as well
CACHE_TYPE = "unified_radix_cache"
POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Pages of each tier. storage 0: there are two."""

    device: int
    host: int
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


class TierReplay(TraceReplay):
    """As TraceReplay, over a cache with tiers."""

    def __init__(self, sizes: TierSizes, page_size: int, policy: WritePolicy, eviction_policy: str = "lru") -> None:
        device = PagedTokenToKVPoolAllocator(sizes.device, page_size, IDENTITY)
        host = PagedTokenToKVPoolAllocator(sizes.host, page_size, IDENTITY)
        parts = TierParts(
            token_allocator=host.port,
            limits=TierLimits(page_bytes=OfEachPool(_PAGE_BYTES, 0, 0), staging_bytes=_PAGE_BYTES * sizes.device),
            settings=TierSettings(write_policy=policy, prefetch_policy="wait_complete"),
            storage_seed=Namespace.seed if sizes.storage else None,
        )
        cache = UnifiedRadixCache(replace(deps_of(device, eviction_policy), host_tier=lambda: parts))
        super().__init__(cache, device)
        self.host = host
        self.runtime = InstantRuntime(
            tiers=cache.tiers,
            device=device,
            host=host,
            storage=InstantStorage(sizes.storage),
            page_bytes=_PAGE_BYTES,
        )
        self._tiers = cache.tiers
        self._num_requests = 0

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        self._tiers.check_integrity()
        self.allocator.check_integrity()
        self.host.check_integrity()

    def _cycle(self, prompt: np.ndarray, settled: np.ndarray) -> int:
        cache, port = self.cache, self.allocator.port
        prompt_key, settled_key = RadixKey.of(prompt), RadixKey.of(settled)
        self._bring_back(prompt_key)
        found = self._timed("match", lambda: cache.match(prompt_key))
        receipt = cache.lock(found)
        need = -(-settled.size // cache.page_size) - found.pages.size
        shortfall = need - port.available()
        if shortfall > 0:
            self._timed("evict", lambda: cache.evict(shortfall))
        own = self._timed("plan", lambda: self.runtime.reserve(need))
        pages = np.concatenate([found.pages, own])
        published = self._timed("insert", lambda: cache.insert(settled_key, pages, after=receipt))
        port.free(left_over(own, published.pages[found.pages.size - published.first :]))
        cache.unlock(receipt)
        self._timed("drain", self.runtime.drain)
        return found.num_tokens

    def _bring_back(self, key: RadixKey) -> None:
        """All that a request waits for."""
        tiers, request_id = self._tiers, str(self._num_requests)
        self._num_requests += 1
        tiers.expect(request_id, key)
        for _ in range(_MOST_PLANS):
            if tiers.holds_back(request_id):
                self.runtime.step()
            elif not self._restores(request_id, key, self.cache.match(key)):
                break
        tiers.forget(request_id)

    def _restores(self, request_id: str, key: RadixKey, found: MatchResult) -> bool:
        """Whether a restore was begun."""
        if not self._tiers.restorable(request_id, key, found.num_tokens):
            return False
        cache, port = self.cache, self.allocator.port
        receipt = cache.lock(found)
        taken = self._tiers.begin_restore(request_id, key, PageCounts(port.available() + cache.evictable_pages))
        if taken.pages > port.available():
            cache.evict(taken.pages - port.available())
        cache.unlock(receipt)
        if taken:
            self.runtime.step()
        return bool(taken)


def run_tiers_bench(
    trace: Path,
    *,
    device: float,
    host: float,
    storage: float = 0.0,
    num_requests: int | None = None,
    page_size: int = 16,
    policies: Sequence[WritePolicy] = (),
    eviction_policy: str = "lru",
) -> dict[str, Any]:
    """Replay a Mooncake trace; tiers of these parts of its working set. -> figures by name."""
    requests = read_mooncake_trace(trace, num_requests)
    pages = working_set_tokens(requests) / page_size
    sizes = TierSizes(device=int(pages * device), host=int(pages * host), storage=int(pages * storage))
    longest = max(request.input_length + request.output_length for request in requests)
    for name, fraction, num_pages in (("--device", device, sizes.device), ("--host", host, sizes.host)):
        if num_pages < -(-longest // page_size):
            raise ConfigError(
                field=name,
                value=fraction,
                allowed=f"a tier that holds the longest request of {longest} tokens; "
                f"this one has {num_pages * page_size}",
            )
    one = _replayed(requests, TraceReplay(*_one_tier(sizes.total, page_size, eviction_policy)))
    device_only = _replayed(requests, TraceReplay(*_one_tier(sizes.device, page_size, eviction_policy)))
    rows = []
    for policy in policies or POLICIES:
        replay = TierReplay(sizes, page_size, policy, eviction_policy)
        rate = _replayed(requests, replay)
        replay.check_integrity()
        rows.append(
            {
                "policy": policy,
                "token_hit_rate": rate,
                "over_one_tier": rate / one if one else 1.0,
                "cpu_us_a_request": replay.cpu_ns / 1e3 / len(requests),
                "moved_pages": replay.runtime.num_moved,
            }
        )
    return {
        "trace": trace.name,
        "num_requests": len(requests),
        "page_size": page_size,
        "parts": {"device": device, "host": host, "storage": storage},
        "one_tier": one,
        "device_only": device_only,
        "policies": rows,
    }


def format_tiers_bench(result: dict[str, Any]) -> str:
    parts = result["parts"]
    sizes = " + ".join(f"{name} {part:.0%}" for name, part in parts.items() if part)
    lines = [
        f"{result['trace']}: {result['num_requests']:,} requests, page {result['page_size']}, "
        f"{sizes} of what they hold",
        f"  {'':<26}{'hit rate, %':>12}{'/ one tier':>12}{'CPU us':>9}{'copied out':>12}{'and in':>10}",
        f"  {'one tier of that size':<26}{100 * result['one_tier']:>12.2f}{1:>12.3f}",
        f"  {'the device tier alone':<26}{100 * result['device_only']:>12.2f}"
        f"{result['device_only'] / (result['one_tier'] or 1):>12.3f}",
    ]
    for row in result["policies"]:
        moved = row["moved_pages"]
        lines.append(
            f"  {row['policy']:<26}{100 * row['token_hit_rate']:>12.2f}{row['over_one_tier']:>12.3f}"
            f"{row['cpu_us_a_request']:>9,.0f}{moved['backups']:>12,}{moved['restores']:>10,}"
        )
    lines.append("  goal: write_back at 0.98 of one tier or more")
    return "\n".join(lines)


def _one_tier(num_pages: int, page_size: int, eviction_policy: str) -> Any:
    return make_cache(CACHE_TYPE, num_pages=num_pages, page_size=page_size, eviction_policy=eviction_policy)


def _replayed(requests: list[TraceRequest], replay: TraceReplay) -> float:
    for request in requests:
        token_ids = request.token_ids()
        replay.serve(token_ids[: request.input_length], token_ids[:-1])
    return replay.hit_tokens / replay.prompt_tokens
