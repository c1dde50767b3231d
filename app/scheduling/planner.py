"""Decides one step: which rows decode, which prompt chunks run, who is admitted, who must give way.

It changes nothing that cannot be undone: leases of admissions are released again when prepare refuses the plan. It
budgets in pages from what the last PreparedBatch left, plus recorded frees, plus what can be evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.core.batch import BatchPlan, BatchPlanBuilder, PageRewrite
from app.core.handles import RequestRuntimeHandle
from app.scheduler_adapter import Prefix, SchedulerAdapter
from app.scheduling.request import Sequence, Status
from app.scheduling.running_table import RunningTable
from app.scheduling.waiting import InBatchDedup, WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` tokens of a sequence from `start` on; `samples` when they reach the last known one."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(slots=True, kw_only=True)
class Draft:
    """One step being planned. `pages` is what prepare will have to reserve for it."""

    decode_slots: np.ndarray
    pages: int
    budget: int  # prompt tokens that may still join
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[tuple[Sequence, Prefix]] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        return bool(self.decode_slots.size or self.chunks)


@dataclass(slots=True)
class Outbox:
    """Decided, and to be told to the runtime with the next plan."""

    releases: list[RequestRuntimeHandle] = field(default_factory=list)
    rewrites: list[PageRewrite] = field(default_factory=list)

    def clear(self) -> None:
        self.releases.clear()
        self.rewrites.clear()


class Planner:
    def __init__(
        self,
        *,
        adapter: SchedulerAdapter,
        table: RunningTable,
        waiting: WaitingQueue,
        outbox: Outbox,
        chunk_tokens: int,
        retract: Callable[[Sequence], None],
        end_for_capacity: Callable[[Sequence], None],
    ) -> None:
        """`retract` puts a running sequence back into the queue; `end_for_capacity` ends one that fits no more."""
        self._adapter = adapter
        self._table = table
        self._waiting = waiting
        self._outbox = outbox
        self._chunk_tokens = chunk_tokens
        self._dedup = InBatchDedup(adapter, chunk_tokens)
        self._retract = retract
        self._end_for_capacity = end_for_capacity

    def draft(self, slots_left: int) -> Draft:
        """The next step. `slots_left`: rows that prepare can hand out, those of the outbox's releases included."""
        draft = self._draft_decodes()
        unfinished = self._table.prefilling()
        self._continue_prefills(draft, unfinished)
        if not draft.has_rows and unfinished:
            self._unblock_prefills(draft, unfinished)
        self._admit(draft, slots_left)
        return draft

    def undo(self, draft: Draft) -> None:
        """Prepare refused the plan: the admissions did not happen."""
        for sequence, _ in draft.admitted:
            self._adapter.release(sequence.request_id)

    def retract_last(self) -> bool:
        """Make the running sequence of last rank give way, unless it is the only one. -> whether one did."""
        running = self._table.running()
        if len(running) < 2:
            return False
        self._retract(running[-1])
        return True

    def build(self, draft: Draft) -> BatchPlan:
        table = self._table
        builder = BatchPlanBuilder(self._adapter.identity)
        builder.free(self._adapter.recorded_frees())
        for handle in self._outbox.releases:
            builder.release(handle)
        for rewrite in self._outbox.rewrites:
            builder.rewrite(rewrite)
        rows = {
            seq.request_id: builder.admit(prefix.extent, seq.tokens(), seq.prompt.size, seq.sampling)
            for seq, prefix in draft.admitted
        }
        slots = draft.decode_slots
        builder.decode(slots, table.generation[slots], table.decode_positions(slots))
        for chunk in draft.chunks:
            sequence = chunk.sequence
            slot = rows.get(sequence.request_id, sequence.slot)
            tokens = sequence.key.tokens()[chunk.start : chunk.start + chunk.length]
            builder.extend(slot, sequence.generation, chunk.start, tokens, samples=chunk.samples)
        return builder.build()

    def _draft_decodes(self) -> Draft:
        """All rows that can decode; when the pool is too full for that, the last in rank give way."""
        while True:
            slots = self._table.ready_slots()
            pages = self._table.decode_pages_needed(slots)
            if self._adapter.make_room(pages):
                return Draft(decode_slots=slots, pages=pages, budget=self._chunk_tokens)
            if not self.retract_last():
                self._end_for_capacity(self._table.running()[0])

    def _continue_prefills(self, draft: Draft, unfinished: list[Sequence]) -> None:
        for sequence in unfinished:
            if draft.budget == 0:
                return
            self._add_chunk(draft, sequence, self._table.num_pages[sequence.slot])

    def _unblock_prefills(self, draft: Draft, unfinished: list[Sequence]) -> None:
        """Nothing could run because half-done prompts hold all the pages: the last in rank give way to the first.

        A row that only waits for its last token is about to give its pages back: then this round runs nothing.
        """
        if len(unfinished) < self._table.num_running:
            return
        while not draft.chunks:
            if not self.retract_last():
                self._end_for_capacity(unfinished[0])
                return
            self._add_chunk(draft, unfinished[0], self._table.num_pages[unfinished[0].slot])

    def _admit(self, draft: Draft, slots_left: int) -> None:
        """Give rows to waiting sequences while rows, prompt budget and pages last; the first that does not fit ends it.

        A newcomer must fit with all of its known tokens and one more, beside what running prompts still need and one
        page of growth for each running row: admitting what would soon be retracted costs more than waiting.
        """
        if not len(self._waiting) or not slots_left or not draft.budget:
            return
        running = self._table.running()
        promised = sum(self._unreserved(seq, draft) for seq in running) + len(running)
        computing = [seq for seq in running if seq.unpublished]
        for sequence in self._waiting.in_order():
            if draft.budget == 0 or len(draft.admitted) == slots_left:
                return
            if self._dedup.should_wait(sequence, computing):
                continue
            prefix = self._adapter.admit(sequence.request_id, sequence.key)
            cached = prefix.num_tokens // self._adapter.page_size
            need = self._pages(sequence.known) - cached
            alone = not running and not draft.admitted
            if draft.pages + promised + need + (not alone) > self._adapter.reachable():
                self._adapter.release(sequence.request_id)
                if alone:
                    self._end_for_capacity(sequence)
                return
            sequence.computed = prefix.num_tokens
            draft.admitted.append((sequence, prefix))
            computing.append(sequence)
            before = draft.pages
            self._add_chunk(draft, sequence, cached)
            promised += 1 + need - (draft.pages - before)

    def _add_chunk(self, draft: Draft, sequence: Sequence, held_pages: int) -> None:
        """The sequence's next tokens, as many as budget and pages allow; none if not even one page is to be had."""
        start = sequence.computed
        length = min(sequence.known - start, draft.budget)
        if not self._adapter.make_room(draft.pages + self._pages(start + length) - held_pages):
            fitting = self._adapter.reachable() - draft.pages + held_pages
            length = min(length, fitting * self._adapter.page_size - start)
            if length <= 0:
                return
            self._adapter.make_room(draft.pages + self._pages(start + length) - held_pages)
        draft.pages += max(0, self._pages(start + length) - held_pages)
        draft.budget -= length
        samples = start + length == sequence.known
        draft.chunks.append(Chunk(sequence=sequence, start=start, length=length, samples=samples))

    def _unreserved(self, sequence: Sequence, draft: Draft) -> int:
        """Pages that a half-done prompt will still take after this step."""
        if sequence.status is not Status.PREFILL:
            return 0
        reserved = int(self._table.num_pages[sequence.slot])
        for chunk in draft.chunks:
            if chunk.sequence is sequence:
                reserved = max(reserved, self._pages(chunk.start + chunk.length))
        return max(0, self._pages(sequence.known) - reserved)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._adapter.page_size)
