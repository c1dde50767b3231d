"""One prefix on its way from storage to the host, and who waits for it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.caches.base import NO_PAGES
from app.caches.tiers.needs import Needs
from app.caches.tiers.span import Span
from app.core.keys import RadixKey
from app.core.transfers import NO_IDS, OfEachPool, PageIds, PageKeys

NO_KEYS = PageKeys()
Flags = OfEachPool[np.ndarray]
"""Of consecutive page indexes, (n,) bool for each pool; empty for pools that the model lacks."""


@dataclass(slots=True, eq=False)
class Wish:
    """A waiting request's: that all of its prefix comes that storage has. `hashes`: of each whole page of its key.

    num_pages: what of it the device or the host had. prefetch: what it waits for, if anything.
    """

    key: RadixKey
    hashes: Sequence[bytes]
    num_pages: int
    since: float
    held_until: float
    prefetch: Prefetch | None = None
    fetched_tokens: int = 0
    num_lookups: int = 0


class Stage(enum.Enum):
    TO_LOOK_UP = "to look up"
    LOOKING_UP = "looking up"
    TO_FETCH = "to fetch"
    FETCHING = "fetching"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Prefetch:
    """Of a key whose pages have `hashes`, those from page index `first` on, which moves on as pieces arrive.

    useful: the prefix is wanted if it gets longer than so many pages.
    looked_from, found: once it was looked up, what storage has of page indexes looked_from, looked_from + 1, ...
    number, asked: of the transfer that is drafted or under way.
    begin, target, ids, receipt: a fetch under way is of page indexes begin .. target - 1, into `ids`, behind the host
        pages that `receipt` locks.
    """

    key: RadixKey
    hashes: Sequence[bytes]
    first: int
    useful: int
    epoch: int
    wishes: list[Wish] = field(default_factory=list)
    stage: Stage = Stage.TO_LOOK_UP
    looked_from: int = 0
    found: Flags | None = None
    number: int = -1
    asked: PageKeys = NO_KEYS
    begin: int = 0
    target: int = 0
    ids: PageIds = NO_IDS
    receipt: Any = None

    @property
    def missing(self) -> bytes:
        """The hash of its first page."""
        return self.hashes[self.first]

    @property
    def end(self) -> int:
        return len(self.hashes)

    @property
    def is_wanted(self) -> bool:
        return bool(self.wishes)

    # -- keys and answers

    def ask_for_any(self, needs: Needs) -> None:
        """`asked` is what may make any longer prefix usable."""
        self.asked = self._keys(needs, self.first + 1, self.end, self.hashes[self.first :])

    def ask_for(self, needs: Needs, begin: int, target: int) -> None:
        """`asked` is what takes a usable prefix of `begin` pages to one of `target`."""
        self.begin, self.target = begin, target
        self.asked = self._keys(needs, target, target, self.hashes[begin:target])

    def learn(self, needs: Needs, answers: Flags) -> None:
        """To the keys of `ask_for_any`."""
        self.looked_from = self.first
        self.found = _by_index(needs, answers, self.end - self.first)

    def found_ends(self, needs: Needs, have: int) -> np.ndarray:
        """(n,) ascending: lengths of prefixes that storage could bring and that are wanted, in pages.

        A usable prefix of `have` >= looked_from pages is on the host.
        """
        if self.found is None or have >= self.end:
            return NO_PAGES
        ends = _usable_ends(needs, have, OfEachPool(*(flags[have - self.looked_from :] for flags in self.found)))
        return ends[ends > self.useful]

    def arrived_end(self, needs: Needs, answers: Flags) -> int:
        """To the keys of `ask_for`: the length of the longest prefix that can be used with what arrived."""
        ends = _usable_ends(needs, self.begin, _by_index(needs, answers, self.target - self.begin))
        return int(ends[-1]) if ends.size else self.begin

    def take_span(self, needs: Needs) -> Span:
        """The host pages of the fetch that is over; they are the caller's now."""
        ids, self.ids = self.ids, NO_IDS
        spread = _by_index(needs, OfEachPool(*ids), self.target - self.begin)
        return Span(self.begin, *spread)

    # -- who waits

    def num_shared(self, wish: Wish) -> int:
        """Pages with which both begin. O(log pages): a hash stands for all before it too."""
        low, high = 0, min(len(wish.hashes), len(self.hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if wish.hashes[middle - 1] == self.hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def answers(self, wish: Wish) -> bool:
        """Whether another lookup would tell nothing new about the wish."""
        if self.found is None:
            return False
        shared = self.num_shared(wish)
        return shared == len(wish.hashes) or not self.found.pages[: max(shared - self.looked_from, 0)].all()

    def _keys(self, needs: Needs, shortest: int, longest: int, hashes: Sequence[bytes]) -> PageKeys:
        """hashes: of the pages before `longest` that are asked for."""
        begin = longest - len(hashes)
        windows = hashes[max(needs.first_window_page(shortest) - begin, 0) :] if needs.window is not None else ()
        snapshots = hashes[shortest - 1 - begin :] if needs.has_states else ()
        return PageKeys(tuple(hashes), tuple(windows), tuple(snapshots))


def _by_index(needs: Needs, values: OfEachPool[np.ndarray], size: int) -> OfEachPool[np.ndarray]:
    """By page index what was asked for in the order of keys, which are of the last pages in each pool."""
    windows = _at_end(values.window_pages, size) if needs.window is not None else values.window_pages
    states = _at_end(values.states, size) if needs.has_states else values.states
    return OfEachPool(values.pages, windows, states)


def _at_end(values: np.ndarray, size: int) -> np.ndarray:
    spread = np.zeros(size, values.dtype)
    spread[size - values.size :] = values
    return spread


def _usable_ends(needs: Needs, have: int, there: Flags) -> np.ndarray:
    """(n,) ascending: lengths of usable prefixes, if `there` lies behind a usable prefix of `have` pages."""
    back = min(needs.first_window_page(have + 1), have)
    parts = [np.concatenate([np.ones(have - back, bool), flags]) if flags.size else flags for flags in there]
    holes = np.flatnonzero(~parts[0])
    span = Span(back, *parts)
    return needs.usable_ends(span.head(int(holes[0])) if holes.size else span, have)
