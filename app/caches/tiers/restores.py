"""Copies from the host to the device, for requests that wait for a row.

    begin: host prefix and device prefix locked -- sent: device pages held -- landed: the device tree's, both unlocked
                                              `-- refused: both unlocked   `-- failed: pages freed, both unlocked

What a restore brings is beyond the device prefix that it locks, so that nothing it builds on can leave meanwhile; and
its source is locked, so that the eviction which makes room for it on the device, and on the host for what leaves there,
cannot take it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from app.caches.base import LockReceipt
from app.caches.component_cache import ComponentCache
from app.caches.tiers.coming import shared_pages
from app.caches.tiers.counters import TierTally
from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.needs import Needs
from app.caches.tiers.restore_choice import RestoreChoice
from app.caches.tiers.span import Span
from app.config.tier_settings import TierSettings
from app.core.keys import TOKEN_BYTES, RadixKey
from app.core.transfers import PageCounts, PageIds, Restore, TierLimits, TransferEnd

MAX_RESTORES = 2  # of one request, while it waits
_REMEMBERED = 4096  # requests


@dataclass(slots=True)
class RestoreUnderWay:
    """span: of host pages, from the end of the device prefix to the end of `key`. device_ids: once prepared."""

    number: int
    request_id: str
    key: RadixKey
    span: Span
    host_receipt: LockReceipt
    device_receipt: LockReceipt
    device_ids: PageIds | None = None


class Restores:
    """Single-threaded."""

    def __init__(
        self,
        *,
        device: ComponentCache,
        host: HostCache,
        needs: Needs,
        settings: TierSettings,
        limits: TierLimits,
        numbers: Iterator[int],
        tally: TierTally,
    ) -> None:
        self.choice = RestoreChoice()
        self._device = device
        self._host = host
        self._needs = needs
        self._limits = limits
        self._numbers = numbers
        self._tally = tally
        self._keeps_copies = settings.host_mode == "cache"
        self._drafted: list[RestoreUnderWay] = []
        self._sent: dict[int, RestoreUnderWay] = {}
        self._begun: Counter[str] = Counter()  # by request that waits
        self._restored: OrderedDict[str, int] = OrderedDict()  # tokens, by request

    @property
    def num_drafted(self) -> int:
        return len(self._drafted)

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    @property
    def bytes_in_flight(self) -> int:
        """Of those that wait for their plan too."""
        return sum(self._bytes(each) for each in self._under_way()) if self._sent or self._drafted else 0

    # -- what a scheduler asks

    def restorable(self, request_id: str, key: RadixKey, num_tokens: int) -> PageCounts:
        """As CacheTiers says. O(len(key))."""
        if self._begun[request_id] >= MAX_RESTORES:
            return PageCounts()
        found = self._host.probe(key)
        if found <= num_tokens:
            return PageCounts()
        page_size = self._needs.page_size
        counts = self._needs.counts(found // page_size, num_tokens // page_size)
        if not self.choice.is_worth(num_bytes=self._limits.num_bytes(counts), num_tokens=found - num_tokens):
            self._tally.not_worth_restoring += 1
            return PageCounts()
        return counts

    def begin(self, request_id: str, key: RadixKey, room: PageCounts) -> PageCounts:
        """As CacheTiers says. O(len(key))."""
        prefix = self._device.match(key)
        device_receipt = self._device.lock(prefix)
        first = prefix.pages.size
        end = self._longest_end(key, first, room)
        if end == 0:
            self._device.unlock(device_receipt)
            return PageCounts()
        key = key.head(end * self._needs.page_size)
        num_locked, host_receipt = self._host.lock(key)
        assert num_locked == end
        span = self._needs.part(self._host.span(key, first), end, first)
        restore = RestoreUnderWay(next(self._numbers), request_id, key, span, host_receipt, device_receipt)
        self._drafted.append(restore)
        self._begun[request_id] += 1
        self._tally.host_hits += 1
        return span.counts()

    def holds_back(self, request_id: str, key: RadixKey | None) -> bool:
        """Whether something is being restored for the request, or for another that begins with the same tokens."""
        return any(
            each.request_id == request_id or (key is not None and self._brings(each, key)) for each in self._under_way()
        )

    def restored_tokens(self, request_id: str) -> int:
        return self._restored.get(request_id, 0)

    def expect(self, request_id: str) -> None:
        """The request begins to wait."""
        self._begun.pop(request_id, None)
        self._restored.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """It waits no more."""
        self._begun.pop(request_id, None)

    # -- plans

    def draft(self) -> tuple[Restore, ...]:
        return tuple(Restore(number=each.number, source=each.span.ids()) for each in self._drafted)

    def prepared(self, given: tuple[PageIds, ...]) -> None:
        for each, ids in zip(self._drafted, given, strict=True):
            each.device_ids = ids
            self._sent[each.number] = each
        self._drafted.clear()

    def refused(self) -> None:
        for each in self._drafted:
            self._host.unlock(each.host_receipt)
            self._device.unlock(each.device_receipt)
            if self._begun[each.request_id]:
                self._begun[each.request_id] -= 1
        self._drafted.clear()

    def sends(self, number: int) -> bool:
        """Whether that is a restore under way."""
        return number in self._sent

    def ended(self, end: TransferEnd) -> None:
        """One of `sends` ended."""
        restore = self._sent.pop(end.number)
        assert restore.device_ids is not None
        if end.failure is None:
            self._land(restore, restore.span.filled(restore.device_ids))
            if not end.has_compiled:
                self.choice.note_restore(num_bytes=end.num_bytes, seconds=end.seconds)
            self._tally.restored_bytes += end.num_bytes
            self._tally.restore_s += end.seconds
        else:
            self._free(restore.device_ids)
            self._tally.restore_failures[end.failure] += 1
        self._device.unlock(restore.device_receipt)
        self._host.unlock(restore.host_receipt)
        if end.failure is None:
            if self._keeps_copies:
                self._host.spare(self._host.place(restore.key), restore.span.end)
            else:
                self._host.drop(restore.key)

    def lose_device(self) -> None:
        """The device pool is gone, with its pages and its receipts."""
        for each in self._under_way():
            self._host.unlock(each.host_receipt)
        self._drafted.clear()
        self._sent.clear()
        self._begun.clear()

    def lose_host(self) -> None:
        """The host pools are gone, with their receipts: what is under way ends as it may."""
        for each in self._under_way():
            each.host_receipt = self._host.lock(each.key.head(0))[1]

    def in_flight_ids(self) -> PageIds:
        """Device pages that are being written."""
        held = [each.device_ids for each in self._sent.values() if each.device_ids is not None]
        return PageIds(*(np.concatenate(each) for each in zip(*held, strict=True))) if held else PageIds()

    # -- within

    def _under_way(self) -> list[RestoreUnderWay]:
        return [*self._sent.values(), *self._drafted]

    def _longest_end(self, key: RadixKey, first: int, room: PageCounts) -> int:
        """Pages of the longest prefix on the host that is beyond `first` pages and fits `room`; 0 if there is none."""
        needs = self._needs
        most = self._host.probe(key) // needs.page_size
        if most <= first:
            return 0
        if needs.is_plain:
            return min(most, first + room.pages) if room.pages > 0 else 0
        reach = min(first, needs.first_window_page(first + 1))
        span = self._host.span(key.head(most * needs.page_size), reach)
        for end in needs.usable_ends(span, first)[::-1].tolist():
            if all(count <= most for count, most in zip(needs.counts(end, first), room, strict=True)):
                return int(end)
        return 0

    def _land(self, restore: RestoreUnderWay, arrived: Span) -> None:
        """The pages become the device tree's, where it has none itself meanwhile."""
        end, first = arrived.end, arrived.first
        state = int(arrived.states[-1]) if arrived.states.size else 0
        self._device.insert(
            restore.key, _by_index(arrived.pages, first, end), _by_index(arrived.window_pages, first, end), state
        )
        there = self._device.span(restore.key, first)
        self._free(arrived.without(there))
        num_tokens = (end - first) * self._needs.page_size
        self._restored[restore.request_id] = self._restored.get(restore.request_id, 0) + num_tokens
        if len(self._restored) > _REMEMBERED:
            self._restored.popitem(last=False)
        self._tally.restored_tokens += num_tokens

    def _free(self, ids: PageIds) -> None:
        device = self._device
        for allocator, each in zip(
            (device.token_allocator, device.window_allocator, device.state_allocator), ids, strict=True
        ):
            if allocator is not None and each.size:
                allocator.free(each)

    def _brings(self, each: RestoreUnderWay, key: RadixKey) -> bool:
        """Whether the first page that it restores is of `key` too, with all before it."""
        page_bytes = self._needs.page_size * TOKEN_BYTES
        at = slice(each.span.first * page_bytes, (each.span.first + 1) * page_bytes)
        return key.raw[at] == each.key.raw[at] and shared_pages(key, each.key, page_bytes) > each.span.first

    def _bytes(self, each: RestoreUnderWay) -> int:
        return self._limits.num_bytes(each.span.counts())


def _by_index(pages: np.ndarray, first: int, end: int) -> np.ndarray:
    held = np.zeros(end, np.int32)
    held[first : first + pages.size] = pages
    return held
