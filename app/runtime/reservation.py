"""What a prepared batch holds until it is executed or discarded, and the order in which either may happen."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from app.core.batch import BatchPlan
from app.errors import BatchOrderError
from app.memory.req_to_token_pool import TableDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    plan: BatchPlan
    admitted: np.ndarray  # (admissions,) int32, their rows
    row_slots: np.ndarray  # (rows,) int32, admissions resolved
    page_counts: np.ndarray  # (rows,) int32, pages that each row gained
    row_generations: np.ndarray  # (rows,) int32
    rewrites: list[TableDelta]  # they hold even if it is discarded
    appends: list[TableDelta]  # then what it reserved
    snapshot_slots: np.ndarray  # (rows,) int32, 0 for none; empty without recurrent layers


class PreparedBatches:
    """Executed from the first on, discarded from the last back. Each raises BatchOrderError and changes nothing."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Reservation] = OrderedDict()

    @property
    def last(self) -> Reservation | None:
        return next(reversed(self._waiting.values()), None)

    def add(self, batch_id: int, reservation: Reservation) -> None:
        self._waiting[batch_id] = reservation

    def check_first(self, batch_id: int) -> None:
        """Raise unless it is the next to be executed."""
        self._check_waits(batch_id)
        if batch_id != next(iter(self._waiting)):
            raise BatchOrderError(batch_id=batch_id, reason="an earlier prepared batch comes first")

    def take_first(self, batch_id: int) -> Reservation:
        self.check_first(batch_id)
        return self._waiting.pop(batch_id)

    def take_last(self, batch_id: int) -> Reservation:
        self._check_waits(batch_id)
        if batch_id != next(reversed(self._waiting)):
            raise BatchOrderError(batch_id=batch_id, reason="a later batch was prepared on top of it")
        return self._waiting.pop(batch_id)

    def clear(self) -> None:
        self._waiting.clear()

    def _check_waits(self, batch_id: int) -> None:
        if batch_id not in self._waiting:
            raise BatchOrderError(batch_id=batch_id, reason="it was executed or discarded before")
