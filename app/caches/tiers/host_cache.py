"""The host tier as the rest of control sees it: prefixes, spans of host pages, room.

runtime's --- prepare --->  in flight (of a backup, a fetch)  --- insert --->  the tree's  --- evict --->  recorded
                                     `----------- free, if it failed or nobody can use it ----------->
"""

from __future__ import annotations

from operator import add, gt
from typing import NamedTuple

import numpy as np

from app.caches.base import NO_PAGES, LockReceipt
from app.caches.tiers.host_tree import HostPlace, HostTree
from app.caches.tiers.listening import num_duplicates
from app.caches.tiers.needs import Needs
from app.caches.tiers.span import Span
from app.core.handles import CacheIdentity
from app.core.keys import RadixKey
from app.core.ports import TokenAllocator
from app.core.transfers import NO_IDS, OfEachPool, PageCounts, PageIds

_NOTHING = PageCounts()


class _Allocators(NamedTuple):
    pages: TokenAllocator
    window_pages: TokenAllocator | None
    states: TokenAllocator | None


class HostCache:
    """Prefixes on the host. What a tree cannot make usable it does not keep. Single-threaded, like the cache above."""

    def __init__(self, tree: HostTree, needs: Needs) -> None:
        self.page_size = tree.page_size
        self._tree = tree
        self._needs = needs
        self._allocators = _Allocators(tree.token_allocator, tree.window_allocator, tree.state_allocator)
        self._promised = _NOTHING

    @property
    def identity(self) -> CacheIdentity:
        """Under which ids of the host pools mean what they mean: a runtime makes all of them at once."""
        return self._allocators.pages.identity

    # -- prefixes

    def probe(self, key: RadixKey) -> int:
        """Tokens of `key` that could be restored: whole pages, never all of the key. Changes nothing."""
        return self._tree.probe(key)

    def num_present(self, key: RadixKey) -> int:
        """Pages on the path of `key`, usable or not. Changes nothing."""
        return self._tree.num_present(key)

    def span(self, key: RadixKey, first: int) -> Span:
        """What is there of `key` from page index `first` on, usable or not. Changes nothing."""
        return self._tree.span(key, first)

    def lock(self, key: RadixKey) -> tuple[int, LockReceipt]:
        """Keep the longest usable prefix of `key`, as just used. -> its pages; give the receipt to `unlock`."""
        found = self._tree.refresh(key)
        return found.pages.size, self._tree.lock(found)

    def place(self, key: RadixKey) -> HostPlace:
        """Where what is there of `key`, usable or not, ends. Changes nothing."""
        return self._tree.place(key)

    def is_there(self, place: HostPlace) -> bool:
        """Whether that means something yet."""
        return self._tree.is_there(place)

    def hold(self, place: HostPlace) -> LockReceipt:
        """Keep the full pages up to there, usable or not, for what is to come after them."""
        return self._tree.hold(place)

    def unlock(self, receipt: LockReceipt) -> None:
        self._tree.unlock(receipt)

    def refresh(self, key: RadixKey, place: HostPlace) -> None:
        """What is there of `key`, up to `place`, counts as just used."""
        if not (self._needs.is_plain and self._tree.touch(place, key.priority)):
            self._tree.refresh(key)

    def spare(self, place: HostPlace, num_pages: int) -> None:
        """Of what is there the device has the first `num_pages` pages too, and no more: these are reclaimed first."""
        self._tree.spare(place, num_pages)

    def nothing_spare(self) -> None:
        """The device has lost everything."""
        self._tree.nothing_spare()

    def drop(self, key: RadixKey) -> None:
        """Let go of the unlocked end of that path, as far as no longer prefix needs it."""
        self._tree.drop(key)

    # -- pages

    def insert(self, key: RadixKey, span: Span) -> Span:
        """Host pages that the caller held become the tree's where it lacks them; all others are freed.

        All are, if the pages before them are not there; those after a gap are, and those that would make no prefix
        usable. Each snapshot is put where it was taken, each run of window pages where it ends.
        -> what the tree has of them now, from the first of them on; 0 in it for what was there already.
        """
        present = self._tree.num_present(key)
        if self._needs.is_plain and present >= span.first:
            return self.insert_after(key, span)[0]
        num_whole = span.num_pages
        if present < span.first:
            num_whole = 0
        else:
            missing = np.flatnonzero(span.tail(present).pages == 0)
            if missing.size:
                num_whole = max(present - span.first, 0) + int(missing[0])
        offered = self._without_gaps(key, span.head(num_whole))
        for end in self._ends(offered):
            self._insert_to(key, offered, end)
        adopted = _same(span.head(num_whole), self._tree.span(key.head(offered.end * self.page_size), span.first))
        self.free(span.without(adopted))
        return adopted.trimmed()

    def insert_after(self, key: RadixKey, span: Span) -> tuple[Span, HostPlace]:
        """The same, where the pages before the span are there and full pages are all. -> and where the span ends."""
        num_tokens = span.end * self.page_size
        key = key if key.num_tokens == num_tokens else key.head(num_tokens)
        result = self._tree.insert(key, _by_index(span.pages, span.end))
        adopted = span.tail(num_duplicates(result))
        if adopted.first > span.first:
            self.free(span.head(adopted.first - span.first).ids())
        return adopted, HostPlace(result.node, span.end)

    def free(self, ids: PageIds) -> None:
        """Give host pages back that the caller held."""
        for allocator, each in zip(self._allocators, ids, strict=True):
            if allocator is not None and each.size:
                allocator.free(each)

    def recorded_frees(self) -> PageIds:
        """What the next plan is to free; NO_IDS itself if nothing."""
        pages, window_pages, states = self._allocators
        freed = pages.recorded_frees()
        if self._needs.is_plain:
            return PageIds(freed) if freed.size else NO_IDS
        ids = PageIds(
            freed,
            NO_PAGES if window_pages is None else window_pages.recorded_frees(),
            NO_PAGES if states is None else states.recorded_frees(),
        )
        return ids if any(ids.counts()) else NO_IDS

    # -- room

    def available(self) -> PageCounts:
        """Pages that the next prepare may hand out and that nobody was promised."""
        pages, window_pages, states = self._allocators
        return PageCounts(
            pages.available() - self._promised.pages,
            0 if window_pages is None else window_pages.available() - self._promised.window_pages,
            0 if states is None else states.available() - self._promised.states,
        )

    def reachable(self) -> PageCounts:
        """`available`, if everything unlocked is evicted."""
        tree, free = self._tree, self.available()
        return PageCounts(
            free.pages + tree.evictable_pages,
            free.window_pages + tree.evictable_window_pages,
            free.states + tree.evictable_states,
        )

    @property
    def unlocked_pages(self) -> int:
        """Full pages of the tree that could be evicted."""
        return self._tree.evictable_pages

    @property
    def locked_pages(self) -> int:
        """Full pages of the tree that could not."""
        return self._tree.protected_pages

    def make_room(self, counts: PageCounts) -> bool:
        """Evict until so many are available, and promise them to the caller until `end_plan`.

        -> whether; False evicts nothing. What is locked stays.
        """
        if any(map(gt, counts, self.available())):
            if any(map(gt, counts, self.reachable())):
                return False
            self._evict_for(counts)
        self._promised = PageCounts(*map(add, self._promised, counts))
        return True

    def end_plan(self) -> None:
        """The plan for which room was promised was prepared, or was not: what is handed out shows in `available`."""
        self._promised = _NOTHING

    def flush(self) -> None:
        """Evict everything that is not locked."""
        self._tree.evict(self._tree.evictable_pages)

    # -- checks

    def owned_ids(self) -> OfEachPool[list[np.ndarray]]:
        """Of each pool, ids that are free, recorded, or the tree's. O(capacity); for the ledger."""
        trees = OfEachPool(
            self._tree.cached_page_ids(), self._tree.cached_window_page_ids(), self._tree.cached_states()
        )
        return OfEachPool(
            *(
                [] if allocator is None else [allocator.free_page_ids(), allocator.recorded_frees(), *held]
                for allocator, held in zip(self._allocators, trees, strict=True)
            )
        )

    def capacities(self) -> PageCounts:
        return PageCounts(*(0 if allocator is None else allocator.capacity for allocator in self._allocators))

    def check_integrity(self) -> None:
        self._tree.check_integrity()

    # -- within

    def _evict_for(self, counts: PageCounts) -> None:
        tree = self._tree
        short = counts.pages - self.available().pages
        if short > 0:
            short -= tree.evict_spare(short)
        if short > 0:
            tree.evict(short)
        short = counts.window_pages - self.available().window_pages
        if short > 0:
            tree.evict_window(short)
        short = counts.states - self.available().states
        if short > 0:
            tree.evict_states(short)

    def _ends(self, span: Span) -> list[int]:
        """Page counts of the prefixes to insert, ascending."""
        if not span.num_pages:
            return []
        ends = {span.end}
        if self._needs.has_states:
            ends.update((np.flatnonzero(span.states) + span.first + 1).tolist())
        if self._needs.window is not None:
            live = np.append(span.window_pages != 0, False)
            ends.update((np.flatnonzero(live[:-1] & ~live[1:]) + span.first + 1).tolist())
        return sorted(ends)

    def _without_gaps(self, key: RadixKey, span: Span) -> Span:
        """With the tree's own window pages where `span` brings none: an insert is told of a run without gaps."""
        there = self._tree.span(key.head(span.end * self.page_size), span.first).window_pages
        windows = span.window_pages.copy()
        gaps = np.flatnonzero(windows[: there.size] == 0)
        windows[gaps] = there[gaps]
        return span._replace(window_pages=windows)

    def _insert_to(self, key: RadixKey, span: Span, end: int) -> None:
        count = end - span.first
        pages = _by_index(span.pages[:count], end)
        windows = span.window_pages[:count]
        holes = np.flatnonzero(windows == 0)
        run = int(holes[-1]) + 1 if holes.size else 0
        state = int(span.states[count - 1]) if self._needs.has_states else 0
        self._tree.insert(key.head(end * self.page_size), pages, _by_index(windows[run:], end), state)


def _by_index(pages: np.ndarray, end: int) -> np.ndarray:
    """(end,) int32: `pages` are the last of them."""
    held = np.zeros(end, np.int32)
    held[end - pages.size :] = pages
    return held


def _same(span: Span, there: Span) -> Span:
    """Of `span` what `there`, which begins with the same page and is perhaps shorter, has too."""
    count = there.num_pages
    return Span(
        span.first,
        *(
            np.where(mine[:count] == held, mine[:count], 0) if mine.size else mine
            for mine, held in zip(span[1:], there[1:], strict=True)
        ),
    )
