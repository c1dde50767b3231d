"""How fast a prefix cache is, without a model: a trace replayed against the real cache and allocator, one request at a
time, and single operations.

The cycle of a request: match the prompt, lock, evict what is short, allocate, insert prompt and output without its last
token, free duplicates and the tail, unlock. Python's garbage collector runs as in serving, from a collected heap on.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from app.bench.trace import read_mooncake_trace, working_set_tokens
from app.caches.base import BasePrefixCache, CacheDeps
from app.caches.builtin import load_builtin_caches, load_entry_points
from app.caches.registry import CacheType, default_registry
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.keys import RadixKey
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator

IDENTITY = CacheIdentity(RuntimeId("bench"), Generation(0))
_LONG = 32_768  # tokens


@dataclass(frozen=True, slots=True)
class _ShapeOnlyPool:
    """A DevicePool without a device."""

    spec: PoolSpec


def make_cache(
    cache_type: str, *, num_pages: int, page_size: int, eviction_policy: str = "lru"
) -> tuple[BasePrefixCache, PagedTokenToKVPoolAllocator]:
    """A registered cache over an empty pool of `num_pages` pages."""
    allocator = PagedTokenToKVPoolAllocator(num_pages, page_size, IDENTITY)
    return known_type(cache_type).ctor(deps_of(allocator, eviction_policy)), allocator


def known_type(cache_type: str) -> CacheType:
    """A registered type by name."""
    load_builtin_caches()
    load_entry_points(wanted=cache_type)
    return default_registry.seal().get(cache_type)


def deps_of(allocator: PagedTokenToKVPoolAllocator, eviction_policy: str) -> CacheDeps:
    """What a cache gets for a model of full attention alone."""
    port = allocator.port
    spec = PoolSpec(
        num_pages=port.capacity, page_size=port.page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
    return CacheDeps(
        token_allocator=port,
        device_pool=_ShapeOnlyPool(spec),
        page_size=port.page_size,
        eviction_policy=eviction_policy,
    )


class TraceReplay:
    """Requests served by a cache and an allocator, each operation timed.

    latencies_ns: wall time of each call, by operation. cpu_ns: processor time of all cycles together.
    """

    def __init__(self, cache: BasePrefixCache, allocator: PagedTokenToKVPoolAllocator) -> None:
        self.cache = cache
        self.allocator = allocator
        self.latencies_ns: dict[str, list[int]] = defaultdict(list)
        self.cpu_ns = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0

    def serve(self, prompt: np.ndarray, settled: np.ndarray) -> None:
        """One whole cycle: look for the tokens `prompt`, publish the tokens `settled`, both int32.

        OutOfPagesError if they are more than the pool holds.
        """
        started = time.process_time_ns()
        hit_tokens = self._cycle(prompt, settled)
        self.cpu_ns += time.process_time_ns() - started
        self.prompt_tokens += prompt.size
        self.hit_tokens += hit_tokens

    def _cycle(self, prompt: np.ndarray, settled: np.ndarray) -> int:
        cache, allocator, port = self.cache, self.allocator, self.allocator.port
        prompt_key, settled_key = RadixKey.of(prompt), RadixKey.of(settled)

        found = self._timed("match", lambda: cache.match(prompt_key))
        receipt = cache.lock(found)
        need = -(-settled.size // cache.page_size) - found.pages.size
        shortfall = need - port.available()
        if shortfall > 0:
            self._timed("evict", lambda: cache.evict(shortfall))
        own = self._timed("allocate", lambda: reserve(allocator, need))
        pages = np.concatenate([found.pages, own])
        published = self._timed("insert", lambda: cache.insert(settled_key, pages, after=receipt))

        def finish() -> None:
            port.free(left_over(own, published.pages[found.pages.size - published.first :]))
            cache.unlock(receipt)

        self._timed("finish", finish)
        return found.num_tokens

    def _timed(self, operation: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter_ns()
        result = call()
        self.latencies_ns[operation].append(time.perf_counter_ns() - started)
        return result


# Of a cache type, over so many pages of that size, with an eviction policy.
NewReplay = Callable[[str, int, int, str], TraceReplay]


def full_pages_replay(cache_type: str, num_pages: int, page_size: int, eviction_policy: str) -> TraceReplay:
    made = make_cache(cache_type, num_pages=num_pages, page_size=page_size, eviction_policy=eviction_policy)
    return TraceReplay(*made)


def run_tree_bench(
    trace: Path,
    num_requests: int = 800,
    page_size: int = 16,
    pool_fraction: float = 0.25,
    cache_type: str = "radix_cache",
    new_replay: NewReplay = full_pages_replay,
    eviction_policy: str = "lru",
) -> dict[str, Any]:
    """Replay the first `num_requests` of a Mooncake trace against a pool of `pool_fraction` of their working set."""
    requests = read_mooncake_trace(trace, num_requests)
    num_pages = int(working_set_tokens(requests) * pool_fraction / page_size)
    longest = max(request.input_length + request.output_length for request in requests)
    if num_pages < -(-longest // page_size):
        raise ConfigError(
            field="--pool-fraction",
            value=pool_fraction,
            allowed=f"a pool that holds the longest request of {longest} tokens; this one has {num_pages * page_size}",
        )
    replay = new_replay(cache_type, num_pages, page_size, eviction_policy)
    cache = replay.cache
    gc.collect()  # what came before is no cost of the cache
    for request in requests:
        token_ids = request.token_ids()
        replay.serve(token_ids[: request.input_length], token_ids[:-1])
    cache.check_integrity()
    replay.allocator.check_integrity()

    floor_us = compare_floor_us()
    operations = {
        name: {"calls": len(ns), "p50_us": _percentile_us(ns, 50), "p99_us": _percentile_us(ns, 99)}
        for name, ns in replay.latencies_ns.items()
    }
    return {
        "trace": trace.name,
        "cache_type": cache_type,
        "eviction_policy": eviction_policy,
        "page_size": page_size,
        "num_requests": len(requests),
        "pool_tokens": num_pages * page_size,
        "requests_per_cpu_second": len(requests) / (replay.cpu_ns / 1e9),
        "token_hit_rate": replay.hit_tokens / replay.prompt_tokens,
        "operations": operations,
        "p50_over_floor": {name: timing["p50_us"] / floor_us for name, timing in operations.items()},
        "floor_compare_32k_us": floor_us,
        "num_nodes": cache.num_nodes,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def run_operations_bench(page_size: int = 16) -> dict[str, Any]:
    """Single operations, the least of many runs, in microseconds of wall time."""
    measured = {
        **_match_and_insert(page_size),
        **_evict_a_leaf(page_size),
        **_allocate_and_free(page_size),
    }
    floor_us = compare_floor_us()
    return {
        "page_size": page_size,
        "operations_us": measured,
        "over_floor": {name: us / floor_us for name, us in measured.items()},
        "floor_compare_32k_us": floor_us,
    }


def compare_floor_us() -> float:
    """What this machine needs to compare 32k equal tokens: no match can be quicker."""
    one = bytes(4 * _LONG)
    other = bytearray(one)
    return _least_us(lambda: one == other, runs=300)


def format_tree_bench(result: dict[str, Any]) -> str:
    """The result of `run_tree_bench` as a table."""
    lines = [
        f"{result['trace']}: {result['num_requests']} requests, {result['cache_type']}, {result['eviction_policy']}, "
        f"page {result['page_size']}, pool {result['pool_tokens']:,} tokens",
        f"  {result['requests_per_cpu_second']:,.0f} requests per CPU second, "
        f"token hit rate {100 * result['token_hit_rate']:.3f} %, {result['num_nodes']:,} nodes, "
        f"peak memory {result['peak_memory_bytes'] / 2**20:,.0f} MiB",
        f"  {'operation':<10}{'calls':>8}{'p50 us':>10}{'p99 us':>10}{'p50 / floor':>13}",
    ]
    for name, timing in result["operations"].items():
        lines.append(
            f"  {name:<10}{timing['calls']:>8}{timing['p50_us']:>10.1f}{timing['p99_us']:>10.1f}"
            f"{result['p50_over_floor'][name]:>13.1f}"
        )
    lines.append(f"  floor: comparing 32k tokens takes {result['floor_compare_32k_us']:.1f} us here")
    return "\n".join(lines)


def format_operations_bench(result: dict[str, Any]) -> str:
    """The result of `run_operations_bench` as a table."""
    lines = [f"single operations, page {result['page_size']}", f"  {'operation':<44}{'least us':>10}{'/ floor':>9}"]
    for name, us in result["operations_us"].items():
        lines.append(f"  {name:<44}{us:>10.2f}{result['over_floor'][name]:>9.2f}")
    lines.append(f"  floor: comparing 32k tokens takes {result['floor_compare_32k_us']:.1f} us here")
    return "\n".join(lines)


def _match_and_insert(page_size: int) -> dict[str, float]:
    cache, allocator = make_cache("radix_cache", num_pages=10 * _LONG // page_size, page_size=page_size)
    token_ids = np.random.default_rng(0).integers(0, 128_000, 10 * _LONG + 1, dtype=np.int32)
    pages = allocator.allocate(10 * _LONG // page_size)
    stored, query = RadixKey.of(token_ids[:_LONG]), RadixKey.of(token_ids[: _LONG + 1])
    measured = {"insert 32k new": _least_us(lambda: cache.insert(stored, pages), prepare=cache.reset)}
    measured["insert 32k present"] = _least_us(lambda: cache.insert(stored, pages))
    measured["match 32k, one node"] = _least_us(lambda: cache.match(query))

    longer = RadixKey.of(token_ids)
    cache.reset()
    cache.insert(longer, pages)
    measured["match 320k, one node"] = _least_us(lambda: cache.match(longer.head(10 * _LONG + 1)), runs=100)

    cache.reset()
    for part in range(1, 65):
        cache.insert(stored.head(part * _LONG // 64), pages)
    measured["match 32k, chain of 64 nodes"] = _least_us(lambda: cache.match(query))
    for depth, parts in (("512", 1), ("32k, 64 nodes", 64)):
        measured[f"publish 512 more, behind {depth}"] = min(
            _publish_more(cache, longer, pages, parts) for _ in range(20)
        )
    return measured


def _publish_more(cache: BasePrefixCache, key: RadixKey, pages: np.ndarray, parts: int) -> float:
    """Microseconds to publish the next part of a prompt whose first `parts` its request has published and locked."""
    cache.reset()
    step = _LONG // 64
    receipt = cache.lock(cache.match(key.head(1)))
    for part in range(1, parts + 2):
        head = key.head(part * step)
        started = time.perf_counter_ns()
        receipt = cache.relock(receipt, cache.insert(head, pages, after=receipt))
        spent = time.perf_counter_ns() - started
    return spent / 1e3


def _evict_a_leaf(page_size: int, leaves_evicted: int = 1563, pages_a_leaf: int = 4) -> dict[str, float]:
    measured: dict[str, float] = {}
    for num_leaves in (10_000, 100_000):
        num_pages = num_leaves * pages_a_leaf
        cache, allocator = make_cache("radix_cache", num_pages=num_pages, page_size=page_size)
        token_ids = np.random.default_rng(0).integers(0, 128_000, num_pages * page_size, dtype=np.int32)
        for leaf in token_ids.reshape(num_leaves, -1):
            cache.insert(RadixKey.of(leaf), allocator.allocate(pages_a_leaf))
        least = _least_us(partial(cache.evict, leaves_evicted * pages_a_leaf), runs=5)
        measured[f"evict a leaf, of {num_leaves:,}"] = least / leaves_evicted
    return measured


def _allocate_and_free(page_size: int) -> dict[str, float]:
    measured: dict[str, float] = {}
    for num_pages in (10_000, 1_000_000):
        fresh = np.arange(1, num_pages + 1, dtype=np.int32)
        for layout, order in (("fresh", fresh), ("shuffled", np.random.default_rng(0).permutation(fresh))):
            allocator = PagedTokenToKVPoolAllocator(num_pages, page_size, IDENTITY)
            allocator.allocate(num_pages)
            allocator.give_back(order)
            where = f"4096 pages, {layout} pool of {num_pages:,}"
            for operation, us in _least_of_a_round(allocator, 4096).items():
                measured[f"{operation} {where}"] = us
    return measured


def _least_of_a_round(allocator: PagedTokenToKVPoolAllocator, num_pages: int, rounds: int = 200) -> dict[str, float]:
    """Allocate, free and apply the same pages over and over. "apply" is what the next plan pays for the free."""
    port = allocator.port
    least = dict.fromkeys(("allocate", "free", "apply"), float("inf"))
    for _ in range(rounds):
        started = time.perf_counter_ns()
        pages = allocator.allocate(num_pages)
        allocated = time.perf_counter_ns()
        port.free(pages)
        freed = time.perf_counter_ns()
        allocator.apply_frees(port.recorded_frees())
        spent = (allocated - started, freed - allocated, time.perf_counter_ns() - freed)
        least = {name: min(us, ns / 1e3) for (name, us), ns in zip(least.items(), spent, strict=True)}
    return least


def reserve(allocator: PagedTokenToKVPoolAllocator, num_pages: int) -> np.ndarray:
    """What prepare_batch does: apply what control freed, then allocate."""
    allocator.apply_frees(allocator.port.recorded_frees())
    return allocator.allocate(num_pages)


def left_over(own: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """Of pages that a request published, those that the cache did not adopt: where it had others, and the tail."""
    given, tail = own[: cached.size], own[cached.size :]
    if given.tobytes() == cached.tobytes():  # as bytes, which is quicker than `!=`
        return tail
    return np.concatenate([given[given != cached], tail])


def _once_us(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


def _least_us(call: Callable[[], object], *, runs: int = 1000, prepare: Callable[[], object] | None = None) -> float:
    least = float("inf")
    for _ in range(runs):
        if prepare is not None:
            prepare()
        least = min(least, _once_us(call))
    return least


def _percentile_us(latencies_ns: list[int], percent: int) -> float:
    return float(np.percentile(latencies_ns, percent)) / 1e3


def _peak_memory_bytes() -> int:
    """Of the whole process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
