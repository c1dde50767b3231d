"""Scheduler, adapter, tree and runtime together, under any sequence of what clients and pools may do."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.core.keys import Namespace
from app.errors import LockedPageError, OutOfPagesError
from app.runtime.buckets import bucket
from tests.support.engine import RuntimeSpy, check_reply, cold_tokens, opened
from tests.support.scripted_tiers import TieredEngine, tiered

# Two stems and few tokens: prompts meet one another's prefixes all the time.
STEMS = [np.random.default_rng(seed).integers(0, 256, 48).astype(np.int32) for seed in (1, 2)]

prompts = st.builds(
    lambda stem, length, end: [*STEMS[stem][:length].tolist(), *end],
    st.integers(0, 1),
    st.integers(0, 48),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
)

# Cache types, and models that they serve: windows of 6 tokens, snapshots every 16.
_SWA = {"window": 6, "swa_full_tokens_ratio": 0.3}
_RECURRENT = {"recurrent": True, "recurrent_track_interval": 16, "max_recurrent_snapshots": 4}
TIERED: dict[str, Any] = {"cache_type": "radix_cache"}  # with scripted tiers below it
ENGINES: list[dict[str, Any]] = [
    {"cache_type": "radix_cache"},
    {"cache_type": "unified_radix_cache"},
    {"cache_type": "unified_radix_cache", **_SWA},
    {"cache_type": "unified_radix_cache", **_RECURRENT},
    {"cache_type": "unified_radix_cache", **_SWA, **_RECURRENT},
    {"cache_type": "chunk_cache", **_SWA, **_RECURRENT},
    TIERED,
    TIERED,
]


class FewBuckets:
    """Steps of few shapes: every other example opens a pool of its own, whose programs are all compiled anew."""

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self._num_rows = num_rows
        self._max_pages = max_pages

    def rows(self, count: int) -> int:
        return self._num_rows

    def tokens(self, count: int) -> int:
        return bucket(count, 64)

    def chunk(self, longest: int) -> int:
        return 128

    def pages(self, num_tokens: int) -> int:
        return self._max_pages


class SchedulerMachine(RuleBasedStateMachine):
    """Every reply is checked against the cold twin when it comes; every owner's invariants after every rule."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        chunk=st.sampled_from([1, 5, 16, -1]),
        engine=st.sampled_from(ENGINES),
        overlap=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
    )
    def open(self, page_size: int, chunk: int, engine: dict[str, Any], overlap: bool, policy: str) -> None:
        self.stack = ExitStack()
        fields = {
            "page_size": page_size,
            "max_total_tokens": {1: 80, 4: 96, 16: 160}[page_size],
            "chunked_prefill_size": chunk,
            "disable_overlap": not overlap,
            "schedule_policy": policy,
            **engine,
        }
        self.tiered: TieredEngine | None = None
        if engine is TIERED:
            self.tiered = self.stack.enter_context(tiered(**fields))
            self.engine = self.tiered.engine
        else:
            self.engine = self.stack.enter_context(opened(**fields))
        rows = self.engine.container.req_to_token_pool()
        self.engine.runtime._buckets = FewBuckets(rows.num_rows, rows.max_pages)
        self.spy = RuntimeSpy(self.engine.runtime)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.tiered is not None:
            self.bring_what_was_held()
        self.engine.drain()
        self.engine.check_replies()
        self.stack.close()

    @rule(
        prompt=prompts,
        max_tokens=st.sampled_from([0, 1, 2, 7, 25]),
        stop=st.none() | st.integers(0, 24),
        salted=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, stop: int | None, salted: bool) -> None:
        sampling = {}
        if stop is not None and stop < max_tokens:
            sampling["stop_token_ids"] = (cold_tokens(np.array(prompt, np.int32), stop + 1)[stop],)
        self.engine.add(prompt, namespace=Namespace(salt="s" if salted else None), max_tokens=max_tokens, **sampling)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                check_reply(output, self.engine.requests[output.request_id])
            self.engine.check()

    @precondition(lambda self: self.engine.requests)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.engine.scheduler.abort(f"r{which % len(self.engine.requests)}")

    @rule()
    def flush(self) -> None:
        before = self.engine.cached_pages
        try:
            assert self.engine.scheduler.flush_cache() == before
            assert self.engine.cached_pages == 0
        except LockedPageError:
            assert self.engine.cached_pages == before

    @rule()
    def refuse_a_prepare(self) -> None:
        """Pressure that control does not see coming: the next plan is refused once."""
        if not self.spy.refusals:
            self.spy.refusals.append(OutOfPagesError(need=1, free=0))

    @rule(share=st.integers(1, 8))
    def evict(self, share: int) -> None:
        """Pressure from elsewhere: part of the cache goes."""
        self.engine.adapter.make_room(self.engine.adapter.reachable() * share // 8)

    @precondition(lambda self: self.tiered is not None and self.engine.requests)
    @rule(which=st.integers(0, 30), to_land=st.integers(1, 6), fails=st.booleans(), most=st.sampled_from([1, 3, 99]))
    def back_up(self, which: int, to_land: int, fails: bool, most: int) -> None:
        """The host gets what is cached of some prompt; copies behave differently from now on."""
        assert self.tiered is not None
        request = self.engine.requests[f"r{which % len(self.engine.requests)}"]
        self.tiered.back_up(request.prompt_token_ids.tolist(), namespace=request.namespace)
        self.tiered.copies.steps_to_land, self.tiered.copies.fail_all = to_land, fails
        self.tiered.tiers.max_pages = most

    @precondition(lambda self: self.tiered is not None and self.engine.requests)
    @rule(which=st.integers(0, 30))
    def hold_back(self, which: int) -> None:
        """Something comes from storage."""
        assert self.tiered is not None
        self.tiered.tiers.held.add(f"r{which % len(self.engine.requests)}")

    @precondition(lambda self: self.tiered is not None)
    @rule()
    def bring_what_was_held(self) -> None:
        assert self.tiered is not None
        self.tiered.tiers.held.clear()

    @rule()
    def poison(self) -> None:
        self.engine.poison_free_pages()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    @invariant()
    def nobody_is_answered_and_served(self) -> None:
        if hasattr(self, "engine"):
            assert not self.engine.outputs.keys() & self.engine.scheduler._sequences.keys()


SchedulerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSchedulerMachine = SchedulerMachine.TestCase
