"""Stores, lookups and fetches under way: between host pages and the storage lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import structlog

from app.core.transfers import Fetch, Lookup, OfEachPool, PageCounts, PageIds, Store, TransferEnd, TransferPlan
from app.hicache.counters import DirectionCounters, TierCounters
from app.hicache.parts import NO_CONTENTS, fits
from app.hicache.ports import LaneEnd, StorageLane
from app.memory.host_kv_pool import HostKVPool
from app.tpu.page_carrier import PoolContents

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Move:
    """contents: of a store that was not launched yet. target: host pages of a fetch."""

    counters: DirectionCounters
    num_pages: int
    contents: PoolContents = NO_CONTENTS
    target: PageIds | None = None


class StorageMoves:
    """reserve -> launch -> take_ends. What the lane cannot do is told as a failure by the lane itself."""

    def __init__(
        self,
        *,
        host_pool: HostKVPool,
        page_bytes: OfEachPool[int],
        lane: StorageLane,
        counters: TierCounters,
    ) -> None:
        self._host = host_pool
        self._page_bytes = page_bytes
        self._lane = lane
        self._counters = counters
        self._under_way: dict[int, _Move] = {}

    def reserve_store(self, store: Store, contents: PoolContents) -> None:
        """contents: of its source."""
        num_pages = sum(store.source.counts())
        self._under_way[store.number] = _Move(counters=self._counters.store, num_pages=num_pages, contents=contents)

    def reserve_lookup(self, lookup: Lookup) -> None:
        self._under_way[lookup.number] = _Move(counters=self._counters.lookup, num_pages=sum(map(len, lookup.keys)))

    def reserve_fetch(self, fetch: Fetch) -> PageIds | None:
        """Host pages for it; None, and it is refused, when there are too few."""
        counts = PageCounts(*map(len, fetch.keys))
        if not fits(counts, self._host.num_free()):
            self._counters.fetch.num_refused += 1
            return None
        target = self._host.allocate(counts)
        self._under_way[fetch.number] = _Move(counters=self._counters.fetch, num_pages=sum(counts), target=target)
        return target

    def undo(self, transfers: TransferPlan) -> None:
        """What was reserved for this plan will not be launched."""
        for number in self._reserved(transfers):
            target = self._under_way.pop(number).target
            if target is not None:
                self._host.give_back(target)

    def cancel(self, number: int) -> None:
        self._lane.cancel(number)

    def launch(self, transfers: TransferPlan) -> list[TransferEnd]:
        """Hand them to the lane. -> what ended at once."""
        ends = []
        for store in transfers.stores:
            contents, self._under_way[store.number].contents = self._under_way[store.number].contents, NO_CONTENTS
            ends += self._hand_over(store.number, partial(self._lane.store, store, contents))
        for lookup in transfers.lookups:
            ends += self._hand_over(lookup.number, partial(self._lane.lookup, lookup))
        for fetch in transfers.fetches:
            if fetch.number in self._under_way:
                ends += self._hand_over(fetch.number, partial(self._lane.fetch, fetch))
        return ends

    def _hand_over(self, number: int, begin: Callable[[], None]) -> list[TransferEnd]:
        """Whatever the lane raises is a transfer that failed: it must not be taken for a failure of the device."""
        try:
            begin()
        except Exception as error:
            _log.warning("storage_transfer_failed", number=number, reason=repr(error))
            return [self._end(number, "failed")]
        return []

    def take_ends(self) -> list[TransferEnd]:
        """Put what was fetched into its host pages. -> what has ended."""
        ends = []
        for lane_end in self._lane.take_ends():
            move = self._under_way.pop(lane_end.end.number, None)
            if move is None:
                continue
            end = lane_end.end if move.target is None else self._fill(move.target, lane_end)
            move.counters.count(end, move.num_pages)
            ends.append(end)
        return ends

    def fail(self, transfers: TransferPlan) -> list[TransferEnd]:
        """What was reserved for this plan will not be launched, and control learns it from the ends."""
        return [self._end(number, "failed") for number in self._reserved(transfers)]

    def clear(self) -> None:
        """Forget them."""
        self._under_way.clear()

    @property
    def numbers(self) -> set[int]:
        return set(self._under_way)

    def targets(self) -> list[PageIds]:
        """Host pages that are being written, of each fetch."""
        return [move.target for move in self._under_way.values() if move.target is not None]

    def _reserved(self, transfers: TransferPlan) -> list[int]:
        return [number for number in transfers.numbers() if number in self._under_way]

    def _end(self, number: int, failure: str) -> TransferEnd:
        move = self._under_way.pop(number)
        end = TransferEnd(number=number, failure=failure)
        move.counters.count(end, move.num_pages)
        return end

    def _fill(self, target: PageIds, lane_end: LaneEnd) -> TransferEnd:
        """What there is no page for did not arrive."""
        contents = lane_end.contents or OfEachPool(*([None] * ids.size for ids in target))
        arrived, good_ids, good_contents, num_bytes = [], [], [], 0
        for page_bytes, ids, of_kind in zip(self._page_bytes, target, contents, strict=True):
            pages = of_kind if len(of_kind) == ids.size else [None] * ids.size
            came = np.array([page is not None for page in pages], np.bool_)
            arrived.append(came)
            good_ids.append(ids[came])
            good_contents.append([page for page in pages if page is not None])
            num_bytes += int(came.sum()) * page_bytes
        self._host.put(PageIds(*good_ids), OfEachPool(*good_contents))
        return replace(lane_end.end, arrived=OfEachPool(*arrived), num_bytes=num_bytes)
