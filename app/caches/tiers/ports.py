"""The tiers below a cache's device pool: as a scheduler sees them, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from app.caches.tiers.counters import TierCounters
from app.config.tier_settings import TierSettings
from app.core.keys import Namespace, RadixKey
from app.core.ports import TokenAllocator
from app.core.transfers import (
    NO_IDS,
    NO_TRANSFERS,
    PageCounts,
    PageIds,
    PreparedTransfers,
    TierLimits,
    TransferEnd,
    TransferPlan,
)


class RestoredTokens(NamedTuple):
    """Of a request's cached tokens, those that were brought back for it: from the host tier, and from storage."""

    host: int = 0
    storage: int = 0


class CacheTiers(Protocol):
    """The tiers below one cache. Single-threaded, like the cache, which tells them itself what it keeps and lets go.

    A scheduler asks between plans, and of every plan it says what became of it:

        expect* holds_back* restorable* begin_restore*  ->  plan  ->  prepared | refused   ...   ended

    What fails down there is a miss: nothing here raises for it.
    """

    def expect(self, request_id: str, key: RadixKey) -> None:
        """A request waits for a row: what only storage has of its prefix begins to come."""
        ...

    def forget(self, request_id: str) -> None:
        """It waits no more: it was admitted, or ended. What is under way for it still lands. Unknown ids: nothing."""
        ...

    def holds_back(self, request_id: str) -> bool:
        """Whether the request is better admitted later, because something of its prefix is coming."""
        ...

    def probe(self, key: RadixKey) -> int:
        """Tokens of `key` that could be restored; what storage has, once it was fetched. Read-only. O(len(key))."""
        ...

    def restorable(self, request_id: str, key: RadixKey, num_tokens: int) -> PageCounts:
        """Device pages that a restore for this request would take, if the device has `num_tokens` of its key.

        Zero, which is false, when there is nothing to restore, or when computing it is expected to be quicker.
        """
        ...

    def begin_restore(self, request_id: str, key: RadixKey, room: PageCounts) -> PageCounts:
        """Bring back with the next plan what `restorable` found, as far as `room` goes. -> the pages that it takes.

        Until it has landed, `holds_back` is true of the request, and its source and its device prefix are locked.
        """
        ...

    def restored_tokens(self, request_id: str) -> RestoredTokens:
        """What was brought back for this request so far."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Whether a plan is worth sending for what is to move, even if no row runs."""
        ...

    @property
    def num_under_way(self) -> int:
        """Transfers that were sent and have not ended, and those that wait to be sent."""
        ...

    def plan(self, wait_s: float = 0.0) -> TransferPlan:
        """What the next plan carries. It is asked for last, when room has been made for everything else."""
        ...

    def prepared(self, transfers: PreparedTransfers) -> None:
        """That plan was prepared."""
        ...

    def refused(self) -> None:
        """That plan was not prepared: restores that were begun for it did not happen; all else goes with the next."""
        ...

    def ended(self, ends: Sequence[TransferEnd]) -> None:
        """What a completion told."""
        ...

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        """A step was read so many seconds after the one before, or after it was dispatched: how fast computing is."""
        ...

    def note_copies(self, *, restored_bytes_per_s: float) -> None:
        """How fast pages come back to the device when nothing else runs, as measured before there were requests."""
        ...

    def in_flight_ids(self) -> PageIds:
        """Device pages into which restores are under way; nobody else's. For the ledger."""
        ...

    def reset_device(self) -> None:
        """The device pool is gone, and with it what was to be copied from or into it. Host pages stay."""
        ...

    def flush(self) -> None:
        """Forget everything on the host that is not under way. Storage keeps what it has."""
        ...

    def attach_storage(self, seed: Callable[[Namespace], bytes]) -> None:
        """From now on prefixes are stored under keys whose chains begin with `seed`; nothing is known of what is there.

        Also for one that is attached already: what was known of it is forgotten.
        """
        ...

    def detach_storage(self) -> None:
        """Ask for nothing more of the storage. What was sent still ends."""
        ...

    def counters(self) -> TierCounters:
        """What happened so far, and what is under way. O(transfers under way)."""
        ...

    def check_integrity(self) -> None:
        """Every host page is in one hand; what is under way is held; the host's tree is sound. O(pages)."""
        ...


class NoTiers:
    """Of a cache that has none."""

    is_urgent = False
    num_under_way = 0

    def expect(self, request_id: str, key: RadixKey) -> None:
        """Nothing comes."""

    def forget(self, request_id: str) -> None:
        """Nothing was expected."""

    def holds_back(self, request_id: str) -> bool:
        return False

    def probe(self, key: RadixKey) -> int:
        return 0

    def restorable(self, request_id: str, key: RadixKey, num_tokens: int) -> PageCounts:
        return PageCounts()

    def begin_restore(self, request_id: str, key: RadixKey, room: PageCounts) -> PageCounts:
        return PageCounts()

    def restored_tokens(self, request_id: str) -> RestoredTokens:
        return RestoredTokens()

    def plan(self, wait_s: float = 0.0) -> TransferPlan:
        return NO_TRANSFERS

    def prepared(self, transfers: PreparedTransfers) -> None:
        """Nothing was sent."""

    def refused(self) -> None:
        """Nothing was sent."""

    def ended(self, ends: Sequence[TransferEnd]) -> None:
        """Nothing was sent."""

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        """Nobody decides by it."""

    def note_copies(self, *, restored_bytes_per_s: float) -> None:
        """Nobody decides by it."""

    def in_flight_ids(self) -> PageIds:
        return NO_IDS

    def reset_device(self) -> None:
        """Nothing is held."""

    def flush(self) -> None:
        """Nothing is held."""

    def attach_storage(self, seed: Callable[[Namespace], bytes]) -> None:
        """There is nothing that could be stored."""

    def detach_storage(self) -> None:
        """There is none."""

    def counters(self) -> TierCounters:
        return TierCounters()

    def check_integrity(self) -> None:
        """Nothing is held."""


NO_TIERS = NoTiers()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """All that a cache's tiers are made of. `CacheDeps.host_tier` gives it.

    token_allocator, window_allocator, state_allocator: of the host pools; the latter two as the model's components say.
    storage_seed: what starts the chain of storage keys of a namespace; None while no storage is attached.
    host_events, storage_events: told what enters and leaves that tier, like CacheDeps.events; of the storage, as far as
        it is known.
    """

    token_allocator: TokenAllocator
    window_allocator: TokenAllocator | None = None
    state_allocator: TokenAllocator | None = None
    limits: TierLimits
    settings: TierSettings = field(default_factory=TierSettings)
    storage_seed: Callable[[Namespace], bytes] | None = None
    host_events: Any = None
    storage_events: Any = None
