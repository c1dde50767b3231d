"""Which snapshots of recurrent states are in whose hands, and where the running states are.

A snapshot is reserved by `prepare_batch` for a step, written by that step, and then control's: its cache adopts it or
it is freed. Running states belong to request rows and are never anybody else's.
"""

from __future__ import annotations

import numpy as np

from app.core.batch import BatchPlan
from app.core.handles import CacheIdentity
from app.errors import OutOfPagesError, OwnershipError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator


class StateSlots:
    """The snapshots of one pool of states. Owned by the runtime; single-threaded."""

    def __init__(self, *, allocator: PagedTokenToKVPoolAllocator) -> None:
        """allocator: its pages are the snapshots, 1..num_snapshots."""
        self._allocator = allocator

    @property
    def allocator(self) -> PagedTokenToKVPoolAllocator:
        """Of its snapshots, for whoever reserves some that are no row's."""
        return self._allocator

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def reset(self, identity: CacheIdentity) -> None:
        """Every snapshot is free, under a new identity."""
        self._allocator.reset(identity)

    def check_plan(self, plan: BatchPlan) -> None:
        """Raise unless every snapshot that the plan names is the plan's to name."""
        self._allocator.check_recorded(plan.free_states)
        begun = np.array([admission.state for admission in plan.admissions], np.int32)
        self._allocator.check_held(begun[begun != 0])
        if plan.snapshots.size not in (0, plan.num_rows):
            reason = f"{plan.snapshots.size} stated for {plan.num_rows} rows"
            raise OwnershipError(what="snapshots of rows", reason=reason)

    def check_capacity(self, plan: BatchPlan, num_states: int) -> None:
        """OutOfPagesError unless so many snapshots are there, beside those of rows, once the plan's frees are applied.

        Rows take what is left.
        """
        free = self._allocator.num_free + plan.free_states.size
        if num_states > free:
            raise OutOfPagesError(need=num_states, free=free)

    def begin(self, plan: BatchPlan) -> None:
        """Apply the plan's frees."""
        self._allocator.apply_frees(plan.free_states)

    def reserve(self, plan: BatchPlan) -> np.ndarray:
        """(rows,) int32: the snapshot that each row's state goes to, 0 for none. Who comes too late gets none."""
        slots = np.zeros(plan.num_rows, np.int32)
        wanted = np.flatnonzero(plan.snapshots)[: self._allocator.num_free]
        slots[wanted] = self._allocator.allocate(wanted.size)
        return slots

    def undo(self, snapshot_slots: np.ndarray) -> None:
        """Give back what a discarded batch reserved."""
        self._allocator.give_back(snapshot_slots[snapshot_slots != 0])

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
