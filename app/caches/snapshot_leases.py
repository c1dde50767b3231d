"""Snapshots of recurrent states between the plan that takes them and the cache that adopts them."""

from __future__ import annotations

import numpy as np

from app.core.ports import TokenAllocator


class SnapshotLeases:
    """Snapshots that a step writes or has written, and that no cache has yet. Single-threaded."""

    def __init__(self, allocator: TokenAllocator) -> None:
        self._allocator = allocator
        self._in_flight: set[int] = set()

    def available(self) -> int:
        """Snapshots that the next prepare may hand out."""
        return self._allocator.available()

    def hold(self, snapshot_slots: np.ndarray) -> None:
        """A plan was prepared that takes these, (rows,) int32; 0 is none."""
        self._in_flight.update(snapshot_slots[snapshot_slots != 0].tolist())

    def adopted(self, snapshot: int) -> None:
        """The cache has it."""
        self._in_flight.remove(snapshot)

    def drop(self, snapshot: int) -> None:
        """Nobody wants it."""
        self._in_flight.remove(snapshot)
        self._allocator.free(np.array([snapshot], np.int32))

    def reset(self) -> None:
        """The pool is gone."""
        self._in_flight.clear()

    def in_flight_ids(self) -> np.ndarray:
        """(n,) int32, for the ledger."""
        return np.array(sorted(self._in_flight), np.int32)
