"""States as the real `cache_state` makes them, out of values chosen by the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from app.caches.inspection import CachedPrefix, Miss, TopPrefixes
from app.config.model_config import Component
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.observability.cache_journal import Admission, Eviction, JournalSnapshot, SecondOfTokens
from app.scheduler_adapter import PoolUse
from app.server.cache_state import CacheSnapshot, RunningView, ServerFacts, cache_state

# What the server sends with the page.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)

NOW = 20_000.0
WORDS = {
    1: "You are a helpful",
    2: " assistant.\nToday is ",
    3: "Monday",
    4: "Tuesday",
    5: ", and it is late.",
    6: " Hi!",
}


def admission(request_id: str, miss: Miss, *, age_s: float = 0, in_namespace: bool = False) -> Admission:
    return Admission(
        at=NOW - age_s,
        request_id=request_id,
        prompt_tokens=miss.prompt_tokens,
        cached_tokens=miss.num_matched,
        reason=miss.reason,
        sentence=miss.sentence,
        in_namespace=in_namespace,
        same=miss.same,
        prompt_goes_on=miss.prompt_goes_on,
        cached_goes_on=miss.cached_goes_on,
    )


def miss(reason: str, prompt_tokens: int, num_matched: int, **fields: Any) -> Miss:
    return Miss(reason=reason, prompt_tokens=prompt_tokens, num_matched=num_matched, page_size=16, **fields)  # type: ignore[arg-type]


def differing(request_id: str = "chatcmpl-differs") -> Admission:
    told = miss(
        "differs",
        480,
        32,
        same_tokens=45,
        same=(1, 2),
        prompt_goes_on=(3, 5),
        cached_goes_on=(4, 5),
    )
    return admission(request_id, told, age_s=4)


def one_of_each() -> list[Admission]:
    told = [
        miss("whole", 1200, 1184),
        miss("no_reuse", 300, 0),
        miss("short", 9, 0),
        miss("unseen", 300, 0),
        miss("evicted", 900, 512, evicted_s_ago=12.0),
        miss("incomplete", 900, 512, lacking=(Component.SWA,)),
        miss("other_namespace", 900, 0, other_fields=("salt",)),
        miss("ends", 2100, 2032),
        miss("late", 400, 0),
        miss("untold", 400, 0),
    ]
    return [admission(f"chatcmpl-{each.reason}", each, age_s=5 + 7 * n) for n, each in enumerate(told)]


def state_of(
    *,
    admissions: list[Admission] | None = None,
    prefixes: list[CachedPrefix] | None = None,
    evictions: list[Eviction] | None = None,
    requests: list[RunningView] | None = None,
    seconds: list[SecondOfTokens] | None = None,
    num_nodes: int | None = None,
    model: str = "SmolLM2-135M-Instruct",
    text_of: Callable[[list[int]], str] = lambda ids: "".join(WORDS.get(each, "?") for each in ids),
) -> dict[str, Any]:
    """Everything not given is empty. A pool of 1000 pages of 16 tokens."""
    prefixes = prefixes or []
    snapshot = CacheSnapshot(
        page_size=16,
        reuses_prefixes=True,
        pages=PoolUse(free=250, cached_unlocked=500, cached_locked=150, held_by_requests=80, restoring=20),
        top=TopPrefixes(tuple(prefixes), len(prefixes), len(prefixes) if num_nodes is None else num_nodes),
        journal=JournalSnapshot(
            at=NOW,
            seconds=tuple(seconds or []),
            admissions=tuple(admissions or []),
            evictions=tuple(evictions or []),
        ),
        requests=tuple(requests or []),
    )
    facts = ServerFacts(model=model, cache_type="radix_cache", cache_type_reason="first that covers a model with full")
    return json.loads(json.dumps(cache_state(snapshot, facts=facts, uptime_s=4000.0, text_of=text_of)))


def prefix(num_tokens: int, hits: int, **fields: Any) -> CachedPrefix:
    told: dict[str, Any] = {
        "num_tokens": num_tokens,
        "node_tokens": num_tokens,
        "hits": hits,
        "locked": False,
        "idle_s": 3.0,
        "namespace": DEFAULT_NAMESPACE,
        "head": (1, 2, 3),
        "tail": (5, 6),
    }
    return CachedPrefix(**(told | fields))


def eviction(num_tokens: int, **fields: Any) -> Eviction:
    told: dict[str, Any] = {
        "at": NOW - 8,
        "num_tokens": num_tokens,
        "prefix_tokens": 64,
        "idle_s": 95.0,
        "hits": 2,
        "head": (6, 5),
    }
    return Eviction(**(told | fields))


def traffic() -> list[SecondOfTokens]:
    """Half an interval cold, then warmer and warmer; 6,400 tokens evicted five minutes ago."""
    seconds = []
    for ago in range(800, 0, -20):
        evicted = 6400 if ago == 300 else 320 if ago % 60 == 0 else 0
        told = SecondOfTokens(
            second=int(NOW) - ago, prompt_tokens=1000, cached_tokens=1000 - ago, evicted_tokens=evicted
        )
        seconds.append(told)
    return seconds


def busy_state() -> dict[str, Any]:
    """A server with some of everything."""
    return state_of(
        admissions=[differing(), *one_of_each()],
        prefixes=[
            prefix(1024, 40, locked=True, idle_s=0.0),
            prefix(512, 7, namespace=Namespace(salt="s", adapter="french", dp_rank=1)),
            prefix(5, 0, tail=()),
        ],
        evictions=[eviction(480), eviction(16, idle_s=0.4, hits=0)],
        requests=[
            RunningView(
                request_id=f"chatcmpl-{n}",
                status=status,
                prompt_tokens=1000 + n,
                cached_tokens=16 * n,
                output_tokens=n,
                age_s=n + 0.5,
            )
            for n, status in enumerate(["decode", "decode", "prefill", "waiting"])
        ],
        seconds=traffic(),
        num_nodes=100_000,
    )
