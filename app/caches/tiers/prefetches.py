"""Bringing to the host what only storage has of the prefixes that waiting requests begin with.

    expect --- to look up --- draft --- looking up --- ended --- to fetch --- draft --- fetching --- ended: on the host
                                                                    ^------- the next piece --------'

Prefixes that begin with the same missing page are one prefetch, which several requests wait for. Of what is on the host
already, the usable prefix counts; it is locked while pages that continue it are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from app.caches.base import NO_PAGES
from app.caches.tiers.host_pages import HostPages
from app.caches.tiers.needs import Needs
from app.caches.tiers.prefetch import Flags, Prefetch, Stage, Wish
from app.caches.tiers.storage_counters import StorageTierTotals
from app.caches.tiers.storage_view import StorageView
from app.config.tier_settings import TierSettings
from app.core.keys import RadixKey
from app.core.transfers import NO_IDS, Fetch, Lookup, PageIds, TransferEnd

_MAX_LOOKUPS = 32  # under way
_MAX_FETCHES = 8
_PIECE = 256  # pages of a fetch, where a prefix may end anywhere
_MAX_LOOKUPS_OF_ONE = 3  # for one request
_CANCELLED = "cancelled"
_GOES_ON = (None, "queue_full")  # after a piece of which some came: the workers could not queue all of it at once


class Prefetches:
    """Every request that waits has at most one wish, and every wish waits for at most one prefetch."""

    def __init__(
        self,
        *,
        host: HostPages,
        needs: Needs,
        view: StorageView,
        settings: TierSettings,
        numbers: Iterator[int],
        clock: Callable[[], float],
        totals: StorageTierTotals,
    ) -> None:
        self._host = host
        self._needs = needs
        self._view = view
        self._deadline_s = settings.storage_deadline_s
        self._numbers = numbers
        self._clock = clock
        self._totals = totals
        self._page_size = host.page_size
        self._hold_s = {
            "best_effort": 0.0,
            "timeout": settings.prefetch_timeout_s,
            "wait_complete": float("inf"),
        }[settings.prefetch_policy]
        self._wishes: dict[str, Wish] = {}
        self._open: dict[bytes, Prefetch] = {}  # by the hash of the first page that is missing
        self._to_look_up: deque[Prefetch] = deque()
        self._to_fetch: deque[Prefetch] = deque()
        self._looking_up: dict[int, Prefetch] = {}
        self._fetching: dict[int, Prefetch] = {}
        self._cancels: list[int] = []
        self._drafted_cancels: list[int] = []
        self._drafted_lookups: list[Prefetch] = []
        self._drafted_fetches: list[Prefetch] = []

    # -- requests ----------------------------------------------------------------------------------------------------

    def expect(self, request_id: str, key: RadixKey, num_tokens: int) -> None:
        """See StorageTier. O(len(key)) hashing, once a request."""
        num_whole = (key.num_tokens - 1) // self._page_size
        num_pages = max(num_tokens, self._host.probe(key)) // self._page_size
        if request_id in self._wishes or not self._view.is_attached or num_pages >= num_whole:
            return
        now = self._clock()
        wish = Wish(key, self._view.hashes(key, 0, num_whole), num_pages, since=now, held_until=now)
        self._wishes[request_id] = wish
        self._pursue(wish)

    def forget(self, request_id: str) -> None:
        wish = self._wishes.pop(request_id, None)
        if wish is None:
            return
        self._totals.held_back_s += wish.held_until - wish.since
        prefetch, wish.prefetch = wish.prefetch, None
        if prefetch is None:
            return
        prefetch.wishes.remove(wish)
        if not prefetch.is_wanted and prefetch.stage is Stage.TO_LOOK_UP:
            self._to_look_up.remove(prefetch)
            self._close(prefetch, _CANCELLED)
        elif not prefetch.is_wanted and prefetch.stage is Stage.LOOKING_UP:
            self._cancels.append(prefetch.number)

    def holds_back(self, request_id: str) -> bool:
        wish = self._wishes.get(request_id)
        if wish is None or wish.prefetch is None or not self._view.is_attached:
            return False
        now = self._clock()
        if now - wish.since >= self._hold_s:
            return False
        wish.held_until = now
        return True

    def fetched_tokens(self, request_id: str) -> int:
        wish = self._wishes.get(request_id)
        return 0 if wish is None else wish.fetched_tokens

    # -- plans -------------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._to_look_up) + len(self._to_fetch)

    @property
    def num_under_way(self) -> int:
        return len(self._looking_up) + len(self._fetching)

    @property
    def can_draft(self) -> bool:
        return bool(
            self._cancels
            or (self._to_look_up and len(self._looking_up) < _MAX_LOOKUPS)
            or (self._to_fetch and len(self._fetching) < _MAX_FETCHES)
        )

    def draft_cancels(self) -> tuple[int, ...]:
        self._drafted_cancels, self._cancels = self._cancels, []
        return tuple(self._drafted_cancels)

    def draft_lookups(self) -> tuple[Lookup, ...]:
        self._drafted_lookups = []
        lookups = []
        while self._to_look_up and len(self._looking_up) < _MAX_LOOKUPS:
            prefetch = self._to_look_up.popleft()
            prefetch.stage = Stage.LOOKING_UP
            prefetch.number = next(self._numbers)
            prefetch.ask_for_any(self._needs)
            self._looking_up[prefetch.number] = prefetch
            self._drafted_lookups.append(prefetch)
            lookups.append(Lookup(number=prefetch.number, keys=prefetch.asked, deadline_s=self._deadline_s))
        return tuple(lookups)

    def draft_fetches(self) -> tuple[Fetch, ...]:
        """Room for them is made here, and what they continue is locked."""
        self._drafted_fetches = []
        fetches = []
        while self._to_fetch and len(self._fetching) < _MAX_FETCHES:
            prefetch = self._to_fetch.popleft()
            if not self._begin(prefetch):
                continue
            prefetch.stage = Stage.FETCHING
            prefetch.number = next(self._numbers)
            self._fetching[prefetch.number] = prefetch
            self._drafted_fetches.append(prefetch)
            fetches.append(Fetch(number=prefetch.number, keys=prefetch.asked, deadline_s=self._deadline_s))
        return tuple(fetches)

    def prepared(self, fetches: Sequence[PageIds | None]) -> None:
        for prefetch, ids in zip(self._drafted_fetches, fetches, strict=True):
            if ids is None:
                del self._fetching[prefetch.number]
                self._host.unlock(prefetch.receipt)
                self._close(prefetch, "no_room")
            else:
                prefetch.ids = ids
        self._clear_draft()

    def refused(self) -> None:
        """Nothing of the draft was sent: it waits again."""
        for prefetch in reversed(self._drafted_fetches):
            del self._fetching[prefetch.number]
            self._host.unlock(prefetch.receipt)
            prefetch.stage = Stage.TO_FETCH
            self._to_fetch.appendleft(prefetch)
        for prefetch in reversed(self._drafted_lookups):
            del self._looking_up[prefetch.number]
            prefetch.stage = Stage.TO_LOOK_UP
            if prefetch.is_wanted:
                self._to_look_up.appendleft(prefetch)
            else:
                self._close(prefetch, _CANCELLED)
        self._cancels = self._drafted_cancels + self._cancels
        self._clear_draft()

    def ended(self, end: TransferEnd) -> bool:
        if (prefetch := self._looking_up.pop(end.number, None)) is not None:
            self._looked_up(prefetch, end)
            return True
        if (prefetch := self._fetching.pop(end.number, None)) is not None:
            self._fetched(prefetch, end)
            return True
        return False

    # -- the storage and the host ------------------------------------------------------------------------------------

    def give_up_queued(self, reason: str) -> None:
        """What was not sent; what was will end."""
        queued = [*self._to_look_up, *self._to_fetch]
        self._to_look_up.clear()
        self._to_fetch.clear()
        for prefetch in queued:
            self._close(prefetch, reason)

    def reset(self) -> None:
        """Host ids mean nothing any more: frees and unlocks nothing."""
        self._wishes.clear()
        self._open.clear()
        self._to_look_up.clear()
        self._to_fetch.clear()
        self._looking_up.clear()
        self._fetching.clear()
        self._cancels = []
        self._clear_draft()

    def in_flight_ids(self) -> PageIds:
        """Host pages into which fetches are under way."""
        held = [prefetch.ids for prefetch in self._fetching.values()]
        return PageIds(*map(np.concatenate, zip(NO_IDS, *held, strict=True)))

    def broken(self) -> str | None:
        """In words, what is wrong; None for nothing."""
        stages = {
            Stage.TO_LOOK_UP: list(self._to_look_up),
            Stage.LOOKING_UP: list(self._looking_up.values()),
            Stage.TO_FETCH: list(self._to_fetch),
            Stage.FETCHING: list(self._fetching.values()),
        }
        for stage, prefetches in stages.items():
            if any(prefetch.stage is not stage for prefetch in prefetches):
                return f"a prefetch that is not {stage.value} is kept with those"
        kept = [prefetch for prefetches in stages.values() for prefetch in prefetches]
        if len(kept) != len(self._open) or {id(each) for each in kept} != {id(each) for each in self._open.values()}:
            return f"{len(self._open)} prefetches are open, and {len(kept)} are in some stage"
        waiting = {id(wish) for prefetch in kept for wish in prefetch.wishes}
        if waiting != {id(wish) for wish in self._wishes.values() if wish.prefetch is not None}:
            return "requests wait for prefetches that do not know them"
        for ids in self.in_flight_ids():
            if np.unique(ids).size != ids.size:
                return "two fetches are into the same host page"
        return None

    # -- one prefetch ------------------------------------------------------------------------------------------------

    def _pursue(self, wish: Wish) -> None:
        first = self._host.probe(wish.key) // self._page_size
        if first >= len(wish.hashes) or wish.num_lookups == _MAX_LOOKUPS_OF_ONE:
            return
        prefetch = self._open.get(wish.hashes[first])
        if prefetch is None:
            prefetch = Prefetch(wish.key, wish.hashes, first, wish.num_pages, self._view.epoch)
            self._open[prefetch.missing] = prefetch
            self._to_look_up.append(prefetch)
            wish.num_lookups += 1
        prefetch.useful = min(prefetch.useful, wish.num_pages)
        prefetch.wishes.append(wish)
        wish.prefetch = prefetch

    def _looked_up(self, prefetch: Prefetch, end: TransferEnd) -> None:
        self._totals.looked_up_tokens += (prefetch.end - prefetch.first) * self._page_size
        if prefetch.epoch != self._view.epoch:
            return self._close(prefetch, "stale")
        if end.arrived is None or end.failure == _CANCELLED or not prefetch.is_wanted:
            return self._close(prefetch, end.failure or _CANCELLED)
        if end.failure is None:
            self._learn(prefetch, prefetch.first, end.arrived)
        prefetch.learn(self._needs, end.arrived)
        ends = prefetch.found_ends(self._needs, prefetch.first)
        if not ends.size:
            return self._close(prefetch, end.failure)
        self._totals.found_tokens += int(ends[-1] - max(prefetch.useful, prefetch.first)) * self._page_size
        prefetch.stage = Stage.TO_FETCH
        self._to_fetch.append(prefetch)

    def _begin(self, prefetch: Prefetch) -> bool:
        """Lock what is there, choose the next piece and make room for it. -> whether there is a piece."""
        have, receipt = self._host.lock(prefetch.key)
        is_lost = have < prefetch.first  # and what is before was not looked up
        ends = NO_PAGES if is_lost else prefetch.found_ends(self._needs, have)
        target = self._fitting(ends, have)
        if target is None or not self._host.make_room(self._needs.counts(target, have)):
            self._host.unlock(receipt)
            self._close(prefetch, "evicted" if is_lost else "no_room" if ends.size else None)
            return False
        prefetch.receipt = receipt
        prefetch.ask_for(self._needs, have, target)
        return True

    def _fitting(self, ends: np.ndarray, have: int) -> int | None:
        """Where the next piece ends: as far on as _PIECE and the room allow, at least at the first of `ends`."""
        near = ends[ends <= have + _PIECE]
        reachable = self._host.reachable()
        for end in (near if near.size else ends[:1])[::-1].tolist():
            if all(need <= room for need, room in zip(self._needs.counts(end, have), reachable, strict=True)):
                return int(end)
        return None

    def _fetched(self, prefetch: Prefetch, end: TransferEnd) -> None:
        reached = prefetch.begin
        if end.arrived is not None:
            reached = prefetch.arrived_end(self._needs, end.arrived)
            if prefetch.epoch == self._view.epoch:
                self._learn(prefetch, prefetch.begin, end.arrived)
        moved_on = self._keep(prefetch, reached)
        self._host.unlock(prefetch.receipt)
        if moved_on and end.failure in _GOES_ON and self._moves_on(prefetch, reached):
            prefetch.stage = Stage.TO_FETCH
            self._to_fetch.appendleft(prefetch)
        else:
            self._close(prefetch, end.failure)

    def _learn(self, prefetch: Prefetch, first: int, there: Flags) -> None:
        """What was asked for of pages from `first` on is there, or is not."""
        self._view.learn(prefetch.asked, there)
        if self._view.has_listener:
            parent = prefetch.hashes[first - 1] if first else None
            self._view.tell(prefetch.key, first, prefetch.asked.pages, there.pages.tolist(), parent)

    def _keep(self, prefetch: Prefetch, reached: int) -> bool:
        """The host tier gets what arrived of a usable prefix, the rest is freed. -> whether it took any."""
        whole = prefetch.take_span(self._needs)
        self._host.free(whole.tail(reached).ids())
        if reached == whole.first:
            return False
        key = prefetch.key.head(reached * self._page_size)
        adopted = self._host.insert(key, whole.head(reached - whole.first))
        if not any(adopted.counts()):
            return False
        self._totals.fetched_tokens += max(0, reached - max(whole.first, prefetch.useful)) * self._page_size
        for wish in prefetch.wishes:
            gained = min(prefetch.num_shared(wish), reached) - max(whole.first, wish.num_pages)
            wish.fetched_tokens += max(0, gained) * self._page_size
        return True

    def _moves_on(self, prefetch: Prefetch, reached: int) -> bool:
        """Whether there is another piece, and it is nobody else's: then the prefetch is of that from now on.

        Who shares no more of it than what came waits for it no longer.
        """
        prefetch.useful = max(prefetch.useful, reached)
        if not prefetch.found_ends(self._needs, reached).size or prefetch.hashes[reached] in self._open:
            return False
        del self._open[prefetch.missing]
        prefetch.first = reached
        self._open[prefetch.missing] = prefetch
        done = [wish for wish in prefetch.wishes if prefetch.num_shared(wish) <= reached]
        prefetch.wishes = [wish for wish in prefetch.wishes if prefetch.num_shared(wish) > reached]
        self._release(prefetch, done)
        return self._view.is_attached

    def _close(self, prefetch: Prefetch, reason: str | None) -> None:
        """It is over; `reason`: why it did not bring all that was looked for."""
        prefetch.stage = Stage.OVER
        del self._open[prefetch.missing]
        if reason is not None:
            self._totals.fetches_dropped[reason] += 1
        wishes, prefetch.wishes = prefetch.wishes, []
        if reason in (None, _CANCELLED):
            self._release(prefetch, wishes)
        else:
            for wish in wishes:
                wish.prefetch = None

    def _release(self, prefetch: Prefetch, wishes: Sequence[Wish]) -> None:
        """They do not wait for this prefetch any more. What it did not answer is looked for anew."""
        for wish in wishes:
            wish.prefetch = None
        for wish in wishes:
            if self._view.is_attached and not prefetch.answers(wish):
                self._pursue(wish)

    def _clear_draft(self) -> None:
        self._drafted_cancels, self._drafted_lookups, self._drafted_fetches = [], [], []
