"""What of the host tier is to be written to storage.

    hosted --- queue of prefixes --- draft --- under way --- ended

Pages are named when a plan is drafted: what left the host tier by then is not written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from app.caches.tiers.host_pages import HostPages
from app.caches.tiers.span import Span
from app.caches.tiers.storage_counters import StorageTierTotals
from app.caches.tiers.storage_view import StorageView
from app.config.tier_settings import TierSettings
from app.core.keys import RadixKey
from app.core.transfers import PageIds, PageKeys, Store, TransferEnd

_MAX_QUEUED = 256  # prefixes
_STRIDE = 32  # page indexes that are looked at in one go
_PAGES_A_PLAN = 16  # they are read on the thread that dispatches
_MAX_UNDER_WAY = 128  # pages


class _Part(NamedTuple):
    """Page indexes first .. end - 1 of a key. parent: the hash of the page before, once it was computed."""

    key: RadixKey
    first: int
    end: int
    parent: bytes | None = None


class _Sent(NamedTuple):
    """hashes: of the part's pages."""

    part: _Part
    hashes: list[bytes]
    keys: PageKeys
    epoch: int
    num_pages: int  # of all pools


class Stores:
    """Writes each page once, as far as it is known what storage has. In buffer_only mode, host pages go afterwards."""

    def __init__(
        self,
        *,
        host: HostPages,
        view: StorageView,
        settings: TierSettings,
        numbers: Iterator[int],
        totals: StorageTierTotals,
    ) -> None:
        self._host = host
        self._view = view
        self._is_passage = settings.host_mode == "buffer_only"
        self._numbers = numbers
        self._totals = totals
        self._queue: deque[_Part] = deque()
        self._drafted: list[int] = []
        self._under_way: dict[int, _Sent] = {}
        self._num_under_way = 0  # pages

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def can_draft(self) -> bool:
        return bool(self._queue) and self._num_under_way < _MAX_UNDER_WAY

    def add(self, key: RadixKey, span: Span) -> None:
        """The host tier has these pages, and storage may not."""
        part = _Part(key, span.first, span.end)
        if not span.num_pages:
            return
        if self._view.is_attached and len(self._queue) < _MAX_QUEUED:
            self._queue.append(part)
        else:
            self._give_up(part, "queue_full" if self._view.is_attached else "detached")

    def draft(self) -> tuple[Store, ...]:
        """Of the next plan. O(pages of the prefixes that it takes from the queue)."""
        self._drafted = []
        stores = []
        budget = min(_PAGES_A_PLAN, _MAX_UNDER_WAY - self._num_under_way)
        while self._queue and budget > 0:
            part = self._queue.popleft()
            store, hashes, num_pages, rest = self._resolve(part, budget)
            budget -= num_pages
            if rest.first < rest.end:
                self._queue.appendleft(rest)
            dealt_with = part._replace(end=rest.first)
            if store is None:
                self._let_go(dealt_with)
                continue
            stores.append(store)
            self._drafted.append(store.number)
            self._under_way[store.number] = _Sent(dealt_with, hashes, store.keys, self._view.epoch, num_pages)
            self._num_under_way += num_pages
            self._view.suppose(store.keys)
        return tuple(stores)

    def prepared(self) -> None:
        self._drafted = []

    def refused(self) -> None:
        """The plan was not prepared: all of it waits again."""
        for number in reversed(self._drafted):
            sent = self._under_way.pop(number)
            self._num_under_way -= sent.num_pages
            self._view.doubt(sent.keys)
            self._queue.appendleft(sent.part)
        self._drafted = []

    def ended(self, end: TransferEnd) -> bool:
        sent = self._under_way.pop(end.number, None)
        if sent is None:
            return False
        self._num_under_way -= sent.num_pages
        arrived = end.arrived
        num_done = 0 if arrived is None else int(sum(np.count_nonzero(flags) for flags in arrived))
        if arrived is not None and sent.epoch == self._view.epoch and self._view.has_listener:
            self._tell(sent, arrived.pages)
        if arrived is not None:
            self._totals.stored_tokens += int(np.count_nonzero(arrived.pages)) * self._host.page_size
        if num_done < sent.num_pages:
            self._totals.stores_dropped[end.failure or "failed"] += sent.num_pages - num_done
            if sent.epoch == self._view.epoch:
                self._doubt_rest(sent, end)
        self._let_go(sent.part)
        return True

    def give_up_queued(self, reason: str) -> None:
        parts, self._queue = self._queue, deque()
        for part in parts:
            self._give_up(part, reason)

    def reset(self) -> None:
        self._queue.clear()
        self._under_way.clear()
        self._drafted = []
        self._num_under_way = 0

    def broken(self) -> str | None:
        """In words, what is wrong; None for nothing."""
        real = sum(sent.num_pages for sent in self._under_way.values())
        if real != self._num_under_way:
            return f"{real} pages are being stored, and {self._num_under_way} are counted"
        return None

    def _resolve(self, part: _Part, budget: int) -> tuple[Store | None, list[bytes], int, _Part]:
        """-> what to write of its first page indexes, their hashes, how many pages of all pools, the rest of the part.

        One page index is dealt with at least, so that a page with its window page and snapshot does not wait for ever.
        """
        key, first, end, parent = part
        present = min(self._host.num_present(key), end)
        if present < end:
            self._totals.stores_dropped["gone"] += end - max(present, first)
        if present <= first:
            return None, [], 0, part._replace(first=end)
        count = min(present - first, _STRIDE)
        span = self._host.span(key, first).head(count)
        hashes = self._view.hashes(key, first, first + count, parent)
        lacking = [
            np.array([there and each not in known for there, each in zip(ids.tolist(), hashes, strict=False)], bool)
            for ids, known in zip(span[1:], self._view.known, strict=True)
        ]
        num_pages = np.cumsum(np.sum([flags for flags in lacking if flags.size], axis=0))
        count = max(1, int(np.searchsorted(num_pages, budget, side="right")))
        rest = _Part(key, first + count, present, hashes[count - 1])
        chosen = [flags[:count] for flags in lacking]
        keys = PageKeys(
            *(tuple(each for each, flag in zip(hashes, flags.tolist(), strict=False) if flag) for flags in chosen)
        )
        if not any(keys):
            return None, [], 0, rest
        source = PageIds(*(ids[: flags.size][flags] for ids, flags in zip(span[1:], chosen, strict=True)))
        store = Store(number=next(self._numbers), keys=keys, source=source)
        return store, hashes[:count], int(num_pages[count - 1]), rest

    def _tell(self, sent: _Sent, there: np.ndarray) -> None:
        """there: (n,) bool of the full pages that were sent."""
        part, answers = sent.part, dict(zip(sent.keys.pages, there.tolist(), strict=True))
        parent = self._view.hash_before(part.key, part.first)
        self._view.tell(part.key, part.first, sent.hashes, [answers.get(each) for each in sent.hashes], parent)

    def _doubt_rest(self, sent: _Sent, end: TransferEnd) -> None:
        if end.arrived is None:
            self._view.doubt(sent.keys)
        else:
            self._view.learn(sent.keys, end.arrived)

    def _give_up(self, part: _Part, reason: str) -> None:
        self._totals.stores_dropped[reason] += part.end - part.first
        self._let_go(part)

    def _let_go(self, part: _Part) -> None:
        if self._is_passage:
            self._host.drop(part.key.head(part.end * self._host.page_size))
