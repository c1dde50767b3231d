"""Continuous batching over one runtime, one step ahead of it.

    step k:   plan k+1  ->  prepare, dispatch k+1 (runs behind k)  ->  wait for k  ->  settle k

Rules that make this safe:
  (a) An end known when planning leaves the row out. One known from tokens is seen a step late: the surplus token is
      dropped and its page given back unpublished.
  (b) Pages are published when the completion of the step that wrote them has been read. What is freed or rewritten
      then travels with the next plan, behind every step already dispatched.
  (c) A sequence retracted in flight keeps the token that is owed to it and is not admitted before that is read. An
      aborted one is dropped. Nothing follows a terminal reply.
  (d) If prepare refuses a plan, the youngest running sequence gives way and the step is planned again, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import structlog

from app.core.batch import BatchCompletion, PageRewrite, PreparedBatch, StepHandle
from app.core.handles import Generation, RequestRuntimeHandle
from app.errors import CapacityError, IntegrityError, RequestError
from app.runtime.interface import RuntimeInterface
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.finish import FinishRule
from app.scheduling.limits import SchedulerLimits
from app.scheduling.planner import Chunk, Draft, Outbox, Planner
from app.scheduling.request import FinishReason, Request, RequestOutput, Sequence, Status
from app.scheduling.running_table import RunningTable
from app.scheduling.waiting import WaitingQueue

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A dispatched step and whom its rows belong to. Rows: decode rows, then chunks."""

    handle: StepHandle
    decode_slots: np.ndarray
    decode_generations: np.ndarray
    chunks: list[Chunk]
    chunk_places: list[tuple[int, int]]  # (slot, generation) of each chunk's row


