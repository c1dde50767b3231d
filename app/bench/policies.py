"""What each eviction policy makes of a trace, beside the bound: hit rates of the real cache, replayed.

A block of the trace, 512 tokens, is one page, and its id stands for its tokens: an id names the block and everything
before it, so that is exact, and a whole trace takes a second. Prompts only: a trace does not say what becomes of the
outputs. One request at a time: match, lock, evict the shortfall, insert, unlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.bench.trace import TraceRequest, read_mooncake_trace
from app.bench.tree import TraceReplay, make_cache
from app.caches.tree.policies.choice import EVICTION_ORDERS
from app.errors import ConfigError

POOL_FRACTIONS = (0.02, 0.05, 0.10, 0.25)
_END = np.full(1, -1, np.int32)  # the token that a match leaves to compute; no block's


def run_policies_bench(
    trace: Path,
    num_requests: int | None = None,
    pool_fractions: Sequence[float] = (),
    policies: Sequence[str] = (),
    cache_type: str = "radix_cache",
) -> dict[str, Any]:
    """Replay a Mooncake trace with each of `policies`, or all, in pools of these parts of its distinct blocks."""
    prompts = _as_pages(read_mooncake_trace(trace, num_requests))
    distinct = int(np.unique(np.concatenate(prompts)).size)
    num_blocks = sum(prompt.size for prompt in prompts)
    longest = max(prompt.size for prompt in prompts)
    pools = []
    for fraction in pool_fractions or POOL_FRACTIONS:
        num_pages = int(fraction * distinct)
        if num_pages < longest:
            raise ConfigError(
                field="--pool-fraction",
                value=fraction,
                allowed=f"a pool that holds the longest prompt of {longest} blocks; this one has {num_pages}",
            )
        replays = {policy: _replay(prompts, num_pages, policy, cache_type) for policy in policies or EVICTION_ORDERS}
        pools.append(
            {
                "pool_fraction": fraction,
                "num_pages": num_pages,
                "hit_rates": {policy: replay.hit_tokens / num_blocks for policy, replay in replays.items()},
                "cpu_us_a_request": {policy: replay.cpu_ns / 1e3 / len(prompts) for policy, replay in replays.items()},
                "bound": most_hits(prompts, num_pages) / num_blocks,
            }
        )
    return {
        "trace": trace.name,
        "cache_type": cache_type,
        "num_requests": len(prompts),
        "num_blocks": num_blocks,
        "distinct_blocks": distinct,
        "pools": pools,
    }


def most_hits(prompts: Sequence[np.ndarray], num_pages: int) -> int:
    """Pages that a cache which knows the future finds: it drops the page whose next use is furthest (Belady, 1966).

    No cache of this size that serves the prompts one after another, and fetches nothing ahead, finds more. A page's
    next use is never before that of the page before it, so, with ties from the end of the prompt, what is kept is
    always whole prefixes. A prompt may pass the size while it is served, which no real cache may. O(pages log pages).
    """
    next_uses = _next_uses(prompts)
    kept: dict[int, tuple[int, int]] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = 0
    for prompt, uses in zip(prompts, next_uses, strict=True):
        pages = prompt.tolist()
        hits += next((place for place, page in enumerate(pages) if page not in kept), len(pages))
        for place, (page, next_use) in enumerate(zip(pages, uses, strict=True)):
            kept[page] = (-next_use, -place)
            heapq.heappush(furthest, (-next_use, -place, page))
        while len(kept) > num_pages:
            next_use, place, page = heapq.heappop(furthest)
            if kept.get(page) == (next_use, place):  # else it was used meanwhile
                del kept[page]
    return hits


def format_policies_bench(result: dict[str, Any]) -> str:
    """The result of `run_policies_bench` as a table."""
    pools = result["pools"]
    policies = list(pools[0]["hit_rates"])
    sizes = [f"pool {pool['pool_fraction']:.0%}" for pool in pools]
    lines = [
        f"{result['trace']}: {result['num_requests']:,} requests, {result['num_blocks']:,} blocks, "
        f"{result['distinct_blocks']:,} distinct; {result['cache_type']}, a page a block, prompts only",
        f"  {'hit rate, %':<14}" + "".join(f"{size:>11}" for size in sizes) + "   CPU us",
    ]
    for policy in policies:
        rates = "".join(f"{100 * pool['hit_rates'][policy]:>11.2f}" for pool in pools)
        cost = np.mean([pool["cpu_us_a_request"][policy] for pool in pools])
        lines.append(f"  {policy:<14}{rates}{cost:>9.0f}")
    lines.append(f"  {'bound':<14}" + "".join(f"{100 * pool['bound']:>11.2f}" for pool in pools))
    ideal = 1 - result["distinct_blocks"] / result["num_blocks"]
    lines.append(f"  without a limit {100 * ideal:.2f}; CPU: of one request's match, evict, allocate, insert, free")
    return "\n".join(lines)


def _as_pages(requests: list[TraceRequest]) -> list[np.ndarray]:
    """The blocks of each prompt as int32 tokens, numbered from 0 as they come."""
    numbers: dict[int, int] = {}
    return [
        np.array([numbers.setdefault(block, len(numbers)) for block in request.block_ids], np.int32)
        for request in requests
    ]


def _replay(prompts: list[np.ndarray], num_pages: int, policy: str, cache_type: str) -> TraceReplay:
    cache, allocator = make_cache(cache_type, num_pages=num_pages, page_size=1, eviction_policy=policy)
    replay = TraceReplay(cache, allocator)
    for prompt in prompts:
        replay.serve(np.concatenate([prompt, _END]), prompt)
    cache.check_integrity()
    allocator.check_integrity()
    return replay


def _next_uses(prompts: Sequence[np.ndarray]) -> list[list[int]]:
    """For each page of each prompt, the index of the next prompt that has it; len(prompts) if none has."""
    soonest: dict[int, int] = {}
    uses = []
    for index in reversed(range(len(prompts))):
        pages = prompts[index].tolist()
        uses.append([soonest.get(page, len(prompts)) for page in pages])
        soonest.update(dict.fromkeys(pages, index))
    return uses[::-1]
