"""From a draft to a dispatched step: prepare it, note what it reserved, execute it."""

from __future__ import annotations

import time

import numpy as np
import structlog

from app.core.batch import PreparedBatch
from app.errors import CapacityError
from app.runtime.interface import RuntimeInterface
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.draft import Draft, Outbox
from app.scheduling.limits import SchedulerLimits
from app.scheduling.observer import SchedulerObserver, StepTimes
from app.scheduling.planner import Planner
from app.scheduling.request import Status
from app.scheduling.running_table import RunningTable
from app.scheduling.settling import InFlight
from app.scheduling.waiting import WaitingQueue

_log = structlog.get_logger(__name__)

PATIENCE_S = 0.005  # long against planning a step, short against what a client notices


class Launcher:
    """Plans, prepares and dispatches, and knows how many request rows are free."""

    def __init__(
        self,
        *,
        adapter: SchedulerAdapter,
        runtime: RuntimeInterface,
        planner: Planner,
        table: RunningTable,
        waiting: WaitingQueue,
        outbox: Outbox,
        limits: SchedulerLimits,
        observer: SchedulerObserver,
    ) -> None:
        self._adapter = adapter
        self._tiers = adapter.tiers
        self._runtime = runtime
        self._planner = planner
        self._table = table
        self._waiting = waiting
        self._outbox = outbox
        self._limits = limits
        self._observer = observer
        self.slots_left = limits.max_running_requests  # rows that are nobody's, as the last prepare said

    def launch(
        self, times: StepTimes, *, steps_in_flight: int, num_requests: int, patience_s: float
    ) -> InFlight | None:
        """Plan, prepare and dispatch the next step; None if there is none.

        A plan without rows goes out for what moves between tiers, or with the last releases. With nothing in flight and
        nothing to tell it waits, up to `patience_s`, for something to end: nobody asks again and again.
        """
        draft = self._planner.draft(self._slots_available(), steps_in_flight=steps_in_flight)
        self._planner.look_ahead(draft)
        if not self._is_worth_a_plan(draft, steps_in_flight, num_requests):
            return None
        has_time = not (draft.has_rows or steps_in_flight or self._outbox.releases)
        wait_s = patience_s if has_time and self._tiers.num_under_way else 0.0
        try:
            prepared = self._prepare(draft, wait_s, times)
        except CapacityError as refusal:
            again = self._plan_again(draft, refusal, steps_in_flight, times)
            if again is None:
                return None
            draft, prepared = again
        places = self._commit(draft, prepared)
        slots = draft.decode_slots
        began = time.perf_counter_ns()
        handle = self._runtime.execute_batch(prepared)
        times.execute += time.perf_counter_ns() - began
        return InFlight(
            handle=handle,
            decode_slots=slots,
            decode_generations=self._table.generation[slots],
            chunks=draft.chunks,
            chunk_places=places,
            snapshot_slots=prepared.snapshot_slots,
            dispatched_ns=began,
        )

    def forget_rows(self) -> None:
        """The pool is gone, and with it every row."""
        self.slots_left = self._limits.max_running_requests

    def _is_worth_a_plan(self, draft: Draft, steps_in_flight: int, num_requests: int) -> bool:
        if draft.has_rows or draft.restores or self._tiers.is_urgent:
            return True
        if steps_in_flight:
            return False  # it tells what ended, and who may run then
        return self._tiers.num_under_way > 0 or (bool(self._outbox.releases) and not num_requests)

    def _prepare(self, draft: Draft, wait_s: float, times: StepTimes) -> PreparedBatch:
        """All or nothing on this side too: a plan that is refused leaves no lease behind."""
        plan = self._planner.build(draft, wait_s)
        began = time.perf_counter_ns()
        try:
            return self._runtime.prepare_batch(plan)
        except Exception:
            self._planner.undo(draft)
            raise
        finally:
            times.prepare += time.perf_counter_ns() - began

    def _plan_again(
        self, refused: Draft, refusal: CapacityError, steps_in_flight: int, times: StepTimes
    ) -> tuple[Draft, PreparedBatch] | None:
        """Rule (d). Refused twice means that this round runs nothing; what is in flight will change the picture."""
        running = self._table.num_running
        _log.warning("plan_refused", reason=str(refusal), running=running, waiting=len(self._waiting))
        made_way = bool(refused.restores) or self._planner.retract_last()
        slots_left = 0 if made_way else self._slots_available()  # it must not come back at once
        draft = self._planner.draft(slots_left, steps_in_flight=steps_in_flight)
        if not draft.has_rows:
            if draft.restores:
                self._planner.undo(draft)
            return None
        try:
            return draft, self._prepare(draft, 0.0, times)
        except CapacityError:
            if steps_in_flight or refused.restores:
                return None
            raise  # nothing can change any more: budget and runtime disagree, a bug of ours

    def _slots_available(self) -> int:
        return self.slots_left + len(self._outbox.releases)

    def _commit(self, draft: Draft, prepared: PreparedBatch) -> list[tuple[int, int]]:
        """The plan is going to run: note what it reserved. -> the row of each chunk."""
        self._outbox.clear()
        self.slots_left = prepared.slots_left
        self._adapter.prepared(prepared.snapshot_slots)
        self._tiers.prepared(prepared.transfers)
        slots, generations = prepared.admitted_slots.tolist(), prepared.admitted_generations.tolist()
        for (sequence, prefix), slot, generation in zip(draft.admitted, slots, generations, strict=True):
            restored = self._tiers.restored_tokens(sequence.request_id)
            self._waiting.remove(sequence)
            sequence.slot, sequence.generation = slot, generation
            sequence.status = Status.PREFILL
            sequence.unpublished = True
            if sequence.cached_tokens is None:
                sequence.note_cached(prefix.num_tokens, restored)
                self._observer.admitted(sequence)
            self._adapter.seat(sequence.request_id, slot)
            self._table.seat(sequence, prefix.num_tokens // self._adapter.page_size, self._limits.end_of(sequence))
        self._take_pages(draft, prepared)
        self._table.advance(draft.decode_slots)
        for chunk in draft.chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.length
            if chunk.samples:
                sequence.status = Status.DECODE
                self._table.start_decoding(sequence.slot)
        return [(chunk.sequence.slot, chunk.sequence.generation) for chunk in draft.chunks]

    def _take_pages(self, draft: Draft, prepared: PreparedBatch) -> None:
        if not prepared.pages.size:
            return
        chunk_slots = np.array([chunk.sequence.slot for chunk in draft.chunks], np.int32)
        slots = np.concatenate([draft.decode_slots, chunk_slots])
        offsets = prepared.page_offsets
        counts = np.diff(offsets)
        for row in np.flatnonzero(counts).tolist():
            sequence = self._table.seated(slots[row])
            gained = slice(offsets[row], offsets[row + 1])
            self._adapter.extend(sequence.request_id, prepared.pages[gained], prepared.window_pages[gained])
        self._table.num_pages[slots] += counts
