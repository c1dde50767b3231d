"""A host tier and a storage of dictionaries, for tests of the control of the storage tier.

What a page contains is the hash of everything up to its end, so that a page in the wrong place is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.caches.tiers.needs import Needs
from app.caches.tiers.span import Span
from app.caches.tiers.storage_tier import StorageIntents, StorageTier
from app.config.tier_settings import TierSettings
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, StorageIdentity
from app.core.transfers import OfEachPool, PageCounts, PageIds, PageKeys, TransferEnd
from tests.support.storage import IDENTITY

PAGE_SIZE = 2
KINDS = range(3)
Prefix = tuple[Namespace, bytes]


def key_of(pages: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE, rest: int = 1) -> RadixKey:
    """A key of these pages and `rest` tokens more."""
    tokens = [2 * page + half for page in pages for half in (0, 1)] + [7] * rest
    return RadixKey.of(np.array(tokens, np.int32), namespace)


def prefix(key: RadixKey, num_pages: int) -> Prefix:
    return key.namespace, key.raw[: num_pages * PAGE_SIZE * 4]


class DictHost:
    """HostPages over dictionaries: of each pool, the page that a prefix ends with, by prefix."""

    page_size = PAGE_SIZE

    def __init__(self, needs: Needs, capacity: PageCounts) -> None:
        self.needs = needs
        self.capacity = capacity
        self._numbers = itertools.count()
        self.clear()

    def clear(self) -> None:
        self.content: dict[tuple[int, int], Prefix] = {}  # (kind, id): what was written there
        self.kept: OfEachPool[dict[Prefix, int]] = OfEachPool({}, {}, {})
        self.unused = [list(range(1, count + 1)) for count in self.capacity]
        self.locks: dict[int, set[Prefix]] = {}
        self._promised = PageCounts()

    # -- as HostPages has it

    def probe(self, key: RadixKey) -> int:
        return self._usable(key, (key.num_tokens - 1) // PAGE_SIZE) * PAGE_SIZE

    def num_present(self, key: RadixKey) -> int:
        count = 0
        while (count + 1) * PAGE_SIZE <= key.num_tokens and prefix(key, count + 1) in self.kept.pages:
            count += 1
        return count

    def span(self, key: RadixKey, first: int) -> Span:
        ends = range(first + 1, self.num_present(key) + 1)
        ids = [np.array([of_kind.get(prefix(key, end), 0) for end in ends], np.int32) for of_kind in self.kept]
        return Span(
            first, ids[0], ids[1] if self.needs.window else ids[1][:0], ids[2] if self.needs.has_states else ids[2][:0]
        )

    def lock(self, key: RadixKey) -> tuple[int, int]:
        count = self._usable(key, key.num_tokens // PAGE_SIZE)
        number = next(self._numbers)
        self.locks[number] = {prefix(key, end) for end in range(1, count + 1)}
        return count, number

    def unlock(self, receipt: int) -> None:
        del self.locks[receipt]

    def insert(self, key: RadixKey, span: Span) -> Span:
        adopted = [np.zeros_like(ids) for ids in span[1:]]
        is_parentless = self.num_present(key) < span.first
        for kind, ids in enumerate(span[1:]):
            for index, held in enumerate(ids.tolist()):
                place = prefix(key, span.first + index + 1)
                if held and (is_parentless or place in self.kept[kind]):
                    self._free(kind, held)
                elif held:
                    self.kept[kind][place] = held
                    adopted[kind][index] = held
        return Span(span.first, *adopted)

    def free(self, ids: PageIds) -> None:
        for kind, of_kind in enumerate(ids):
            for held in of_kind.tolist():
                self._free(kind, held)

    def reachable(self) -> PageCounts:
        locked = set().union(*self.locks.values())
        free = [len(self.unused[kind]) + len(self.kept[kind].keys() - locked) for kind in KINDS]
        return PageCounts(*(count - promised for count, promised in zip(free, self._promised, strict=True)))

    def make_room(self, counts: PageCounts) -> bool:
        if any(need > most for need, most in zip(counts, self.reachable(), strict=True)):
            return False
        self._promised = PageCounts(*map(sum, zip(counts, self._promised, strict=True)))
        for kind in KINDS:
            while len(self.unused[kind]) < self._promised[kind]:
                assert self.evict_one(kind)
        return True

    def drop(self, key: RadixKey) -> None:
        locked = set().union(*self.locks.values())
        for count in range(self.num_present(key), 0, -1):
            place = prefix(key, count)
            if place in locked or self._has_longer(place):
                return
            self._remove(place)

    # -- what others do with it

    def end_plan(self) -> None:
        self._promised = PageCounts()

    def take(self, counts: PageCounts) -> PageIds | None:
        """As the runtime allocates: all or nothing."""
        if any(need > len(free) for need, free in zip(counts, self.unused, strict=True)):
            return None
        return PageIds(
            *(
                np.array([free.pop() for _ in range(need)], np.int32)
                for need, free in zip(counts, self.unused, strict=True)
            )
        )

    def write(self, kind: int, held: int, content: Prefix) -> None:
        self.content[kind, held] = content

    def put(self, key: RadixKey, first: int = 0, *, windows: bool = True, states: bool = True) -> Span | None:
        """A backup of the key's pages from `first` on has landed. -> what was adopted; None without room."""
        ends = range(first + 1, key.num_tokens // PAGE_SIZE + 1)
        has_windows = windows and self.needs.window is not None
        has_states = states and self.needs.has_states
        counts = PageCounts(len(ends), len(ends) if has_windows else 0, len(ends) if has_states else 0)
        ids = self.take(counts)
        if ids is None:
            return None
        for kind, of_kind in enumerate(ids):
            for end, held in zip(ends, of_kind.tolist(), strict=False):
                self.write(kind, held, prefix(key, end))
        none = np.zeros(len(ends), np.int32)
        window_ids = ids.window_pages if has_windows else none if self.needs.window else none[:0]
        state_ids = ids.states if has_states else none if self.needs.has_states else none[:0]
        return self.insert(key, Span(first, ids.pages, window_ids, state_ids))

    def evict_one(self, kind: int) -> bool:
        """The first that may go: of full pages a leaf, with all that it has."""
        locked = set().union(*self.locks.values())
        for place in self.kept[kind]:
            if place in locked:
                continue
            if kind == 0 and not self._has_longer(place):
                self._remove(place)
                return True
            if kind:
                self._free(kind, self.kept[kind].pop(place))
                return True
        return False

    def evict_all(self) -> None:
        while self.evict_one(0):
            pass

    def check(self, in_flight: PageIds) -> None:
        """Each page is in one hand, each contains what its place says, and prefixes are chained from the root."""
        for kind in KINDS:
            kept = list(self.kept[kind].values())
            ids = sorted([*self.unused[kind], *kept, *in_flight[kind].tolist()])
            assert ids == list(range(1, self.capacity[kind] + 1)), (kind, ids)
            for place, held in self.kept[kind].items():
                assert self.content[kind, held] == place
        for namespace, raw in self.kept.pages:
            above = raw[: -PAGE_SIZE * 4]
            assert not above or (namespace, above) in self.kept.pages

    def _usable(self, key: RadixKey, most: int) -> int:
        for count in range(min(most, self.num_present(key)), 0, -1):
            windows = range(self.needs.first_window_page(count) + 1, count + 1)
            if any(prefix(key, end) not in self.kept.window_pages for end in windows):
                continue
            if self.needs.has_states and prefix(key, count) not in self.kept.states:
                continue
            return count
        return 0

    def _has_longer(self, place: Prefix) -> bool:
        namespace, raw = place
        return any(
            each[0] == namespace and len(each[1]) > len(raw) and each[1].startswith(raw) for each in self.kept.pages
        )

    def _remove(self, place: Prefix) -> None:
        for kind in KINDS:
            held = self.kept[kind].pop(place, 0)
            if held:
                self._free(kind, held)

    def _free(self, kind: int, held: int) -> None:
        assert held not in self.unused[kind]
        self.content.pop((kind, held), None)
        self.unused[kind].append(held)


_ROOMY = PageCounts(64, 64, 64)
_SETTINGS = TierSettings()

Stored = dict[tuple[int, bytes], tuple[StorageIdentity, Prefix]]
"""What a storage has: contents by (kind, key), and whose they are."""


@dataclass
class StorageSite:
    """A storage tier over a DictHost, the runtime below it, and a storage that may be shared by several sites.

    sent: transfers that have not ended, by number: what they end with when nothing goes wrong.
    """

    needs: Needs
    stored: Stored
    capacity: PageCounts = _ROOMY
    settings: TierSettings = _SETTINGS
    identity: StorageIdentity = IDENTITY
    now: float = 0.0
    sent: dict[int, Callable[[str | None, Callable[[], bool]], TransferEnd]] = field(default_factory=dict)
    plans: list[StorageIntents] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = DictHost(self.needs, self.capacity)
        self.tier = StorageTier(
            host=self.host,
            needs=self.needs,
            seed=self.identity.seed,
            settings=self.settings,
            numbers=itertools.count(),
            clock=lambda: self.now,
        )

    def backed_up(self, key: RadixKey, first: int = 0) -> None:
        adopted = self.host.put(key, first)
        assert adopted is not None
        self.tier.hosted(key, adopted)

    def plan(self, *, grants: bool = True) -> StorageIntents:
        """One plan is drafted and prepared; `grants`: fetches get host pages."""
        intents = self.tier.draft()
        given = tuple(self.host.take(_counts(fetch.keys)) if grants else None for fetch in intents.fetches)
        self.host.end_plan()
        for store in intents.stores:
            contents = [
                [self.host.content[kind, held] for held in of_kind.tolist()]
                for kind, of_kind in enumerate(store.source)
            ]
            self.sent[store.number] = self._storing(store.number, store.keys, contents)
        for lookup in intents.lookups:
            self.sent[lookup.number] = self._looking(lookup.number, lookup.keys)
        for fetch, ids in zip(intents.fetches, given, strict=True):
            if ids is not None:
                self.sent[fetch.number] = self._fetching(fetch.number, fetch.keys, ids)
        self.tier.prepared(given)
        self.plans.append(intents)
        return intents

    def refuse(self) -> StorageIntents:
        intents = self.tier.draft()
        self.host.end_plan()
        self.tier.refused()
        return intents

    def end(self, number: int, failure: str | None = None, works: Callable[[], bool] = lambda: True) -> None:
        """The transfer ends. works: asked for each key, whether the storage did what it was asked for."""
        assert self.tier.ended(self.sent.pop(number)(failure, works))

    def end_all(self) -> None:
        for number in list(self.sent):
            self.end(number)

    def settle(self) -> None:
        """Plans until nothing is left to do."""
        while self.tier.num_under_way or self.tier.is_urgent:
            self.plan()
            self.end_all()

    def reopen(self) -> None:
        """The host pool is a new one. Nothing below knows of what was sent."""
        self.tier.reset()
        self.host.clear()
        self.sent.clear()

    def check(self) -> None:
        self.tier.check_integrity()
        self.host.check(self.tier.in_flight_ids())

    def _storing(
        self, number: int, keys: PageKeys, contents: Sequence[Sequence[Prefix]]
    ) -> Callable[[str | None, Callable[[], bool]], TransferEnd]:
        def end(failure: str | None, works: Callable[[], bool]) -> TransferEnd:
            done: list[np.ndarray] = []
            for kind, of_kind in enumerate(keys):
                flags = np.array([works() for _ in of_kind], bool)
                for key, content, flag in zip(of_kind, contents[kind], flags, strict=True):
                    if flag:
                        self.stored[kind, key] = self.identity, content
                done.append(flags)
            return TransferEnd(number=number, failure=failure, arrived=OfEachPool(*done))

        return end

    def _looking(self, number: int, keys: PageKeys) -> Callable[[str | None, Callable[[], bool]], TransferEnd]:
        def end(failure: str | None, works: Callable[[], bool]) -> TransferEnd:
            found = [
                np.array([(kind, key) in self.stored and works() for key in of_kind], bool)
                for kind, of_kind in enumerate(keys)
            ]
            return TransferEnd(number=number, failure=failure, arrived=OfEachPool(*found))

        return end

    def _fetching(
        self, number: int, keys: PageKeys, ids: PageIds
    ) -> Callable[[str | None, Callable[[], bool]], TransferEnd]:
        def end(failure: str | None, works: Callable[[], bool]) -> TransferEnd:
            arrived: list[np.ndarray] = []
            for kind, of_kind in enumerate(keys):
                flags = np.array([(kind, key) in self.stored and works() for key in of_kind], bool)
                for key, held, flag in zip(of_kind, ids[kind].tolist(), flags, strict=True):
                    if flag:
                        writer, content = self.stored[kind, key]
                        assert writer == self.identity
                        self.host.write(kind, held, content)
                arrived.append(flags)
            missed = any(not flags.all() for flags in arrived)
            return TransferEnd(
                number=number, failure=failure or ("absent" if missed else None), arrived=OfEachPool(*arrived)
            )

        return end


def _counts(keys: PageKeys) -> PageCounts:
    return PageCounts(*map(len, keys))
