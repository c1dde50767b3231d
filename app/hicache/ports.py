"""What the host tier and the storage lane know of each other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.core.transfers import Fetch as FetchIntent
from app.core.transfers import Lookup, OfEachPool, Store, TransferEnd
from app.tpu.page_carrier import PageArrays, PoolContents


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnd:
    """A transfer of the lane that is over, and of a fetch the host pages that it made: None where nothing came."""

    end: TransferEnd
    contents: OfEachPool[Sequence[PageArrays | None]] | None = None


class StorageLane(Protocol):
    """Storage as the host tier uses it, on the thread that dispatches: no call here waits for storage, or reads a page.

    Each transfer that is begun is told once by `take_ends`; with no storage attached, at once and as a failure.
    """

    def store(self, intent: Store, contents: PoolContents) -> None:
        """Host pages, as many of each kind as keys: kept, and read elsewhere, until the end is told at the latest."""
        ...

    def lookup(self, intent: Lookup) -> None: ...

    def fetch(self, intent: FetchIntent) -> None: ...

    def cancel(self, number: int) -> None:
        """Unknown numbers: nothing."""
        ...

    def take_ends(self) -> list[LaneEnd]: ...

    def wake_with(self, event: threading.Event) -> None:
        """From now on, whenever an end can be taken, `event` is set by the thread that brought it."""
        ...

    def close(self, timeout_s: float) -> None:
        """Write or drop what is queued, within the time. Idempotent."""
        ...

    def check_integrity(self) -> None: ...
