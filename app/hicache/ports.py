"""What the host tier and the storage lane know of each other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from app.core.transfers import Fetch as FetchIntent
from app.core.transfers import Lookup, OfEachPool, Store, TransferEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnd:
    """A transfer of the lane that is over, and of a fetch the payloads: (page_bytes,) uint8, None where none came."""

    end: TransferEnd
    payloads: OfEachPool[Sequence[np.ndarray | None]] | None = None


class StorageLane(Protocol):
    """Storage as the host tier uses it, on the thread that dispatches: no call here waits for storage.

    Each transfer that is begun is told once by `take_ends`; with no storage attached, at once and as a failure.
    """

    def store(self, intent: Store, payloads: OfEachPool[Sequence[np.ndarray]]) -> None:
        """Payloads, (page_bytes,) uint8 each, are read until the end is told, and not after."""
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
