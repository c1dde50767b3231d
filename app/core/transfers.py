"""Moving KV between tiers, as it crosses the boundary: intents go down in a plan, what became of them comes up.

    device pool  --Backup-->  host pool  --Store-->  storage
                <--Restore--            <--Fetch--      `-- Lookup tells what is there

Each intent has a number that control gives it, never the same one twice. Every intent that a prepared plan carried, and
that was not refused there, ends once, in some BatchCompletion: as a TransferEnd of that number. What went wrong on the
way is told there and is never raised.

    Backup   the copy out of the pool is ordered before every program of the plan's own step, and so before whoever gets
             the pages next: its source may be in the free_pages of the same plan. The host pages may be read once it
             has ended.
    Restore  copies begin in prepare_batch and travel behind compute; the pages are written between two steps, on the
             thread that dispatches. They may be read by any plan that is prepared after the end was told.
    Store, Fetch, Lookup   run in threads of the storage tier.

Host pages of a transfer's source may be freed as soon as its plan is prepared: the runtime keeps what it still reads.
Device and host pages that a transfer writes are control's from PreparedBatch on, and it must hold them until the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

_NO_IDS = np.empty(0, np.int32)
_NO_IDS.setflags(write=False)


class PageIds(NamedTuple):
    """Ids in one tier's pools, (n,) int32 each: full pages, window pages, snapshots of recurrent states.

    In each of them in token order. Window pages and snapshots are empty for models without such layers.
    """

    pages: np.ndarray = _NO_IDS
    window_pages: np.ndarray = _NO_IDS
    states: np.ndarray = _NO_IDS

    def counts(self) -> PageCounts:
        return PageCounts(self.pages.size, self.window_pages.size, self.states.size)


class PageCounts(NamedTuple):
    """How many of each pool."""

    pages: int = 0
    window_pages: int = 0
    states: int = 0

    def __bool__(self) -> bool:
        return any(self)


class PageKeys(NamedTuple):
    """Storage keys, 32 bytes each: hashes of the chain of pages, one for each page of a pool that is meant.

    A snapshot has the key of the page that it comes after.
    """

    pages: tuple[bytes, ...] = ()
    window_pages: tuple[bytes, ...] = ()
    states: tuple[bytes, ...] = ()


NO_IDS = PageIds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """Copy these device pages into host pages that prepare allocates. Refused, not raised, when there is no room."""

    number: int
    source: PageIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Copy these host pages into device pages that prepare allocates; they count as pages that the plan needs."""

    number: int
    source: PageIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Write these host pages into storage under `keys`, as many of each pool."""

    number: int
    keys: PageKeys
    source: PageIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Ask storage which of `keys` it has. Costs no memory."""

    number: int
    keys: PageKeys
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Read `keys` from storage into host pages that prepare allocates. Refused, not raised, when there is no room."""

    number: int
    keys: PageKeys
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """A plan's intents. Applied in this order: frees, cancels, then pages for backups, restores and fetches.

    free_host: everything that the host pools' allocators have recorded.
    cancels: numbers of lookups and fetches that nobody wants any more; they still end.
    wait_s: for a plan without rows: its step is done when any transfer ends, or after so many seconds.
    """

    free_host: PageIds = NO_IDS
    cancels: tuple[int, ...] = ()
    backups: tuple[Backup, ...] = ()
    restores: tuple[Restore, ...] = ()
    stores: tuple[Store, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    wait_s: float = 0.0

    def numbers(self) -> list[int]:
        """Of its transfers."""
        return [
            each.number
            for intents in (self.backups, self.restores, self.stores, self.lookups, self.fetches)
            for each in intents
        ]

    @property
    def is_empty(self) -> bool:
        """Nothing moves, is let go of, or is waited for."""
        return not (
            self.backups
            or self.restores
            or self.stores
            or self.lookups
            or self.fetches
            or self.cancels
            or self.wait_s
            or (self.free_host is not NO_IDS and self.free_host.counts())
        )


NO_TRANSFERS = TransferPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTransfers:
    """The pages that prepare gave to the plan's transfers, in the plan's order.

    backups, fetches: host pages, or None for one that was refused: it has no end.
    restores: device pages.
    """

    backups: tuple[PageIds | None, ...] = ()
    restores: tuple[PageIds, ...] = ()
    fetches: tuple[PageIds | None, ...] = ()


NOTHING_PREPARED = PreparedTransfers()

_Each_co = TypeVar("_Each_co", covariant=True)


class OfEachPool(NamedTuple, Generic[_Each_co]):
    pages: _Each_co
    window_pages: _Each_co
    states: _Each_co


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnd:
    """What became of a transfer.

    failure: None, or why, in a word that metrics count by: "failed", "late", "cancelled", "queue_full", "breaker_open",
        ... A failed backup or restore wrote nothing that may be read. A failed store or fetch may have done a part.
    arrived: of a store, lookup or fetch, for each key of each pool, (n,) bool: stored, there, arrived.
    num_bytes, seconds: what moved, and how long it took from the start of the copy.
    has_compiled: whether a program was compiled on the way: then `seconds` says nothing about copies.
    """

    number: int
    failure: str | None = None
    arrived: OfEachPool[np.ndarray] | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    has_compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """What the host and storage tiers may take, and when they act. Shared by control and runtime.

    page_bytes: of memory that one page of each pool takes, of all ranks together.
    staging_bytes: of device memory, that backups and restores under way may take together; more is refused (backups)
        or waits (restores).
    copy_deadline_s: after which a copy is reported as late and what it moved is given up.
    """

    page_bytes: OfEachPool[int]
    staging_bytes: int
    copy_deadline_s: float = field(default=30.0)

    def num_bytes(self, counts: PageCounts) -> int:
        pages, window_pages, states = counts
        of_page, of_window_page, of_state = self.page_bytes
        return pages * of_page + window_pages * of_window_page + states * of_state
