"""The running states of recurrent layers, one for each request row, around a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from app.core.batch import Admission
from app.core.ports import StateSpec


class StateCopier(Protocol):
    """The device pool of a model with recurrent layers."""

    def copy_states(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Dispatch a copy of states between slots, (n,) int32 each."""
        ...


class RunningStates:
    """Moves states between snapshots and rows, on the device and in order of dispatch."""

    def __init__(self, spec: StateSpec, device_pool: StateCopier) -> None:
        self._spec = spec
        self._pool = device_pool

    def begin(self, slots: np.ndarray, admissions: Sequence[Admission]) -> None:
        """Rows that start, (n,) int32: each state becomes a copy of the snapshot that its prefix has, or zeros."""
        sources = np.array([admission.state for admission in admissions], np.int32)
        self._pool.copy_states(sources, self._spec.running_slots(slots))

    def keep(self, slots: np.ndarray, snapshot_slots: np.ndarray) -> None:
        """After a step: the state of slots[i] is copied to snapshot_slots[i]; 0 for none. (n,) int32 each."""
        rows = np.flatnonzero(snapshot_slots)
        self._pool.copy_states(self._spec.running_slots(slots[rows]), snapshot_slots[rows])

    def running(self, slots: np.ndarray, size: int) -> np.ndarray:
        """(size,) int32, a fresh array: where the states of these rows are; beyond the last slot for padding."""
        padded = np.full(size, self._spec.num_slots, np.int32)
        padded[: slots.size] = self._spec.running_slots(slots)
        return padded
