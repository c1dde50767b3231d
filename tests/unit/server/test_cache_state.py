"""The JSON of `GET /cache_state`: the right numbers, bounded, printable, and no tenant's secret."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from app.caches.base import BasePrefixCache, CacheDeps
from app.caches.chunk_cache import ChunkCache
from app.caches.radix_cache import RadixCache
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey
from app.core.ports import PoolSpec
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.observability.cache_journal import CacheJournal
from app.scheduler_adapter import SchedulerAdapter
from app.server.cache_state import RunningView, ServerFacts, cache_state, preview, snapshot_of

PAGES, PAGE_SIZE = 32, 4
FACTS = ServerFacts(model="tiny", cache_type="radix_cache", cache_type_reason="asked for", device_tier="device (HBM)")


@dataclass
class Watch:
    now: float = 10_007.0

    def __call__(self) -> float:
        return self.now


class Pool:
    spec = PoolSpec(num_pages=PAGES, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class Rig:
    """An adapter, an allocator and a journal, and what an engine does with them."""

    def __init__(self, cache_type: type[BasePrefixCache] = RadixCache) -> None:
        self.watch = Watch()
        self.journal = CacheJournal(self.watch)
        self.allocator = PagedTokenToKVPoolAllocator(PAGES, PAGE_SIZE, CacheIdentity(RuntimeId("r"), Generation(1)))
        deps = CacheDeps(
            token_allocator=self.allocator.port,
            device_pool=Pool(),
            page_size=PAGE_SIZE,
            eviction_observer=self.journal,
            clock=self.watch,
        )
        self.adapter = SchedulerAdapter(cache_type(deps))

    def begin(self, request_id: str, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> RadixKey:
        key = RadixKey.of(np.array(tokens, np.int32), namespace)
        prefix = self.adapter.admit(request_id, key)
        miss = self.adapter.explain_miss(key, prefix.num_tokens)
        self.journal.admitted(
            request_id=request_id,
            prompt_tokens=len(key),
            cached_tokens=prefix.num_tokens,
            reason=miss.reason,
            sentence=miss.sentence,
            in_namespace=namespace != DEFAULT_NAMESPACE,
            same=miss.same,
            prompt_goes_on=miss.prompt_goes_on,
            cached_goes_on=miss.cached_goes_on,
        )
        self.allocator.apply_frees(self.adapter.recorded_frees().pages)
        self.adapter.extend(request_id, self.allocator.allocate(-(-(len(key) - prefix.num_tokens) // PAGE_SIZE)))
        return key

    def serve(self, request_id: str, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        self.adapter.finish(request_id, self.begin(request_id, tokens, namespace))

    def state(self, *requests: RunningView) -> dict[str, Any]:
        """Through JSON, as a client gets it."""
        snapshot = snapshot_of(self.adapter, self.journal, requests)
        return json.loads(json.dumps(cache_state(snapshot, facts=FACTS, uptime_s=61.24, text_of=spelled)))


def spelled(token_ids: list[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_idle_server_tells_its_facts_and_an_empty_cache(rig: Rig) -> None:
    # when
    state = rig.state()

    # then
    assert (state["model"], state["uptime_s"]) == ("tiny", 61.2)
    assert state["cache"] == {
        "type": "radix_cache",
        "reason": "asked for",
        "page_size": PAGE_SIZE,
        "reuses_prefixes": True,
    }
    assert state["requests"] == {"num_running": 0, "num_waiting": 0, "shown": []}
    assert state["top_prefixes"] == {"complete": True, "num_visited": 0, "num_nodes": 0, "prefixes": []}
    assert (state["evictions"], state["admissions"]) == ([], [])
    assert state["hit_rate"]["points"] == [{"prompt_tokens": 0, "cached_tokens": 0, "evicted_tokens": 0}] * 90


def test_the_pages_of_a_tier_are_those_of_the_ledger_and_add_up(rig: Rig) -> None:
    # given one finished request, one that runs on a part of it and one on its own
    rig.serve("a", [*range(16)])
    rig.begin("b", [*range(8), 50, 51, 52])
    rig.begin("c", [*range(90, 100)])

    # when
    (tier,) = rig.state()["tiers"]

    # then
    assert tier == {
        "name": "device (HBM)",
        "capacity": {"pages": 32, "tokens": 128},
        "cached_locked": {"pages": 2, "tokens": 8},
        "cached_unlocked": {"pages": 2, "tokens": 8},
        "held_by_requests": {"pages": 4, "tokens": 16},
        "restoring": {"pages": 0, "tokens": 0},
        "free": {"pages": 24, "tokens": 96},
    }
    ledger = {name: pages.size for name, pages in rig.adapter.ledger().items()}
    assert ledger["cached_protected"] == 2
    assert ledger["requests"] == 4


@pytest.mark.parametrize("cache_type", [RadixCache, ChunkCache])
def test_counted_pages_equal_the_ledger_through_a_requests_life(cache_type: type[BasePrefixCache]) -> None:
    # given
    rig = Rig(cache_type)

    def check() -> None:
        counts, ledger = rig.adapter.page_counts(), rig.adapter.ledger()
        assert counts == (
            ledger["free"].size + ledger["recorded"].size,
            ledger["cached_evictable"].size,
            ledger["cached_protected"].size,
            ledger["requests"].size,
            ledger["restoring"].size,
        )

    # then, at each point
    check()
    key = rig.begin("a", [*range(10)])
    check()
    rig.adapter.publish("a", key.head(8))
    check()
    rig.adapter.finish("a", key)
    check()


def test_hits_and_evictions_are_added_up_by_ten_seconds(rig: Rig) -> None:
    # given, at 10007, 10009 and 10010 seconds
    rig.serve("a", [*range(16)])
    rig.watch.now += 2
    rig.serve("b", [*range(16)])
    rig.watch.now += 1
    rig.serve("c", [*range(16)])
    rig.adapter.flush()

    # when
    rig.watch.now = 10_030.0
    points = rig.state()["hit_rate"]["points"]

    # then
    nothing = {"prompt_tokens": 0, "cached_tokens": 0, "evicted_tokens": 0}
    assert points[-5:] == [
        nothing,
        {"prompt_tokens": 32, "cached_tokens": 12, "evicted_tokens": 0},
        {"prompt_tokens": 16, "cached_tokens": 12, "evicted_tokens": 16},
        nothing,
        nothing,
    ]

    # when they are a quarter of an hour old, they have left
    rig.watch.now = 10_010 + 899.0
    assert sum(point["prompt_tokens"] for point in rig.state()["hit_rate"]["points"]) == 16
    rig.watch.now = 10_010 + 901.0
    assert rig.state()["hit_rate"]["points"] == [nothing] * 90


def test_running_requests_come_before_waiting_ones_and_are_counted_beyond_what_is_shown(rig: Rig) -> None:
    # given
    def view(number: int, status: str) -> RunningView:
        return RunningView(
            request_id=f"r{number}", status=status, prompt_tokens=9, cached_tokens=4, output_tokens=2, age_s=1.26
        )

    views = [*(view(n, "waiting") for n in range(100)), view(100, "decode"), view(101, "prefill")]

    # when
    told = rig.state(*views)["requests"]

    # then
    assert (told["num_running"], told["num_waiting"], len(told["shown"])) == (2, 100, 64)
    assert [each["request_id"] for each in told["shown"][:3]] == ["r100", "r101", "r0"]
    assert told["shown"][0] == {
        "request_id": "r100",
        "status": "decode",
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "output_tokens": 2,
        "age_s": 1.3,
    }


def test_an_admission_tells_the_reason_and_the_texts_that_differ(rig: Rig) -> None:
    # given
    rig.serve("first", [*range(12)])
    rig.watch.now += 3
    rig.serve("second", [*range(6), 77, *range(7, 12)])
    rig.watch.now += 1

    # when
    second, first = rig.state()["admissions"]

    # then
    assert (first["request_id"], first["reason"], first["ago_s"], first["difference"]) == ("first", "unseen", 4.0, None)
    assert (second["cached_tokens"], second["reason"], second["in_namespace"]) == (4, "differs", False)
    assert "first 6 tokens are those of a cached prompt" in second["sentence"]
    assert second["difference"] == {
        "same": "<0><1><2><3><4><5>",
        "prompt": "<77><7><8><9><10><11>",
        "cached": "<6><7><8><9><10><11>",
        "prompt_token": 77,
        "cached_token": 6,
    }


def test_a_prefix_and_an_eviction_tell_their_texts_and_numbers(rig: Rig) -> None:
    # given
    rig.serve("a", [*range(40)])
    rig.serve("b", [*range(41)])
    rig.watch.now += 2

    # when
    (prefix,) = rig.state()["top_prefixes"]["prefixes"]
    rig.adapter.flush()
    (eviction,) = rig.state()["evictions"]

    # then
    assert prefix == {
        "begins": spelled([*range(24)]),
        "ends": spelled([*range(32, 40)]),
        "gap_tokens": 8,
        "num_tokens": 40,
        "node_tokens": 40,
        "hits": 1,
        "saved_tokens": 40,
        "locked": False,
        "idle_s": 2.0,
        "adapter": None,
        "salted": False,
        "extra_key": False,
        "dp_rank": 0,
    }
    assert eviction == {
        "ago_s": 0.0,
        "num_tokens": 40,
        "prefix_tokens": 0,
        "idle_s": 2.0,
        "hits": 1,
        "begins": spelled([*range(24)]),
    }


def test_secrets_of_a_namespace_are_never_told(rig: Rig) -> None:
    # given
    rig.serve("a", [*range(16)], Namespace(salt="top-secret", extra_key="hidden", adapter="lora", dp_rank=2))
    rig.serve("b", [*range(16)])

    # when
    state = rig.state()

    # then
    assert not any(secret in json.dumps(state) for secret in ("top-secret", "hidden"))
    told = state["top_prefixes"]["prefixes"]
    assert [(each["salted"], each["extra_key"], each["adapter"], each["dp_rank"]) for each in told] in (
        [(True, True, "lora", 2), (False, False, None, 0)],
        [(False, False, None, 0), (True, True, "lora", 2)],
    )
    assert [each["in_namespace"] for each in state["admissions"]] == [False, True]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\n\tc", "a⏎b␍⏎⇥c"),
        ("\x00\x1b[31m\x7f", "␀␛[31m␡"),
        ("half \ud83d", "half ?"),
        ("<b>&amp;</b>", "<b>&amp;</b>"),
        ("x" * 120, "x" * 120),
        ("x" * 10_000, "x" * 119 + "…"),
    ],
)
def test_a_preview_is_one_printable_line(text: str, shown: str) -> None:
    assert preview(text) == shown