class Scheduler:
    """Serves requests with one cache and one runtime. Single-threaded: one thread calls every method."""

    def __init__(
        self,
        *,
        adapter: SchedulerAdapter,
        runtime: RuntimeInterface,
        finish_rule: FinishRule,
        limits: SchedulerLimits,
    ) -> None:
        self._adapter = adapter
        self._runtime = runtime
        self._finish_rule = finish_rule
        self._limits = limits
        self._table = RunningTable(limits.max_running_requests, adapter.page_size)
        self._waiting = WaitingQueue(limits.schedule_policy, adapter)
        self._outbox = Outbox()
        self._planner = Planner(
            adapter=adapter,
            table=self._table,
            waiting=self._waiting,
            outbox=self._outbox,
            chunk_tokens=limits.chunk_tokens,
            retract=self._retract,
            end_for_capacity=self._end_for_capacity,
        )
        self._sequences: dict[str, Sequence] = {}
        self._owed: dict[tuple[int, int], Sequence] = {}  # retracted in flight, by the row they had
        self._in_flight: list[_InFlight] = []  # oldest first, at most two
        self._slots_left = limits.max_running_requests
        self._identity = adapter.identity
        self._arrivals = 0
        self._outputs: list[RequestOutput] = []
        self.num_retractions = 0

    def add(self, request: Request) -> None:
        """Queue a request. RequestError, naming the field and the numbers, if it can never be served."""
        self._limits.check(request, pool_tokens=self._adapter.capacity * self._adapter.page_size)
        if request.request_id in self._sequences:
            raise RequestError(field="request_id", value=request.request_id, allowed="an id that is not being served")
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._limits.seed_of(self._arrivals))
        sequence = Sequence(request, sampling, self._arrivals)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        if sampling.max_tokens == 0:
            self._end(sequence, "length")
            return
        self._waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; a token in flight for it is dropped. Unknown ids: nothing."""
        self._notice_new_pool()
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")

    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._outputs or self._outbox.releases)

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, then take in the one before. -> the requests that ended, in order of ending."""
        self._notice_new_pool()
        launched = self._launch()
        self._notice_new_pool()
        allowed = 1 if launched and self._limits.overlap else 0
        while len(self._in_flight) > allowed:
            self._settle_oldest()
        if self._limits.check_invariants:
            self.check_integrity()
        outputs, self._outputs = self._outputs, []
        return outputs

    def flush_cache(self) -> int:
        """Drop all cached prefixes and return the pages freed. LockedPageError while a request reads one."""
        self._notice_new_pool()
        return self._adapter.flush()

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ledger(self) -> dict[str, int]:
        """Pages by class; the classes add up to the pool. For checks and reports: O(pages)."""
        return {name: int(pages.size) for name, pages in self._adapter.ledger().items()}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page has exactly one owner and every row is what it seems. O(pages)."""
        self._adapter.check_integrity()
        self._table.check_integrity()
        running = {seq.request_id for seq in self._table.running()}
        waiting = {seq.request_id for seq in self._waiting}
        owed = sum(seq.owed for seq in self._waiting)
        rows = self._limits.max_running_requests - self._slots_left
        for broken, name in (
            (running & waiting or running | waiting != self._sequences.keys(), "a request runs and waits, or neither"),
            (owed != len(self._owed) or (owed and not self._in_flight), "a token is owed that no step delivers"),
            (rows != len(running) + len(self._outbox.releases), "a row is neither running nor about to be released"),
        ):
            if broken:
                raise IntegrityError(owner="Scheduler", broken=name)

    # -- planning and dispatching ------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Plan, prepare and dispatch the next step. -> whether there was one."""
        draft = self._planner.draft(self._slots_available())
        if not draft.has_rows and (self._sequences or self._in_flight or not self._outbox.releases):
            return False
        try:
            prepared = self._prepare(draft)
        except CapacityError as refusal:
            again = self._plan_again(refusal)
            if again is None:
                return False
            draft, prepared = again
        places = self._commit(draft, prepared)
        slots = draft.decode_slots
        step = _InFlight(
            handle=self._runtime.execute_batch(prepared),
            decode_slots=slots,
            decode_generations=self._table.generation[slots],
            chunks=draft.chunks,
            chunk_places=places,
        )
        self._in_flight.append(step)
        return True

    def _notice_new_pool(self) -> None:
        """The pool may be another one: a step failed as it was dispatched, or the runtime was closed and opened."""
        if self._adapter.identity != self._identity:
            self._lose_pool("the runtime was reopened")

    def _prepare(self, draft: Draft) -> PreparedBatch:
        """All or nothing on this side too: a plan that is refused leaves no lease behind."""
        try:
            return self._runtime.prepare_batch(self._planner.build(draft))
        except Exception:
            self._planner.undo(draft)
            raise

    def _plan_again(self, refusal: CapacityError) -> tuple[Draft, PreparedBatch] | None:
        """Rule (d). Refused twice means that this round runs nothing; what is in flight will change the picture."""
        _log.warning("plan_refused", reason=str(refusal), running=self.num_running, waiting=self.num_waiting)
        retracted = self._planner.retract_youngest()
        draft = self._planner.draft(0 if retracted else self._slots_available())  # it must not come back at once
        if not draft.has_rows:
            return None
        try:
            return draft, self._prepare(draft)
        except CapacityError:
            if self._in_flight:
                return None
            raise  # nothing can change any more: budget and runtime disagree, a bug of ours

    def _slots_available(self) -> int:
        return self._slots_left + len(self._outbox.releases)

    def _commit(self, draft: Draft, prepared: PreparedBatch) -> list[tuple[int, int]]:
        """The plan is going to run: note what it reserved. -> the row of each chunk."""
        self._outbox.clear()
        self._slots_left = prepared.slots_left
        slots, generations = prepared.admitted_slots.tolist(), prepared.admitted_generations.tolist()
        for (sequence, prefix), slot, generation in zip(draft.admitted, slots, generations, strict=True):
            self._waiting.remove(sequence)
            sequence.slot, sequence.generation = slot, generation
            sequence.status = Status.PREFILL
            sequence.unpublished = True
            if sequence.cached_tokens is None:
                sequence.cached_tokens = prefix.num_tokens
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
            self._adapter.extend(sequence.request_id, prepared.pages[offsets[row] : offsets[row + 1]])
        self._table.num_pages[slots] += counts

    # -- taking in what a step produced ------------------------------------------------------------------------------

    def _settle_oldest(self) -> None:
        step = self._in_flight[0]
        completion = step.handle.wait()
        self._in_flight.pop(0)  # not before: the wait may be interrupted, and is then repeated
        if completion.failure is None:
            self._settle(step, completion)
        else:
            self._lose_pool(completion.failure)

    def _settle(self, step: _InFlight, completion: BatchCompletion) -> None:
        if step.decode_slots.size:
            self._settle_decodes(step, completion)
        for index, chunk in enumerate(step.chunks):
            self._settle_chunk(chunk, step.chunk_places[index], step.decode_slots.size + index, completion)

    def _settle_decodes(self, step: _InFlight, completion: BatchCompletion) -> None:
        table, slots = self._table, step.decode_slots
        tokens = completion.token_ids[: slots.size]
        alive = table.generation[slots] == step.decode_generations
        rows = np.flatnonzero(alive)
        if rows.size < slots.size:
            slots, tokens = slots[rows], tokens[rows]
        due = table.take_tokens(slots, tokens) | self._finish_rule.may_end(tokens)
        for index in np.flatnonzero(due).tolist():
            self._after_token(table.up_to_date(int(slots[index])), int(rows[index]), completion)
        for row in np.flatnonzero(~alive).tolist():
            place = int(step.decode_slots[row]), int(step.decode_generations[row])
            self._pay_owed(place, row, completion)

    def _settle_chunk(self, chunk: Chunk, place: tuple[int, int], row: int, completion: BatchCompletion) -> None:
        slot, generation = place
        sequence = chunk.sequence
        if self._table.generation[slot] != generation:
            if chunk.samples:
                self._pay_owed(place, row, completion)
            return
        rewrite = self._adapter.publish(sequence.request_id, sequence.settled_key(chunk.start + chunk.length))
        if rewrite is not None:
            self._outbox.rewrites.append(
                PageRewrite(
                    slot=slot, generation=generation, first_page_index=rewrite.first_page_index, pages=rewrite.pages
                )
            )
        if chunk.samples:
            sequence.unpublished = False
            sequence.output.append(int(completion.token_ids[row]))
            self._table.take_first_token(slot)
            self._after_token(sequence, row, completion)

    def _pay_owed(self, place: tuple[int, int], row: int, completion: BatchCompletion) -> None:
        """A row that is nobody's any more: its sequence was retracted and gets its token, or ended and gets nothing."""
        sequence = self._owed.pop(place, None)
        if sequence is None:
            return
        sequence.owed = False
        sequence.output.append(int(completion.token_ids[row]))
        sequence.rekey()
        self._after_token(sequence, row, completion)

    def _after_token(self, sequence: Sequence, row: int, completion: BatchCompletion) -> None:
        """The sequence has one more token: the last of its output."""
        sequence.note_first_token()
        if sequence.sampling.logprobs is not None:
            sequence.add_logprobs(row, completion)
        reason = self._finish_rule.reason(sequence)
        if reason is not None:
            self._end(sequence, reason)
        elif sequence.known >= self._limits.end_of(sequence):
            self._end(sequence, "length")
        elif sequence.capacity_error is not None:
            self._end(sequence, "capacity", sequence.capacity_error)

    def _lose_pool(self, reason: str) -> None:
        """The pool is gone: what ran is over, what waits is served from the new one.

        Tokens of steps that ran before the failure are taken in first; with no lease left, nothing of them is cached.
        """
        self._adapter.reset()
        self._identity = self._adapter.identity
        for step in self._in_flight:
            completion = step.handle.wait()
            if completion.failure is None:
                self._settle(step, completion)
            else:
                reason = completion.failure
        self._in_flight.clear()
        for sequence in self._owed.values():
            sequence.owed = False
        self._owed.clear()
        running = self._table.running()
        _log.error("requests_failed", reason=reason, failed=len(running), waiting=self.num_waiting)
        for sequence in running:
            self._end(sequence, "error", reason)
        self._outbox.clear()
        self._slots_left = self._limits.max_running_requests

    # -- leaving a row -----------------------------------------------------------------------------------------------

    def _retract(self, sequence: Sequence) -> None:
        """Back to the queue with the tokens it has; its pages are freed and computed again later. Rule (c)."""
        self._table.up_to_date(sequence.slot)
        if self._table.in_flight(sequence.slot):
            sequence.owed = True
            self._owed[sequence.slot, sequence.generation] = sequence
        self._adapter.release(sequence.request_id)
        self._vacate(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.unpublished = False
        sequence.dedup_waits = 0
        sequence.rekey()
        self._waiting.add(sequence)
        self.num_retractions += 1

    def _end_for_capacity(self, sequence: Sequence) -> None:
        """The pool cannot hold one token more of it even alone. A token in flight is still waited for."""
        if sequence.status is not Status.WAITING:
            self._table.up_to_date(sequence.slot)
        error = (
            f"the KV pool of {self._adapter.capacity} pages of {self._adapter.page_size} tokens is too small for more "
            f"than {sequence.known} tokens of this request"
        )
        if sequence.status is Status.DECODE and self._table.in_flight(sequence.slot):
            sequence.capacity_error = error
            self._table.end_with_what_is_in_flight(sequence.slot)
        else:
            self._end(sequence, "capacity", error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The one way to a terminal reply. Settled tokens are published when the request ended by itself."""
        if sequence.status is Status.WAITING:
            self._owed.pop((sequence.slot, sequence.generation), None)
            self._waiting.remove(sequence)
        else:
            self._table.up_to_date(sequence.slot)
            # The last token's KV is not written, or was written by a step whose token is dropped.
            if sequence.status is Status.DECODE and reason in ("stop", "length", "capacity"):
                self._adapter.finish(sequence.request_id, sequence.settled_key(sequence.known - 1))
            self._adapter.release(sequence.request_id)
            self._vacate(sequence)
        sequence.status = Status.ENDED
        del self._sequences[sequence.request_id]
        self._outputs.append(self._finish_rule.output(sequence, reason, error))

    def _vacate(self, sequence: Sequence) -> None:
        """Its row goes back with the next plan, and nothing more is told about it."""
        slot = sequence.slot
        handle = RequestRuntimeHandle(self._identity.runtime_id, slot, Generation(sequence.generation))
        self._outbox.releases.append(handle)
        self._outbox.rewrites = [rewrite for rewrite in self._outbox.rewrites if rewrite.slot != slot]
        self._table.clear(slot)
