"""Hundreds of conversations over a device that holds a few and a host that holds some more, with transfers that fail,
come late or never, pools that are lost, and requests that give up: contents and ledgers after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from app.config.model_config import Component
from app.config.tier_settings import TierSettings, WritePolicy
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey
from app.core.transfers import Backup, Restore
from tests.support.tier_runtime import AT_ONCE, Fate, TierRig
from tests.support.tree_model import key_of

FULL, SWA, RECURRENT = Component
SETS = [(FULL,), (FULL, SWA), (FULL, RECURRENT), (FULL, SWA, RECURRENT)]
FATES = [Fate(1), Fate(3), Fate(0, "failed"), Fate(2, "late"), Fate(None)]


class Run:
    """What a seed makes happen."""

    def __init__(self, components: tuple[Component, ...], policy: WritePolicy, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = TierRig(
            components=frozenset(components),
            window=self.random.choice([1, 3, 4, 6]),
            num_pages=14,
            num_host_pages=36,
            staging_bytes=self.random.choice([48, 200, 1 << 20]),
            settings=TierSettings(write_policy=policy, host_mode=self.random.choice(["cache", "cache", "buffer_only"])),
            fate=self.fate,
        )
        self.talks: dict[tuple[int, Namespace], list[int]] = {}
        self.waiting: dict[str, RadixKey] = {}
        self.num_requests = 0

    def fate(self, intent: Backup | Restore) -> Fate:
        if self.random.random() < 0.7:
            return AT_ONCE
        if isinstance(intent, Backup) and self.random.random() < 0.2:
            return Fate(refused=True)
        return self.random.choice(FATES)

    def prompt(self) -> RadixKey:
        """The next turn of one of a few conversations, of which some begin alike."""
        which = self.random.randrange(6), self.random.choice([DEFAULT_NAMESPACE, DEFAULT_NAMESPACE, Namespace(salt="")])
        talk = self.talks.get(which, [])
        if not 0 < len(talk) < 16:
            talk = [which[0] // 3] * 4 + [which[0]] * 2
        self.talks[which] = talk = talk + [self.random.randrange(50) for _ in range(self.random.choice([1, 2, 4]))]
        return key_of([*talk, 99], which[1])

    def arrive(self) -> None:
        self.num_requests += 1
        key = self.prompt()
        self.waiting[str(self.num_requests)] = key
        self.rig.tiers.expect(str(self.num_requests), key)

    def ask(self) -> None:
        """As a scheduler does for each plan."""
        rig = self.rig
        for request_id, key in list(self.waiting.items()):
            if rig.tiers.holds_back(request_id):
                continue
            found = rig.cache.match(key)
            rig.check_match(key, found)
            if not rig.begin_restore(request_id, key, found):
                rig.tiers.forget(request_id)
                del self.waiting[request_id]
                rig.compute(key, found)

    def give_up(self) -> None:
        for request_id in list(self.waiting)[:1]:
            self.rig.tiers.forget(request_id)
            del self.waiting[request_id]

    def lose(self) -> None:
        self.random.choice([self.rig.lose_device, self.rig.lose_device, self.rig.reopen])()

    def act(self) -> None:
        rig = self.rig
        acts: list[tuple[int, Callable[[], object]]] = [
            (40, self.arrive),
            (40, self.ask),
            (20, rig.step),
            (5, rig.end_all),
            (2, lambda: rig.end_all("failed")),
            (3, self.give_up),
            (4, lambda: rig.cache.evict(self.random.randrange(8))),
            (3, lambda: rig.cache.evict_window(self.random.randrange(4))),
            (3, lambda: rig.cache.evict_states(self.random.randrange(4))),
            (1, self.lose),
        ]
        weights, verbs = zip(*acts, strict=True)
        self.random.choices(verbs, weights)[0]()


@pytest.mark.parametrize("components", SETS, ids=lambda each: "+".join(component.value for component in each))
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_long_runs_keep_contents_and_ledgers_right(components: tuple[Component, ...], policy: WritePolicy) -> None:
    num_restored = num_backed_up = 0
    for seed in range(4):
        run = Run(components, policy, seed)
        for _ in range(250):
            run.act()
            run.rig.check()
            run.rig.check_host([key_of(talk, which[1]) for which, talk in run.talks.items()])
        run.rig.end_all()
        run.rig.fate = lambda intent: AT_ONCE
        run.rig.drain()
        counters = run.rig.tiers.counters()
        num_restored += counters.restored_tokens
        num_backed_up += counters.backed_up_tokens
        run.rig.cache.flush()
        run.rig.check()
        assert all(pool.port.available() == pool.capacity for pool in run.rig.host.allocators)
        assert all(pool.port.available() == pool.capacity for pool in run.rig.device.allocators)
    assert num_backed_up > 0
    assert num_restored > 0
