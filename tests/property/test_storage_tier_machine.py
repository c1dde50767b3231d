"""Any interleaving of requests, backups, evictions, plans and faults: each page is in one hand and holds its content.

Two servers share a storage; a third has other weights and shares it too. The storage may be slow, full, lose or spoil
values, or never answer.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.caches.tiers.needs import Needs
from app.config.tier_settings import TierSettings
from app.core.keys import Namespace
from app.core.transfers import PageCounts, TransferEnd
from tests.support.storage import IDENTITY
from tests.support.stored_prefixes import PAGE_SIZE, StorageSite, Stored, key_of

IDENTITIES = [IDENTITY, IDENTITY, replace(IDENTITY, weights="others")]
NAMESPACES = [Namespace(), Namespace(salt="s")]
FAILURES = [None, "late", "failed", "full", "damaged", "cancelled", "queue_full"]

sites = st.integers(0, 2)
keys = st.builds(
    key_of,
    st.lists(st.integers(0, 1), max_size=6),
    st.sampled_from(NAMESPACES),
    st.integers(0, 1),
)
requests = st.sampled_from("abcd")


class StorageTierMachine(RuleBasedStateMachine):
    @initialize(
        window=st.sampled_from([None, 1, 3, 4]),
        has_states=st.booleans(),
        host_mode=st.sampled_from(["cache", "buffer_only"]),
        policy=st.sampled_from(["best_effort", "timeout", "wait_complete"]),
        num_pages=st.integers(2, 16),
    )
    def open(self, window: int | None, has_states: bool, host_mode: str, policy: str, num_pages: int) -> None:
        needs = Needs(page_size=PAGE_SIZE, window=window, has_states=has_states)
        chosen = TierSettings(host_mode=host_mode, prefetch_policy=policy)  # type: ignore[arg-type]
        self.stored: Stored = {}
        capacity = PageCounts(num_pages, num_pages if window else 0, num_pages if has_states else 0)
        self.sites = [StorageSite(needs, self.stored, capacity, chosen, identity) for identity in IDENTITIES]

    @rule(at=sites, key=keys, first=st.integers(0, 6))
    def back_up(self, at: int, key, first: int) -> None:  # type: ignore[no-untyped-def]
        site = self.sites[at]
        if first > site.host.num_present(key):
            return
        adopted = site.host.put(key, first)
        if adopted is not None and any(adopted.counts()):
            site.tier.hosted(key, adopted)

    @rule(at=sites, request=requests, key=keys, on_device=st.integers(0, 3))
    def expect(self, at: int, request: str, key, on_device: int) -> None:  # type: ignore[no-untyped-def]
        on_device = min(on_device * PAGE_SIZE, max(key.num_tokens - 1, 0) // PAGE_SIZE * PAGE_SIZE)
        self.sites[at].tier.expect(request, key, on_device)

    @rule(at=sites, request=requests)
    def forget(self, at: int, request: str) -> None:
        self.sites[at].tier.forget(request)
        assert not self.sites[at].tier.holds_back(request)

    @rule(at=sites, grants=st.booleans())
    def plan(self, at: int, grants: bool) -> None:
        site = self.sites[at]
        was_urgent = site.tier.is_urgent
        plan = site.plan(grants=grants)
        if any((plan.cancels, plan.stores, plan.lookups, plan.fetches)):
            assert was_urgent

    @rule(at=sites)
    def refuse(self, at: int) -> None:
        self.sites[at].refuse()

    @rule(at=sites, choice=st.randoms(use_true_random=False), failure=st.sampled_from(FAILURES))
    def end(self, at: int, choice, failure: str | None) -> None:  # type: ignore[no-untyped-def]
        site = self.sites[at]
        if site.sent:
            number = choice.choice(sorted(site.sent))
            site.end(number, failure, (lambda: True) if failure is None else lambda: choice.random() < 0.5)

    @rule(at=sites, kind=st.integers(0, 2))
    def evict(self, at: int, kind: int) -> None:
        self.sites[at].host.evict_one(kind)

    @rule(choice=st.randoms(use_true_random=False))
    def lose(self, choice) -> None:  # type: ignore[no-untyped-def]
        if self.stored:
            del self.stored[choice.choice(sorted(self.stored))]

    @rule(at=sites)
    def attach_again(self, at: int) -> None:
        self.sites[at].tier.attach(IDENTITIES[at].seed)

    @rule(at=sites)
    def detach(self, at: int) -> None:
        tier = self.sites[at].tier
        tier.detach()
        assert not any(tier.holds_back(request) for request in "abcd")

    @rule(at=sites)
    def reopen(self, at: int) -> None:
        """Everything on the host is gone; ends of what was sent come all the same."""
        site = self.sites[at]
        sent = list(site.sent)
        site.reopen()
        assert not any(site.tier.ended(TransferEnd(number=number)) for number in sent)

    @rule(at=sites, seconds=st.floats(0, 3))
    def wait(self, at: int, seconds: float) -> None:
        self.sites[at].now += seconds

    @rule(at=sites)
    def settle(self, at: int) -> None:
        """Without faults everything ends, and nobody waits."""
        site = self.sites[at]
        site.settle()
        assert not any(site.tier.holds_back(request) for request in "abcd")
        assert not site.host.locks
        assert not any(ids.size for ids in site.tier.in_flight_ids())

    @invariant()
    def every_page_is_in_one_hand(self) -> None:
        for site in self.sites:
            site.check()

    def teardown(self) -> None:
        for at in range(len(getattr(self, "sites", []))):
            self.settle(at)


StorageTierMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_storage_tier_keeps_every_page_in_one_hand = StorageTierMachine.TestCase
