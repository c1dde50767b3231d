"""Plans with transfers over three tiers, against what each page of each tier should hold, step by step."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.core.batch import BatchCompletion, PreparedBatch
from app.core.transfers import NO_IDS, Fetch, PageIds, PageKeys, Store, TransferEnd, TransferPlan
from app.errors import OutOfPagesError
from app.tpu.cpu_fake import POISON
from app.tpu.page_carrier import PoolContents
from app.tpu.slow_copies import SlowCopies
from app.tpu.tier_copies import TierCopies, TierCopy
from tests.support.runtime import ints
from tests.support.tier_rig import PAGE_SIZE, LandedCopies, TierRig, opened_tiers

HOST_PAGES, DEVICE_PAGES, DEADLINE_S = 7, 10, 5.0

Values = list[list[int]]  # of the pages of each kind
Held = list[dict[int, int]]  # of each kind, page -> value

fates = st.sampled_from(["well", "well", "late", "never", "fail"])
small = st.integers(0, 2)


class FatedCopies:
    """The next copy that is begun goes as the test says; a copy that goes well is over at once."""

    def __init__(self, copies: TierCopies) -> None:
        self._copies = LandedCopies(copies)
        self.fate = "well"

    def to_host(self, contents: PoolContents) -> TierCopy:
        return self._next().to_host(contents)

    def to_device(self, contents: PoolContents) -> TierCopy:
        return self._next().to_device(contents)

    def _next(self) -> SlowCopies:
        fate, self.fate = self.fate, "well"
        late = {0: 3} if fate == "late" else {}
        return SlowCopies(self._copies, late=late, never=[0] * (fate == "never"), fail=[0] * (fate == "fail"))


@dataclass
class Prepared:
    """A batch that waits for its turn; what its restores and its store read was read when it was prepared."""

    batch: PreparedBatch
    plan: TransferPlan
    restored: list[Values]
    stored: list[Values]


class TransferMachine(RuleBasedStateMachine):
    """content: what is in every device page that was ever written. device: pages that control holds.

    host: pages that control holds and what is in them, None for what may not be read.
    backups, restores, fetches: under way, the pages they write and what will be in them.
    """

    is_hybrid = False

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.now = 0.0

    @initialize(staging_pages=st.integers(1, 6))
    def start(self, staging_pages: int) -> None:
        sizes: dict[str, Any] = {"max_recurrent_snapshots": DEVICE_PAGES} if self.is_hybrid else {}
        self.rig: TierRig = self.stack.enter_context(
            opened_tiers(
                host_pages=HOST_PAGES,
                staging_pages=staging_pages,
                deadline_s=DEADLINE_S,
                hybrid_model=self.is_hybrid,
                copies=self._fated,
                clock=lambda: self.now,
                broken_scatters=0,
                max_total_tokens=DEVICE_PAGES * PAGE_SIZE,
                **sizes,
            )
        )
        self.staging_bytes = staging_pages * max(each.page_bytes for each in self.rig.carriers if each is not None)
        self.kinds = [kind for kind, each in enumerate(self.rig.carriers) if each is not None]
        self.values = itertools.count(1)
        self.content: Held = [{}, {}, {}]
        self.device: list[set[int]] = [set(), set(), set()]
        self.host: list[dict[int, int | None]] = [{}, {}, {}]
        self.storage: list[dict[bytes, int]] = [{}, {}, {}]
        self.backups: dict[int, tuple[PageIds, Values]] = {}
        self.restores: dict[int, tuple[PageIds, Values]] = {}
        self.stores: set[int] = set()
        self.fetches: dict[int, tuple[PageIds, PageKeys]] = {}
        self.fetched: dict[int, list[list[int | None]]] = {}
        self.prepared: list[Prepared] = []
        self.unread: list[Any] = []
        self.identity = self.rig.runtime.identity
        self.compute((4, 4, 4))

    def _fated(self, copies: TierCopies) -> TierCopies:
        self.copies = FatedCopies(copies)
        return self.copies

    def teardown(self) -> None:
        try:
            if "rig" in vars(self):
                self.everything_ends()
        finally:
            self.stack.close()

    # -- what control decides ----------------------------------------------------------------------------------------

    def compute(self, counts: tuple[int, ...]) -> None:
        """Pages with content of their own, as steps leave them."""
        wanted = [
            0 if each is None else min(count, each.num_free)
            for count, each in zip(counts, self.rig.device_allocators, strict=True)
        ]
        for kind, pages in enumerate(self.rig.allocate(*wanted)):
            for page in pages.tolist():
                self.device[kind].add(page)
                self._write(kind, page, next(self.values))

    def write(self, data: st.DataObject) -> None:
        """A step writes into a page: a copy that was gathered before does not see it."""
        for kind, pages in enumerate(self._some(data, self.device)):
            for page in pages.tolist():
                self._write(kind, page, next(self.values))

    @rule(data=st.data(), fate=fates, is_read=st.booleans())
    @precondition(lambda self: not self.prepared and len(self.unread) < 2)
    def move(self, data: st.DataObject, fate: str, is_read: bool) -> None:
        """A plan from beginning to end, or up to where it runs."""
        self.prepare(data, fate)
        if self.prepared:
            self.execute()
        while is_read and self.unread:
            self.read()

    @rule(data=st.data(), fate=fates)
    @precondition(lambda self: len(self.prepared) < 2)
    def prepare(self, data: st.DataObject, fate: str) -> None:
        """A plan of everything. It may free what its own backups, restores and stores read."""
        self.compute(tuple(max(0, 3 - len(pages)) for pages in self.device))
        self.happen(data)
        self.copies.fate = fate
        readable: list[set[int]] = [{page for page, value in held.items() if value is not None} for held in self.host]
        backups = tuple(map(self.rig.backup, self._sources(data, self.device)))
        restores = tuple(map(self.rig.restore, self._sources(data, readable)))
        stores = tuple(map(self._store, self._sources(data, readable)[:1]))
        fetches = tuple(self._fetch(data) for _ in range(data.draw(st.integers(0, 1))))
        cancels = tuple(number for number in self.fetches if data.draw(st.booleans()))
        restored = [self._host_values(each.source) for each in restores]
        stored = [self._host_values(each.source) for each in stores]
        self._free(data)
        available = [0 if each is None else each.port.available() for each in self.rig.device_allocators]
        plan = self.rig.plan(backups=backups, restores=restores, stores=stores, fetches=fetches, cancels=cancels)

        need = np.sum([(0, 0, 0), *[each.source.counts() for each in restores]], axis=0)
        if (need > available).any():
            with pytest.raises(OutOfPagesError):
                self.rig.runtime.prepare_batch(plan)
            return
        batch = self.rig.runtime.prepare_batch(plan)
        self.prepared.append(Prepared(batch, plan.transfers, restored, stored))
        for backup, target in zip(backups, batch.transfers.backups, strict=True):
            if target is not None:
                self.backups[backup.number] = target, []
        for restore, goal, values in zip(restores, batch.transfers.restores, restored, strict=True):
            self.restores[restore.number] = goal, values
        self.stores |= {store.number for store in stores}
        for fetch, target in zip(fetches, batch.transfers.fetches, strict=True):
            if target is not None:
                self.fetches[fetch.number] = target, fetch.keys

    @rule()
    @precondition(lambda self: self.prepared and len(self.unread) < 2)
    def execute(self) -> None:
        """Its backups read what is in the device's pages now."""
        waiting = self.prepared.pop(0)
        for backup in waiting.plan.backups:
            if backup.number in self.backups:
                target, _ = self.backups[backup.number]
                self.backups[backup.number] = target, self._device_values(backup.source)
        for store, values in zip(waiting.plan.stores, waiting.stored, strict=True):
            for kept, keys, of_kind in zip(self.storage, store.keys, values, strict=True):
                kept.update(zip(keys, of_kind, strict=True))
        for fetch in waiting.plan.fetches:
            self.fetched[fetch.number] = [
                [kept.get(key) for key in keys] for kept, keys in zip(self.storage, fetch.keys, strict=True)
            ]
        self.unread.append(self.rig.runtime.execute_batch(waiting.batch))
        if self.rig.runtime.identity != self.identity:
            self._read_all()

    @rule()
    @precondition(lambda self: self.prepared)
    def discard(self) -> None:
        waiting = self.prepared.pop()
        self.rig.runtime.discard_batch(waiting.batch)
        for number in waiting.plan.numbers():
            for under_way in (self.backups, self.restores, self.fetches):
                under_way.pop(number, None)
            self.stores.discard(number)

    @rule()
    @precondition(lambda self: self.unread)
    def read(self) -> None:
        self._take(self.unread.pop(0).wait())

    # -- what happens ------------------------------------------------------------------------------------------------

    def happen(self, data: st.DataObject) -> None:
        """What happens between two plans, if anything."""
        match data.draw(st.sampled_from(["nothing", "write", "poison", "hold", "answer", "time", "late", "break"])):
            case "write":
                self.write(data)
            case "poison" if not self.prepared:
                self.poison()
            case "hold":
                self.rig.lane.is_held = True
            case "answer":
                self.rig.lane.is_held = False
                self.rig.lane.release()
            case "time":
                self.now += 1.0
            case "late":
                self.now += DEADLINE_S + 1
            case "break":  # the device, when the next restore is written
                self.rig.carriers.pages.num_broken = 1

    def poison(self) -> None:
        """What is in pages that nobody holds is read by nobody."""
        for kind, each in enumerate(self.rig.device_allocators):
            for page in [] if each is None else each.free_page_ids().tolist():
                self._write(kind, page, POISON)

    def everything_ends(self) -> None:
        self.rig.lane.is_held = False
        self.rig.lane.release()
        while self.prepared or self.unread:
            while self.unread:
                self.read()
            if self.prepared:
                self.execute()
        for _ in range(2):
            for _ in range(12):
                if self.backups or self.restores or self.stores or self.fetches:
                    self._take(self.rig.run(self.rig.plan())[1])
            self.now += DEADLINE_S + 1
        assert not [*self.backups, *self.restores, *self.stores, *self.fetches]

    # -- what is true ------------------------------------------------------------------------------------------------

    @invariant()
    def every_page_holds_what_it_should(self) -> None:
        held = PageIds(*(ints(*sorted(pages)) for pages in self.device))
        assert self.rig.device_values(held) == self._device_values(held)
        recorded = self.rig.host_frees()
        for kind in self.kinds:
            filled = np.setdiff1d(self.rig.host.filled()[kind], recorded[kind])
            assert filled.tolist() == sorted(page for page, value in self.host[kind].items() if value is not None)
        readable = PageIds(*(ints(*[page for page, value in held.items() if value is not None]) for held in self.host))
        assert self.rig.host_values(readable) == self._host_values(readable)

    @invariant()
    def every_page_is_in_one_hand(self) -> None:
        self.rig.check()
        for kind in self.kinds:
            restoring = [page for target, _ in self.restores.values() for page in target[kind].tolist()]
            held = self.rig.device_allocators[kind].held_page_ids().tolist()
            assert held == sorted([*self.device[kind], *restoring])
            written = [
                page for target, _ in (*self.backups.values(), *self.fetches.values()) for page in target[kind].tolist()
            ]
            held = self.rig.host.allocators[kind].held_page_ids().tolist()
            assert held == sorted([*self.host[kind], *written])

    @invariant()
    def staging_is_bounded(self) -> None:
        counters = self.rig.tiers.counters()
        assert 0 <= counters.staging_bytes <= counters.most_staging_bytes <= self.staging_bytes

    # -- in words of the model ---------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        """A step lost the pool when it was dispatched: control reads what is in flight, and plans nothing before."""
        while self.unread:
            self._take(self.unread.pop(0).wait())
        assert self.rig.runtime.identity == self.identity

    def _take(self, completion: BatchCompletion) -> None:
        if completion.failure is not None:
            assert completion.identity == self.rig.runtime.identity != self.identity
            self.identity = completion.identity
            self.content, self.device = [{}, {}, {}], [set(), set(), set()]
            self.prepared.clear()
        self._take_ends(completion)
        if completion.failure is not None:
            assert not self.backups
            assert not self.restores
            while self.unread:  # what was dispatched behind it is lost with it
                later = self.unread.pop(0).wait()
                assert later.failure is not None
                assert later.identity == self.identity
                self._take_ends(later)

    def _take_ends(self, completion: BatchCompletion) -> None:
        self.rig.note(completion)
        for end in completion.transfers:
            if end.number in self.backups:
                target, values = self.backups.pop(end.number)
                self._arrived(target, values if end.failure is None else [])
            elif end.number in self.restores:
                self._restored(end, lost=completion.failure is not None)
            elif end.number in self.fetches:
                self._fetched(end)
            else:
                self.stores.remove(end.number)

    def _restored(self, end: TransferEnd, *, lost: bool) -> None:
        target, values = self.restores.pop(end.number)
        if lost:
            assert end.failure == "failed"
        elif end.failure is not None:
            self.rig.free_device(target)
        else:
            for kind, (pages, of_kind) in enumerate(zip(target, values, strict=True)):
                self.device[kind] |= set(pages.tolist())
                self.content[kind].update(zip(pages.tolist(), of_kind, strict=True))

    def _fetched(self, end: TransferEnd) -> None:
        target, _ = self.fetches.pop(end.number)
        if end.failure is not None:
            self._arrived(target, [])
            return
        wanted = self.fetched[end.number]
        assert end.arrived is not None
        assert [each.tolist() for each in end.arrived] == [[value is not None for value in each] for each in wanted]
        self._arrived(target, wanted)

    def _arrived(self, target: PageIds, values: Any) -> None:
        """Control holds these host pages now, empty ones too."""
        for kind, pages in enumerate(target):
            of_kind = values[kind] if values else [None] * pages.size
            self.host[kind].update(zip(pages.tolist(), of_kind, strict=True))

    def _free(self, data: st.DataObject) -> None:
        gone = gone_on_host = NO_IDS
        if data.draw(st.booleans()):
            gone = self._some(data, self.device)
        if data.draw(st.booleans()):
            gone_on_host = self._some(data, [set(held) for held in self.host])
        self.rig.free_device(gone)
        self.rig.free_host(gone_on_host)
        for held, pages in zip(self.device, gone, strict=True):
            held -= set(pages.tolist())
        for on_host, pages in zip(self.host, gone_on_host, strict=True):
            for page in pages.tolist():
                del on_host[page]

    def _store(self, source: PageIds) -> Store:
        number = next(self.rig.numbers)
        keys = PageKeys(*(tuple(f"{number}-{page}".encode() for page in pages.tolist()) for pages in source))
        return Store(number=number, keys=keys, source=source)

    def _fetch(self, data: st.DataObject) -> Fetch:
        known = [[b"nobody's", *kept] if kind in self.kinds else [] for kind, kept in enumerate(self.storage)]
        keys = PageKeys(*(tuple(self._few(data, names)) for names in known))
        return Fetch(number=next(self.rig.numbers), keys=keys, deadline_s=9.0)

    def _sources(self, data: st.DataObject, pages: list[set[int]]) -> list[PageIds]:
        sources = [self._some(data, pages) for _ in range(data.draw(st.sampled_from([1, 2, 0])))]
        return [source for source in sources if any(source.counts())]

    def _some(self, data: st.DataObject, pages: list[set[int]]) -> PageIds:
        return PageIds(*(ints(*self._few(data, sorted(of_kind))) for of_kind in pages))

    @staticmethod
    def _few(data: st.DataObject, names: list[Any]) -> list[Any]:
        return data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3)) if names else []

    def _write(self, kind: int, page: int, value: int) -> None:
        ids = [ints(), ints(), ints()]
        ids[kind] = ints(page)
        self.rig.fill(PageIds(*ids), value)
        self.content[kind][page] = value

    def _device_values(self, ids: PageIds) -> Values:
        return [[held[page] for page in pages.tolist()] for held, pages in zip(self.content, ids, strict=True)]

    def _host_values(self, ids: PageIds) -> Values:
        values = [[held[page] for page in pages.tolist()] for held, pages in zip(self.host, ids, strict=True)]
        return [[value for value in of_kind if value is not None] for of_kind in values]


@pytest.mark.parametrize("is_hybrid", [pytest.param(False, id="full pages"), pytest.param(True, id="every kind")])
def test_every_page_of_every_tier_holds_what_its_plans_say(is_hybrid: bool) -> None:
    machine = type("Machine", (TransferMachine,), {"is_hybrid": is_hybrid})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))
