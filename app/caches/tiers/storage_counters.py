"""What the storage tier did, as control sees it: in tokens and pages of prefixes. Bytes are counted where they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTierCounters:
    """Totals since the start, and at the end what waits now.

    looked_up_tokens, found_tokens, fetched_tokens: beyond what device and host had; found and fetched: usable.
    stored_tokens: of full pages that storage took, or had.
    fetches_dropped: prefixes that were expected and did not come, or not whole, by reason.
    stores_dropped: pages that were not written, by reason.
    held_back_s: over all requests, for how long they were better not admitted.
    """

    looked_up_tokens: int
    found_tokens: int
    fetched_tokens: int
    stored_tokens: int
    fetches_dropped: Mapping[str, int]
    stores_dropped: Mapping[str, int]
    held_back_s: float
    queued_prefixes: int  # to be looked up or fetched
    queued_stores: int  # prefixes of which pages are to be written
    under_way: int  # transfers


@dataclass(slots=True)
class StorageTierTotals:
    """The same while they grow."""

    looked_up_tokens: int = 0
    found_tokens: int = 0
    fetched_tokens: int = 0
    stored_tokens: int = 0
    held_back_s: float = 0.0
    fetches_dropped: Counter[str] = field(default_factory=Counter)
    stores_dropped: Counter[str] = field(default_factory=Counter)

    def snapshot(self, *, queued_prefixes: int, queued_stores: int, under_way: int) -> StorageTierCounters:
        return StorageTierCounters(
            looked_up_tokens=self.looked_up_tokens,
            found_tokens=self.found_tokens,
            fetched_tokens=self.fetched_tokens,
            stored_tokens=self.stored_tokens,
            fetches_dropped=MappingProxyType(dict(self.fetches_dropped)),
            stores_dropped=MappingProxyType(dict(self.stores_dropped)),
            held_back_s=self.held_back_s,
            queued_prefixes=queued_prefixes,
            queued_stores=queued_stores,
            under_way=under_way,
        )
