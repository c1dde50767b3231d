"""Control of the storage tier: what is written to it, looked for in it, and brought from it to the host.

Keys go down and answers come up; no byte of KV is seen here. Whatever goes wrong below is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.caches.base import EventSink
from app.caches.tiers.host_pages import HostPages
from app.caches.tiers.needs import Needs
from app.caches.tiers.prefetches import Prefetches
from app.caches.tiers.span import Span
from app.caches.tiers.storage_counters import StorageTierCounters, StorageTierTotals
from app.caches.tiers.storage_view import Seed, StorageView
from app.caches.tiers.stores import Stores
from app.config.tier_settings import TierSettings
from app.core.keys import RadixKey
from app.core.transfers import Fetch, Lookup, PageIds, Store, TransferEnd
from app.errors import IntegrityError


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageIntents:
    """Of a TransferPlan, what concerns storage."""

    cancels: tuple[int, ...] = ()
    stores: tuple[Store, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    fetches: tuple[Fetch, ...] = ()


NO_INTENTS = StorageIntents()


class StorageTier:
    """Belongs to the cache's tiers, which tell it what happens and ask it for each plan. Single-threaded.

        (expect | forget | hosted)*  ->  draft  ->  prepared | refused  ->  ended*

    With no storage attached it asks for nothing and holds nobody back.
    """

    def __init__(
        self,
        *,
        host: HostPages,
        needs: Needs,
        seed: Seed | None,
        settings: TierSettings,
        numbers: Iterator[int],
        clock: Callable[[], float],
        events: EventSink | None = None,
    ) -> None:
        """seed: starts a namespace's chain of keys; None while nothing is attached. numbers: of transfers.

        events: told which full pages are known to be there.
        """
        self._totals = StorageTierTotals()
        self._view = StorageView(seed, host.page_size, events)
        self._stores = Stores(host=host, view=self._view, settings=settings, numbers=numbers, totals=self._totals)
        self._prefetches = Prefetches(
            host=host,
            needs=needs,
            view=self._view,
            settings=settings,
            numbers=numbers,
            clock=clock,
            totals=self._totals,
        )
        self._has_drafted = False  # whether the plan that is being made has anything of it

    # -- the storage -------------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        return self._view.is_attached

    def attach(self, seed: Seed) -> None:
        """Another storage, or the same one again: nothing is known of what it has."""
        self.detach()
        self._view.attach(seed)

    def detach(self) -> None:
        """Ask for nothing more. What was sent still ends; nobody is held back for it."""
        self._view.attach(None)
        self._stores.give_up_queued("detached")
        self._prefetches.give_up_queued("detached")

    def cleared(self) -> None:
        """Somebody emptied the storage."""
        self._view.forget()

    # -- requests ----------------------------------------------------------------------------------------------------

    def expect(self, request_id: str, key: RadixKey, num_tokens: int) -> None:
        """A request waits, of whose key device or host have `num_tokens`: the rest is looked for.

        Nothing for an id that is expected already. O(len(key)).
        """
        self._prefetches.expect(request_id, key, num_tokens)

    def forget(self, request_id: str) -> None:
        """It waits no more. What was found for it still comes; what was not found yet is not looked for."""
        self._prefetches.forget(request_id)

    def holds_back(self, request_id: str) -> bool:
        """Whether something of its prefix is coming for which the policy lets it wait."""
        return self._prefetches.holds_back(request_id)

    def fetched_tokens(self, request_id: str) -> int:
        """Tokens of its prefix that came from storage since it was expected; 0 when it is forgotten."""
        return self._prefetches.fetched_tokens(request_id)

    def hosted(self, key: RadixKey, span: Span) -> None:
        """The host tier adopted these pages of a backup: what storage lacks of them may be written."""
        self._stores.add(key, span)

    # -- plans -------------------------------------------------------------------------------------------------------

    @property
    def is_urgent(self) -> bool:
        """Whether the next draft would have something."""
        return self._prefetches.can_draft or self._stores.can_draft

    @property
    def num_under_way(self) -> int:
        """Transfers that were sent and have not ended, and what waits to be sent."""
        return (
            self._prefetches.num_under_way
            + self._prefetches.num_queued
            + self._stores.num_under_way
            + self._stores.num_queued
        )

    def draft(self) -> StorageIntents:
        """What the next plan carries. `prepared` or `refused` follows."""
        self._has_drafted = self.is_urgent
        if not self._has_drafted:
            return NO_INTENTS
        return StorageIntents(
            cancels=self._prefetches.draft_cancels(),
            fetches=self._prefetches.draft_fetches(),
            lookups=self._prefetches.draft_lookups(),
            stores=self._stores.draft(),
        )

    def prepared(self, fetches: tuple[PageIds | None, ...]) -> None:
        """The drafted plan was. fetches: the host pages of each, which are held here until its end; None: refused."""
        if self._has_drafted:
            self._prefetches.prepared(fetches)
            self._stores.prepared()

    def refused(self) -> None:
        """The drafted plan was not prepared: what it carried goes with a later one."""
        if self._has_drafted:
            self._prefetches.refused()
            self._stores.refused()

    def ended(self, end: TransferEnd) -> bool:
        """-> whether the transfer was one of this tier's."""
        return self._prefetches.ended(end) or self._stores.ended(end)

    def reset(self) -> None:
        """Host ids mean nothing any more. Frees and unlocks nothing; ends of what was sent are not known any more.

        Nor is what the storage has: it was closed with the host's pools, and perhaps is another one now.
        """
        self._view.forget()
        self._prefetches.reset()
        self._stores.reset()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> StorageTierCounters:
        """A snapshot."""
        return self._totals.snapshot(
            queued_prefixes=self._prefetches.num_queued,
            queued_stores=self._stores.num_queued,
            under_way=self._prefetches.num_under_way + self._stores.num_under_way,
        )

    def in_flight_ids(self) -> PageIds:
        """Host pages into which fetches are under way; nobody else's. For the ledger."""
        return self._prefetches.in_flight_ids()

    def check_integrity(self) -> None:
        broken = self._prefetches.broken() or self._stores.broken()
        if broken:
            raise IntegrityError(owner="StorageTier", broken=broken)
