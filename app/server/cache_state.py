"""What the page at `/` shows, as the JSON of `GET /cache_state`.

Two steps, so that the engine's thread does no more than it must: `snapshot_of` reads the engine's objects on its thread
(about a millisecond at worst, however large the cache); `cache_state` turns that into texts on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.caches.inspection import CachedPrefix, TopPrefixes
from app.caches.tiers.counters import TierCounters
from app.observability.cache_journal import SECONDS_KEPT, Admission, CacheJournal, Eviction, JournalSnapshot
from app.scheduler_adapter import PoolUse, SchedulerAdapter

TextOf = Callable[[list[int]], str]

INTERVAL_S = 10
TOP_PREFIXES = 20
REQUESTS_SHOWN = 64
HOST_TIER = "host memory"
PREVIEW_CHARACTERS = 120

# Control characters are made visible; the page may not be able to tell where a text ends otherwise.
_VISIBLE = {code: 0x2400 + code for code in range(32)} | {ord("\n"): "⏎", ord("\t"): "⇥", 127: "␡"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What does not change while the server runs.

    cache_type_reason: why this type was chosen, in words. device_tier: what to call the memory that pages are in.
    """

    model: str
    cache_type: str
    cache_type_reason: str
    device_tier: str = "device (HBM)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """A request that is being served. `status`: waiting, prefill or decode. `age_s`: seconds since it came."""

    request_id: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """Values read from the engine at one moment; nothing the engine does later changes them."""

    page_size: int
    reuses_prefixes: bool
    pages: PoolUse
    top: TopPrefixes
    journal: JournalSnapshot
    requests: tuple[RunningView, ...]
    host: PoolUse | None = None  # of the host pool


def host_use(counters: TierCounters) -> PoolUse:
    """Of the host pool: no request holds a page there, and what is neither free nor cached is being written."""
    free, unlocked, locked = (
        counters.num_host_pages_free,
        counters.num_host_pages_unlocked,
        counters.num_host_pages_locked,
    )
    return PoolUse(free, unlocked, locked, 0, counters.num_host_pages - free - unlocked - locked)


def snapshot_of(
    adapter: SchedulerAdapter,
    journal: CacheJournal,
    requests: Sequence[RunningView],
    host: PoolUse | None = None,
) -> CacheSnapshot:
    """Read everything, on the engine's thread. `requests`: all that wait or run; `host`: None without a host tier.

    Changes nothing.
    """
    return CacheSnapshot(
        page_size=adapter.page_size,
        reuses_prefixes=adapter.reuses_prefixes,
        pages=adapter.page_counts(),
        top=adapter.top_prefixes(TOP_PREFIXES),
        journal=journal.snapshot(),
        requests=tuple(requests),
        host=host,
    )


def cache_state(snapshot: CacheSnapshot, *, facts: ServerFacts, uptime_s: float, text_of: TextOf) -> dict[str, Any]:
    """The body of `GET /cache_state`; every value is ready for JSON. Runs on any thread.

    `text_of` decodes token ids; its texts are cut to 120 characters and made printable.
    """
    journal = snapshot.journal
    return {
        "model": facts.model,
        "uptime_s": round(uptime_s, 1),
        "cache": {
            "type": facts.cache_type,
            "reason": facts.cache_type_reason,
            "page_size": snapshot.page_size,
            "reuses_prefixes": snapshot.reuses_prefixes,
        },
        "tiers": [
            _tier(facts.device_tier, snapshot.pages, snapshot.page_size),
            *([] if snapshot.host is None else [_tier(HOST_TIER, snapshot.host, snapshot.page_size)]),
        ],
        "hit_rate": {"interval_s": INTERVAL_S, "points": _points(journal)},
        "requests": _requests(snapshot.requests),
        "top_prefixes": {
            "complete": snapshot.top.complete,
            "num_visited": snapshot.top.num_visited,
            "num_nodes": snapshot.top.num_nodes,
            "prefixes": [_prefix(prefix, text_of) for prefix in snapshot.top.prefixes],
        },
        "evictions": [_eviction(eviction, journal.at, text_of) for eviction in journal.evictions],
        "admissions": [_admission(admission, journal.at, text_of) for admission in journal.admissions],
    }


def preview(text: str) -> str:
    """One line of at most 120 characters, without control characters; safe to encode, not to use as HTML."""
    cut = text if len(text) <= PREVIEW_CHARACTERS else text[: PREVIEW_CHARACTERS - 1] + "…"
    return cut.translate(_VISIBLE).encode("utf-8", "replace").decode("utf-8")


def _tier(name: str, use: PoolUse, page_size: int) -> dict[str, Any]:
    def amount(pages: int) -> dict[str, int]:
        return {"pages": pages, "tokens": pages * page_size}

    return {
        "name": name,
        "capacity": amount(sum(use)),
        "cached_locked": amount(use.cached_locked),
        "cached_unlocked": amount(use.cached_unlocked),
        "held_by_requests": amount(use.held_by_requests),
        "restoring": amount(use.restoring),
        "free": amount(use.free),
    }


def _points(journal: JournalSnapshot) -> list[dict[str, int]]:
    """One for each interval that has begun, oldest first; they begin at multiples of it, so none changes afterwards."""
    current = int(journal.at) // INTERVAL_S
    first = current - SECONDS_KEPT // INTERVAL_S + 1
    points = [{"prompt_tokens": 0, "cached_tokens": 0, "evicted_tokens": 0} for _ in range(first, current + 1)]
    for second in journal.seconds:
        index = second.second // INTERVAL_S - first
        if index >= 0:
            points[index]["prompt_tokens"] += second.prompt_tokens
            points[index]["cached_tokens"] += second.cached_tokens
            points[index]["evicted_tokens"] += second.evicted_tokens
    return points


def _requests(requests: tuple[RunningView, ...]) -> dict[str, Any]:
    waiting = [view for view in requests if view.status == "waiting"]
    running = [view for view in requests if view.status != "waiting"]
    return {
        "num_running": len(running),
        "num_waiting": len(waiting),
        "shown": [_request(view) for view in [*running, *waiting][:REQUESTS_SHOWN]],
    }


def _request(view: RunningView) -> dict[str, Any]:
    return {
        "request_id": preview(view.request_id),
        "status": view.status,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "output_tokens": view.output_tokens,
        "age_s": round(view.age_s, 1),
    }


def _prefix(prefix: CachedPrefix, text_of: TextOf) -> dict[str, Any]:
    """Salt and extra key may be secrets of a tenant: only whether there is one is told."""
    namespace = prefix.namespace
    return {
        "begins": preview(text_of(list(prefix.head))),
        "ends": preview(text_of(list(prefix.tail))),
        "gap_tokens": prefix.num_tokens - len(prefix.head) - len(prefix.tail),
        "num_tokens": prefix.num_tokens,
        "node_tokens": prefix.node_tokens,
        "hits": prefix.hits,
        "saved_tokens": prefix.saved_tokens,
        "locked": prefix.locked,
        "idle_s": round(prefix.idle_s, 1),
        "adapter": None if namespace.adapter is None else preview(namespace.adapter),
        "salted": namespace.salt is not None,
        "extra_key": namespace.extra_key is not None,
        "dp_rank": namespace.dp_rank,
    }


def _eviction(eviction: Eviction, now: float, text_of: TextOf) -> dict[str, Any]:
    return {
        "ago_s": round(now - eviction.at, 1),
        "num_tokens": eviction.num_tokens,
        "prefix_tokens": eviction.prefix_tokens,
        "idle_s": round(eviction.idle_s, 1),
        "hits": eviction.hits,
        "begins": preview(text_of(list(eviction.head))),
    }


def _admission(admission: Admission, now: float, text_of: TextOf) -> dict[str, Any]:
    return {
        "request_id": preview(admission.request_id),
        "ago_s": round(now - admission.at, 1),
        "prompt_tokens": admission.prompt_tokens,
        "cached_tokens": admission.cached_tokens,
        "in_namespace": admission.in_namespace,
        "reason": admission.reason,
        "sentence": admission.sentence,
        "difference": _difference(admission, text_of) if admission.prompt_goes_on else None,
    }


def _difference(admission: Admission, text_of: TextOf) -> dict[str, Any]:
    """The ids of the two tokens that differ are told too: their texts can look alike."""
    return {
        "same": preview(text_of(list(admission.same))),
        "prompt": preview(text_of(list(admission.prompt_goes_on))),
        "cached": preview(text_of(list(admission.cached_goes_on))),
        "prompt_token": admission.prompt_goes_on[0],
        "cached_token": admission.cached_goes_on[0],
    }
