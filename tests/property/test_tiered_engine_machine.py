"""Scheduler, trees, allocators, host pool, copies and storage together, under whatever clients and machines may do.

Nothing is scripted but what goes wrong. Every reply is checked against the cold twin when it comes, and every owner's
invariants after every rule; what is free on the device is overwritten after every step.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.core.keys import Namespace
from app.errors import LockedPageError, OutOfPagesError
from app.hicache.storage.doubles import CorruptStorage, FailingStorage
from app.hicache.storage.memory import MemoryStorage
from tests.support.engine import RuntimeSpy, check_reply
from tests.support.tiered_engine import (
    MODELS,
    FatedCopies,
    storage_fields,
    tiered_site,
    with_copies,
    with_storage,
)

# Two stems and few tokens: prompts meet one another's prefixes all the time.
STEMS = [np.random.default_rng(seed).integers(0, 256, 60).astype(np.int32) for seed in (1, 2)]

prompts = st.builds(
    lambda stem, length, end: [*STEMS[stem][:length].tolist(), *end],
    st.integers(0, 1),
    st.sampled_from([0, 9, 17, 30, 48, 60]),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
)


class TieredEngineMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from(list(MODELS)),
        policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        mode=st.sampled_from(["cache", "cache", "buffer_only"]),
        prefetch=st.sampled_from(["best_effort", "wait_complete"]),
        ratio=st.sampled_from([1e-6, 0.6, 8.0]),
        staging=st.sampled_from([None, 1e-3]),
        overlap=st.booleans(),
    )
    def open(
        self, model: str, policy: str, mode: str, prefetch: str, ratio: float, staging: float | None, overlap: bool
    ) -> None:
        self.stack = ExitStack()
        self.copies = FatedCopies()
        self.kept = MemoryStorage(20_000)  # of values, a fraction of what is asked for
        self.is_corrupt = False
        self.failing = FailingStorage(CorruptStorage(self.kept, self._damaged), num_failures=0)
        fields = storage_fields(
            hicache_write_policy=policy,
            hicache_host_mode=mode,
            hicache_storage_prefetch_policy=prefetch,
            hicache_ratio=ratio,
            hicache_staging_size=staging,
            hicache_copy_deadline=0.05,
            disable_overlap=not overlap,
            max_total_tokens=128,
            max_running_requests=3,
        )
        overrides = {**with_copies(self.copies), **with_storage(self.failing)}
        self.site = self.stack.enter_context(tiered_site(model, **fields, overrides=overrides))
        self.engine = self.site.engine
        self.spy = RuntimeSpy(self.engine.runtime)

    def _damaged(self, value: bytes) -> bytes:
        return value[:-1] + bytes([value[-1] ^ 1]) if self.is_corrupt else value

    def teardown(self) -> None:
        if hasattr(self, "site"):
            self.copies.is_never = self.copies.is_failing = False
            self.site.finish()
            self.stack.close()
            self.kept.check_integrity()

    @rule(prompt=prompts, max_tokens=st.sampled_from([1, 3, 20]), salted=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, salted: bool) -> None:
        self.engine.add(prompt, namespace=Namespace(salt="s" if salted else None), max_tokens=max_tokens)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            answered = set(self.engine.outputs)
            self.site.step()
            for request_id in self.engine.outputs.keys() - answered:
                check_reply(self.engine.outputs[request_id], self.engine.requests[request_id])

    @rule()
    def finish(self) -> None:
        self.copies.is_never = False
        self.site.finish()

    @precondition(lambda self: self.engine.requests)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.engine.scheduler.abort(f"r{which % len(self.engine.requests)}")

    @rule(share=st.integers(1, 8))
    def evict(self, share: int) -> None:
        """Pressure from elsewhere: part of what the device has cached goes."""
        self.engine.adapter.make_room(self.engine.adapter.reachable() * share // 8)

    @rule()
    def leave_host(self) -> None:
        self.site.tiers.host.flush()

    @rule()
    def flush(self) -> None:
        try:
            self.engine.scheduler.flush_cache()
        except LockedPageError:
            assert self.engine.scheduler.ledger()["cached_protected"]

    @rule()
    def refuse_a_prepare(self) -> None:
        """Pressure that control does not see coming: the next plan is refused once."""
        if not self.spy.refusals:
            self.spy.refusals.append(OutOfPagesError(need=1, free=0))

    @rule(polls=st.sampled_from([0, 0, 2, 9]), fate=st.sampled_from(["well", "well", "never", "failing"]))
    def change_copies(self, polls: int, fate: str) -> None:
        self.copies.polls_late = polls
        self.copies.is_never, self.copies.is_failing = fate == "never", fate == "failing"

    @rule(failures=st.sampled_from([0, 1, 4]), is_corrupt=st.booleans())
    def change_storage(self, failures: int, is_corrupt: bool) -> None:
        self.failing.num_failures, self.is_corrupt = failures, is_corrupt

    @rule()
    def restart_runtime(self) -> None:
        """Both pools are new, and the trees find out; storage was closed with the runtime and is opened again."""
        if self.site.is_busy:
            return
        self.engine.runtime.close()
        self.engine.runtime.open()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()


TieredEngineMachine.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTieredEngineMachine = TieredEngineMachine.TestCase
