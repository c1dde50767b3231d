"""A cache with a host tier against what must be true of contents: whatever a match or the host has holds what its key
says, however transfers end; every page of both tiers is in one hand after every step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from app.config.model_config import Component
from app.config.tier_settings import TierSettings
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey
from app.core.transfers import Backup, Restore
from app.errors import LockedPageError
from tests.support.tier_runtime import AT_ONCE, Fate, TierRig
from tests.support.tree_model import key_of

PAGE_SIZE = 2
FULL, SWA, RECURRENT = Component

namespaces = st.sampled_from([DEFAULT_NAMESPACE, Namespace(salt="")])

# Few different pages, so that prefixes come back; a last token makes all of them match.
token_lists = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=6).map(
    lambda pages: [token for page in pages for token in (page, page)] + [7]
)
fates = st.sampled_from(
    [AT_ONCE, AT_ONCE, Fate(1), Fate(3), Fate(None), Fate(0, "failed"), Fate(2, "late"), Fate(refused=True)]
)


class TierMachine(RuleBasedStateMachine):
    components: frozenset[Component] = frozenset()

    @initialize(
        policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        mode=st.sampled_from(["cache", "buffer_only"]),
        window=st.sampled_from([1, 2, 3, 4, 7]),
        num_pages=st.integers(6, 9),
        num_host_pages=st.integers(3, 24),
        staging_bytes=st.sampled_from([20, 60, 1 << 20]),
    )
    def start(
        self, policy: Any, mode: Any, window: int, num_pages: int, num_host_pages: int, staging_bytes: int
    ) -> None:
        self.fates: deque[Fate] = deque()
        self.keys: dict[tuple[bytes, Namespace], RadixKey] = {}
        self.waiting: dict[str, RadixKey] = {}
        self.num_requests = 0
        self.staging_bytes = staging_bytes
        self.rig = TierRig(
            components=self.components,
            window=window,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            staging_bytes=staging_bytes,
            settings=TierSettings(write_policy=policy, host_mode=mode),
            fate=self.next_fate,
        )

    def next_fate(self, intent: Backup | Restore) -> Fate:
        fate = self.fates.popleft() if self.fates else AT_ONCE
        return Fate(fate.plans, fate.failure) if isinstance(intent, Restore) else fate

    def key(self, tokens: list[int], namespace: Namespace) -> RadixKey:
        key = key_of(tokens, namespace)
        self.keys[key.raw, namespace] = key
        return key

    @rule(chosen=st.lists(fates, min_size=1, max_size=4))
    def transfers_will_end_so(self, chosen: list[Fate]) -> None:
        self.fates.extend(chosen)

    @rule(tokens=token_lists, namespace=namespaces)
    def serve(self, tokens: list[int], namespace: Namespace) -> None:
        """A request that waits for what comes for it, be it that copies end only when the device is asked again."""
        self.num_requests += 1
        request_id, key, rig = str(self.num_requests), self.key(tokens, namespace), self.rig
        rig.tiers.expect(request_id, key)
        for _ in range(20):
            if rig.tiers.holds_back(request_id):
                rig.step()
                continue
            if not rig.begin_restore(request_id, key, rig.cache.match(key)):
                break
        else:
            rig.end_all()
        rig.tiers.forget(request_id)
        found = rig.cache.match(key)
        rig.check_match(key, found)
        rig.compute(key, found)

    @rule(tokens=token_lists, namespace=namespaces)
    def compute(self, tokens: list[int], namespace: Namespace) -> None:
        """A request that does not wait for anything."""
        key = self.key(tokens, namespace)
        found = self.rig.cache.match(key)
        self.rig.check_match(key, found)
        self.rig.compute(key, found)

    @rule(tokens=token_lists, namespace=namespaces)
    def wait(self, tokens: list[int], namespace: Namespace) -> None:
        self.num_requests += 1
        request_id = str(self.num_requests)
        self.waiting[request_id] = self.key(tokens, namespace)
        self.rig.tiers.expect(request_id, self.waiting[request_id])

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """A request that waits looks whether it may start, and is served if nothing is to come."""
        if not self.waiting:
            return
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        key, rig = self.waiting[request_id], self.rig
        if rig.tiers.holds_back(request_id):
            return
        found = rig.cache.match(key)
        rig.check_match(key, found)
        if rig.begin_restore(request_id, key, found):
            assert rig.tiers.holds_back(request_id)
            return
        del self.waiting[request_id]
        rig.tiers.forget(request_id)
        rig.compute(key, found)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.waiting:
            request_id = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[request_id]
            self.rig.tiers.forget(request_id)
            assert self.rig.tiers.restored_tokens(request_id).host % PAGE_SIZE == 0

    @rule()
    def step(self) -> None:
        self.rig.step()

    @rule()
    def all_land(self) -> None:
        self.rig.end_all()

    @rule()
    def all_fail(self) -> None:
        self.rig.end_all("failed")

    @rule(num_pages=st.integers(1, 9))
    def evict(self, num_pages: int) -> None:
        self.rig.cache.evict(num_pages)

    @rule(num_pages=st.integers(1, 5))
    def evict_window(self, num_pages: int) -> None:
        self.rig.cache.evict_window(num_pages)

    @rule(num_states=st.integers(1, 3))
    def evict_states(self, num_states: int) -> None:
        self.rig.cache.evict_states(num_states)

    @rule(tokens=token_lists, namespace=namespaces)
    def match(self, tokens: list[int], namespace: Namespace) -> None:
        key = self.key(tokens, namespace)
        self.rig.check_match(key, self.rig.cache.match(key))

    @rule(chance=st.integers(0, 3))
    def flush(self, chance: int) -> None:
        if chance:
            return
        try:
            self.rig.cache.flush()
        except LockedPageError:
            assert self.rig.tiers.in_flight_ids().pages.size or self.rig.tiers.is_urgent

    @rule(chance=st.integers(0, 7))
    def lose(self, chance: int) -> None:
        """The device pool, or with the runtime all pools."""
        if chance == 0:
            self.rig.lose_device()
        if chance == 1:
            self.rig.reopen()

    @invariant()
    def every_page_is_in_one_hand(self) -> None:
        self.rig.check()

    @invariant()
    def host_pages_hold_what_their_keys_say(self) -> None:
        self.rig.check_host(list(self.keys.values()))

    @invariant()
    def backups_under_way_are_bounded(self) -> None:
        counters = self.rig.tiers.counters()
        if counters.restores_in_flight == 0:
            assert counters.bytes_in_flight <= max(self.staging_bytes, 0) or self.rig.tiers.is_urgent

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.fates.clear()
        self.rig.end_all()
        self.rig.drain()
        self.rig.check()
        self.rig.cache.flush()
        self.rig.drain()
        self.rig.check()
        free = [pool.port.available() == pool.capacity for pool in self.rig.host.allocators]
        assert all(free), "the host keeps something that nobody holds"


def _machine(*components: Component) -> type[RuleBasedStateMachine]:
    name = "+".join(component.value for component in components)
    return type(name, (TierMachine,), {"components": frozenset(components)})


@pytest.mark.parametrize(
    "components",
    [(FULL,), (FULL, SWA), (FULL, RECURRENT), (FULL, SWA, RECURRENT)],
    ids=lambda components: "+".join(component.value for component in components),
)
def test_pages_hold_what_their_keys_say_in_both_tiers(components: tuple[Component, ...]) -> None:
    run_state_machine_as_test(
        _machine(*components), settings=settings(max_examples=50, stateful_step_count=60, deadline=None)
    )
