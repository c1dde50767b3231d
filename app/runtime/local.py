"""The runtime in the scheduler's own process: owner of pools, rows, page table and the order of device work.

Life of a batch:     prepare_batch --> PREPARED --> execute_batch --> RUNNING --> its handle is read --> over
                                          `-----> discard_batch --> over

When the device fails, the donated pool is gone: the step and every later one fail, the pool is made anew under the next
generation, and whatever was prepared before is refused. What earlier steps produced can still be read.

A pool on several nodes is not made anew: nodes that disagree about whether, and in which step, it failed would wait for
each other for ever. NodesFailedError is raised, then and ever after.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import numpy as np
import structlog

from app.config.server_args import WarmupLevel
from app.core.batch import Admission, BatchPlan, PageRewrite, PreparedBatch
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.ports import ModelRunner
from app.core.transfers import TransferEnd
from app.errors import (
    BatchOrderError,
    NodesFailedError,
    OutOfPagesError,
    OutOfRequestSlotsError,
    OwnershipError,
    RuntimeClosedError,
    StaleHandleError,
    StepFailedError,
)
from app.hicache.host_tier import HostTier
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import NO_PAGES, ReqToTokenPool, TableDelta
from app.memory.state_slots import StateSlots
from app.memory.window_pages import WindowPagePool
from app.runtime.buckets import PowersOfTwo, ReachableShapes
from app.runtime.dispatch import StepDispatcher, StepRows
from app.runtime.plan_check import check_plan
from app.runtime.plan_rows import page_needs, row_lengths, row_slots
from app.runtime.pools import OwnedPool
from app.runtime.reservation import PreparedBatches, Reservation
from app.runtime.row_sampling import RowSampling
from app.runtime.running_states import RunningStates
from app.runtime.step_handle import LocalStepHandle
from app.runtime.tier_moves import tier_moves
from app.runtime.warmup import WarmUp

_log = structlog.get_logger(__name__)

MAX_UNREAD_STEPS = 1  # earlier steps that need not be read when one is executed


class LocalRuntime:
    """RuntimeInterface over arrays of this process. Single-threaded: the scheduler's thread calls it."""

    def __init__(
        self,
        *,
        allocator: PagedTokenToKVPoolAllocator,
        rows: ReqToTokenPool,
        sampling: RowSampling,
        device_pool: OwnedPool,
        model_runner: ModelRunner,
        check_room: Callable[[], None],
        window: WindowPagePool | None = None,
        states: StateSlots | None = None,
        running_states: RunningStates | None = None,
        tiers: HostTier | None = None,
    ) -> None:
        """check_room: called when the weights are there and the pool is not; raises when it will not fit.

        window: for a model with sliding windows; states, running_states: for one with recurrent layers. tiers: what
        moves pages to host memory and storage and back; without it plans that ask for that are refused.
        """
        self._window = window
        self._states = states
        self._allocator = allocator
        self._rows = rows
        self._sampling = sampling
        self._pool = device_pool
        self._runner = model_runner
        self._check_room = check_room
        self._dispatcher = StepDispatcher(
            rows=rows,
            sampling=sampling,
            device_pool=device_pool,
            model_runner=model_runner,
            window=window,
            states=running_states,
        )
        self._moves = tier_moves(tiers, allocator, window, states)
        self._buckets = PowersOfTwo(page_size=allocator.page_size, max_pages=rows.max_pages)
        self._is_open = self._was_open = False
        self._prepared = PreparedBatches()
        self._unread: list[LocalStepHandle] = []  # dispatched, oldest first
        self._carried: list[TableDelta] = []  # of discarded batches: rewrites that still hold
        self._next_batch_id = 0
        self._failure: NodesFailedError | None = None

    @property
    def identity(self) -> CacheIdentity:
        return self._allocator.identity

    def open(self) -> None:
        """Load the weights, allocate pool and tables. After `close`: everything older is stale."""
        if self._is_open:
            return
        self._runner.load()
        self._check_room()
        self._pool.open()
        if self._was_open:
            self._start_generation()
        else:
            self._rows.open()
            self._sampling.open()
            if self._window is not None:
                self._window.open()
        self._moves.open()
        self._is_open = self._was_open = True

    def close(self) -> None:
        """Wait for dispatched steps, then drop every array, in the order of ownership. Idempotent."""
        if not self._is_open:
            return
        for handle in list(self._unread):
            handle.wait()
        self._is_open = False
        self._prepared.clear()
        self._moves.close()
        self._sampling.close()
        if self._window is not None:
            self._window.close()
        self._rows.close()
        self._pool.close()
        self._runner.close()

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatch:
        self._require_open("prepare_batch")
        if plan.identity != self.identity:
            raise StaleHandleError(what="plan for pool", held=tuple(plan.identity), current=tuple(self.identity))
        check_plan(plan, rows=self._rows, allocator=self._allocator, vocab_size=self._runner.vocab_size)
        if self._window is not None:
            self._window.check_plan(plan)
        if self._states is not None:
            self._states.check_plan(plan)
        self._moves.check_plan(plan)
        needs = page_needs(plan, self._rows, self._allocator.page_size)
        num_pages = int(needs.sum())
        self._check_capacity(plan, num_pages)
        return self._reserve(plan, needs, num_pages)

    def execute_batch(self, prepared: PreparedBatch) -> LocalStepHandle:
        self._require_open("execute_batch")
        self._check_turn(prepared)
        reservation = self._prepared.take_first(prepared.batch_id)
        handle = LocalStepHandle(
            batch_id=prepared.batch_id,
            num_rows=reservation.plan.num_rows,
            extend_samples=reservation.plan.extend_samples,
            identity=lambda: self.identity,
            on_read=partial(self._note_read, reservation),
            on_failure=self._lose_pool,
            collect_ends=partial(self._collect_ends, prepared.batch_id),
            moves=self._moves,
            wait_s=0.0 if reservation.plan.num_rows else reservation.plan.transfers.wait_s,
        )
        self._unread.append(handle)
        deltas, self._carried = [*self._carried, *reservation.rewrites, *reservation.appends], []
        try:
            self._moves.launch(prepared.batch_id)
            # Not before: a batch prepared earlier may still sample for the request that had the row.
            for slot, admission in zip(reservation.admitted.tolist(), reservation.plan.admissions, strict=True):
                self._sampling.admit(slot, admission)
            rows = StepRows(
                slots=reservation.row_slots,
                admitted=reservation.admitted,
                snapshot_slots=reservation.snapshot_slots,
            )
            handle.started(self._dispatcher.run(reservation.plan, rows, deltas, self._buckets))
            self._moves.launched()
        except Exception as error:  # whatever the device raised, the pool was lent and is gone
            self._lose_pool(prepared.batch_id, f"{type(error).__name__}: {error}")
        return handle

    def discard_batch(self, prepared: PreparedBatch) -> None:
        self._require_open("discard_batch")
        if prepared.identity != self.identity:
            return  # the pool it reserved from is gone, and the reservation with it
        reservation = self._prepared.take_last(prepared.batch_id)
        self._moves.undo(prepared)
        self._allocator.give_back(prepared.pages)
        if self._window is not None:
            self._window.undo(prepared.window_pages, prepared.admitted_slots)
        if self._states is not None:
            self._states.undo(prepared.snapshot_slots)
        self._rows.undo_append(reservation.row_slots, reservation.page_counts)
        self._rows.release(prepared.admitted_slots)
        earlier = self._prepared.last
        (earlier.appends if earlier else self._carried).extend(reservation.rewrites)

    def warm_up(self, level: WarmupLevel, chunk_tokens: int) -> Iterator[tuple[str, float]]:
        """Compile what copies between tiers and what runs steps of up to `chunk_tokens` prompt tokens, a program each
        time the iterator goes on. -> what comes next, and the fraction done. No page changes. OwnershipError once a
        request has a row. Raises what the device raises: then the pool is new.
        """
        shapes = ReachableShapes(buckets=self._buckets, num_rows=self._rows.num_rows, chunk_tokens=chunk_tokens)
        warm_up = WarmUp(dispatcher=self._dispatcher, rows=self._rows, sampling=self._sampling, identity=self.identity)
        steps = ([] if level == "none" else self._moves.warm_up_steps()) + warm_up.steps(level, shapes)
        for done, step in enumerate(steps):
            yield step.what, done / len(steps)
            self._require_open("warm_up")
            if self._rows.num_free < self._rows.num_rows:
                raise OwnershipError(what="request rows", reason="warm up before requests have any")
            try:
                step.run()
            except Exception as error:
                self._lose_pool(self._next_batch_id, f"{type(error).__name__}: {error}")
                raise
        if steps:
            self._sampling.reset()  # penalty tables take memory that a run may never need

    def restored_bytes_per_s(self) -> float | None:
        """How fast host pages came back to the device in `warm_up`; None without."""
        return self._moves.restored_bytes_per_s()

    def check_integrity(self) -> None:
        """Allocator and rows are sound, and every page that a row reads is held by somebody."""
        self._allocator.check_integrity()
        self._rows.check_integrity()
        if self._window is not None:
            self._window.check_integrity(self._rows.page_counts_in_use())
        if self._states is not None:
            self._states.check_integrity()
        # A page freed by control is read until the plan that says so: then its row has ended or been rewritten.
        readable = np.concatenate([self._allocator.held_page_ids(), self._allocator.recorded_page_ids()])
        self._rows.check_reads(readable)
        self._moves.check_integrity()

    # -- prepare -----------------------------------------------------------------------------------------------------

    def _check_capacity(self, plan: BatchPlan, row_pages: int) -> None:
        restored = self._moves.restored_counts(plan)
        need, free = row_pages + restored.pages, self._allocator.num_free + plan.free_pages.size
        if need > free:
            raise OutOfPagesError(need=need, free=free)
        if self._window is not None:
            self._window.check_capacity(plan, row_pages + restored.window_pages)
        if self._states is not None:
            self._states.check_capacity(plan, restored.states)
        free_slots = self._rows.num_free + plan.release_slots.size
        if len(plan.admissions) > free_slots:
            raise OutOfRequestSlotsError(need=len(plan.admissions), free=free_slots)

    def _reserve(self, plan: BatchPlan, needs: np.ndarray, num_pages: int) -> PreparedBatch:
        rows, window = self._rows, self._window
        self._allocator.apply_frees(plan.free_pages)  # the only thing here that can refuse, and it goes first
        rows.release(plan.release_slots)
        if window is not None:
            window.begin(plan)
        if self._states is not None:
            self._states.begin(plan)
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        transfers = self._moves.reserve(batch_id, plan)
        rewrites = [self._rewrite(rewrite) for rewrite in plan.rewrites]
        admitted = rows.allocate(len(plan.admissions))
        appends = [self._admit(*new) for new in zip(admitted.tolist(), plan.admissions, strict=True)]
        slots = row_slots(plan, admitted)
        pages = self._allocator.allocate(num_pages)
        window_pages = NO_PAGES
        offsets = np.zeros(needs.size + 1, np.int32)
        if num_pages:
            gained = rows.append(slots, needs, pages)
            if window is not None:
                gained = window.append(gained)
                window_pages = gained.window_pages
            appends.append(gained)
            np.cumsum(needs, out=offsets[1:])
        snapshot_slots = NO_PAGES if self._states is None else self._states.reserve(plan)
        reservation = Reservation(
            plan=plan,
            admitted=admitted,
            row_slots=slots,
            page_counts=needs,
            row_generations=rows.generations[slots],
            rewrites=rewrites,
            appends=appends,
            snapshot_slots=snapshot_slots,
        )
        self._prepared.add(batch_id, reservation)
        return PreparedBatch(
            batch_id=batch_id,
            identity=self.identity,
            admitted_slots=admitted,
            admitted_generations=rows.generations[admitted],
            page_offsets=offsets,
            pages=pages,
            pages_left=self._allocator.num_free,
            slots_left=rows.num_free,
            window_pages=window_pages,
            window_pages_left=0 if window is None else window.num_free,
            snapshot_slots=snapshot_slots,
            states_left=0 if self._states is None else self._states.num_free,
            transfers=transfers,
        )

    def _rewrite(self, rewrite: PageRewrite) -> TableDelta:
        delta = self._rows.rewrite(rewrite)
        return delta if self._window is None else self._window.rewrite(rewrite, delta)

    def _admit(self, slot: int, admission: Admission) -> TableDelta:
        pages = admission.prefix_pages
        delta = self._rows.append(np.array([slot], np.int32), np.array([pages.size], np.int32), pages)
        return delta if self._window is None else self._window.admit(slot, admission.prefix_window_pages, delta)

    # -- execute -----------------------------------------------------------------------------------------------------

    def _check_turn(self, prepared: PreparedBatch) -> None:
        if prepared.identity != self.identity:
            raise StaleHandleError(
                what="batch prepared for pool", held=tuple(prepared.identity), current=tuple(self.identity)
            )
        self._prepared.check_first(prepared.batch_id)
        if len(self._unread) > MAX_UNREAD_STEPS:
            raise BatchOrderError(batch_id=prepared.batch_id, reason="wait for an earlier step first")

    def _note_read(self, reservation: Reservation, handle: LocalStepHandle) -> None:
        """Control has read the step: what its rows computed is settled, as far as they are still the same requests."""
        self._unread.remove(handle)
        if self._window is None:
            return
        slots = reservation.row_slots
        same = self._rows.is_current(slots, reservation.row_generations)
        self._window.settle(slots[same], row_lengths(reservation.plan)[same])

    def _collect_ends(self, batch_id: int) -> tuple[TransferEnd, ...]:
        """Control reads step `batch_id`. -> transfers that have ended by now."""
        try:
            return self._moves.collect()
        except Exception as error:
            self._lose_pool(batch_id, f"{type(error).__name__}: {error}")
            return self._moves.collect()

    def _lose_pool(self, batch_id: int, reason: str) -> None:
        """The device failed in step `batch_id`. That step and later ones fail; a new generation has empty pools."""
        if self._pool.num_nodes > 1:
            self._give_up(batch_id, NodesFailedError(reason=reason, num_nodes=self._pool.num_nodes))
        reason = str(StepFailedError(reason=reason, generation=self.identity.generation + 1))
        _log.error("pool_lost", reason=reason, unread_steps=len(self._unread))
        for handle in list(self._unread):
            if handle.batch_id < batch_id:
                handle.salvage()
            else:
                handle.failed(reason)
        self._pool.reset()
        self._start_generation()
        self._moves.device_lost()

    def _give_up(self, batch_id: int, failure: NodesFailedError) -> NoReturn:
        """Nothing more is run here. Steps before `batch_id` can be read; everything else raises `failure`."""
        _log.error("nodes_failed", reason=str(failure), unread_steps=len(self._unread))
        self._failure = failure
        for handle in list(self._unread):
            if handle.batch_id < batch_id:
                handle.salvage()
            else:
                handle.abandoned(failure)
        self._unread.clear()
        raise failure

    def _start_generation(self) -> None:
        runtime_id, generation = self.identity
        identity = CacheIdentity(runtime_id, Generation(generation + 1))
        self._allocator.reset(identity)
        if self._window is not None:
            self._window.reset(identity)
        if self._states is not None:
            self._states.reset(identity)
        self._prepared.clear()
        self._carried.clear()
        self._rows.reset()
        self._sampling.reset()

    def _require_open(self, action: str) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_open:
            raise RuntimeClosedError(action=action)


def new_identity() -> CacheIdentity:
    """The identity of a runtime that has not lived before."""
    return CacheIdentity(RuntimeId(uuid.uuid4().hex[:12]), Generation(1))
