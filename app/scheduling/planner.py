"""Decides one step: which rows decode, which prompt chunks run, who is admitted, who must give way.

It changes nothing that cannot be undone: leases of admissions are released again when prepare refuses the plan. It
budgets in pages from what the last PreparedBatch left, plus recorded frees, plus what can be evicted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.core.batch import BatchPlan, BatchPlanBuilder
from app.core.transfers import PageCounts
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.ahead import RestoresAhead
from app.scheduling.draft import Chunk, Draft, Outbox
from app.scheduling.request import Sequence, Status
from app.scheduling.restoring import Promised, Restorer
from app.scheduling.running_table import RunningTable
from app.scheduling.waiting import InBatchDedup, WaitingQueue


class Planner:
    def __init__(
        self,
        *,
        adapter: SchedulerAdapter,
        table: RunningTable,
        waiting: WaitingQueue,
        outbox: Outbox,
        chunk_tokens: int,
        snapshot_interval: int | None,
        retract: Callable[[Sequence], None],
        end_for_capacity: Callable[[Sequence], None],
    ) -> None:
        """`retract` puts a running sequence back into the queue; `end_for_capacity` ends one that fits no more.

        snapshot_interval: tokens between snapshots of recurrent states; None takes none.
        """
        self._snapshot_interval = snapshot_interval
        self._adapter = adapter
        self._table = table
        self._waiting = waiting
        self._outbox = outbox
        self._chunk_tokens = chunk_tokens
        self._restorer = Restorer(adapter)
        self._ahead = RestoresAhead(adapter, self._restorer, waiting)
        self._dedup = InBatchDedup(adapter, chunk_tokens, snapshot_interval or adapter.page_size)
        self._retract = retract
        self._end_for_capacity = end_for_capacity

    def draft(self, slots_left: int, *, steps_in_flight: int) -> Draft:
        """The next step. `slots_left`: rows that prepare can hand out, those of the outbox's releases included.

        Where a window pool is full and a step in flight is about to let windows move on, nothing is to run this round.
        """
        may_wait = bool(steps_in_flight and self._adapter.window_pages_kept)
        draft = self._draft_decodes(may_wait)
        if draft is None:
            return self._draft_of(np.empty(0, np.int32), 0)
        unfinished = self._table.prefilling()
        self._continue_prefills(draft, unfinished)
        if not draft.has_rows and unfinished:
            if may_wait or self._adapter.is_restoring:
                return draft
            self._unblock_prefills(draft, unfinished)
        self._admit(draft, slots_left)
        self._make_room_for_snapshots(draft)
        return draft

    def look_ahead(self, draft: Draft) -> None:
        """Begin restores of those who are next in the queue, behind the rows of `draft`: for when a row is free."""
        if not draft.has_rows or not self._ahead.has_candidates():
            return
        half_done = self._table.prefilling()
        newcomers = [sequence for sequence, _ in draft.admitted]
        pages = sum(self._unreserved(sequence, draft) for sequence in half_done)
        for sequence, prefix in draft.admitted:
            planned = sum(chunk.length for chunk in draft.chunks if chunk.sequence is sequence)
            pages += self._pages(sequence.known) - self._pages(prefix.num_tokens + planned)
        window_pages = sum(self._unreserved_window(sequence) for sequence in half_done)
        window_pages += self._adapter.window_pages_kept * len(newcomers)
        num_rows = self._table.num_running + len(newcomers)
        self._ahead.begin(draft, promised=PageCounts(pages, window_pages), num_rows=num_rows)
        self._make_room_for_snapshots(draft)

    def undo(self, draft: Draft) -> None:
        """The plan is not prepared: the admissions and the restores did not happen."""
        for sequence, _ in draft.admitted:
            self._adapter.release(sequence.request_id)
        self._restorer.undo(draft)

    def retract_last(self) -> bool:
        """Make the running sequence of last rank give way, unless it is the only one. -> whether one did."""
        running = self._table.running()
        if len(running) < 2:
            return False
        self._retract(running[-1])
        return True

    def build(self, draft: Draft, wait_s: float) -> BatchPlan:
        """wait_s: how long a plan without rows may wait for what is on its way between tiers."""
        table = self._table
        builder = BatchPlanBuilder(self._adapter.identity)
        builder.free(*self._adapter.recorded_frees())
        for handle in self._outbox.releases:
            builder.release(handle)
        for rewrite in self._outbox.rewrites:
            builder.rewrite(rewrite)
        if self._outbox.published:
            builder.publish(self._outbox.published)
        rows = {
            seq.request_id: builder.admit(
                prefix.extent, seq.tokens(), seq.prompt.size, seq.sampling, prefix.window_pages, prefix.state
            )
            for seq, prefix in draft.admitted
        }
        slots = draft.decode_slots
        builder.decode(slots, table.generation[slots], table.decode_positions(slots))
        for chunk in draft.chunks:
            sequence = chunk.sequence
            slot = rows.get(sequence.request_id, sequence.slot)
            tokens = sequence.key.tokens()[chunk.start : chunk.start + chunk.length]
            builder.extend(slot, sequence.generation, chunk.start, tokens, samples=chunk.samples)
        if self._snapshot_interval:
            builder.snapshot(draft.snapshots())
        builder.transfer(self._adapter.tiers.plan(wait_s))
        return builder.build()

    def _draft_decodes(self, may_wait: bool) -> Draft | None:
        """All rows that can decode; when the pool is too full for that, the last in rank give way. None to wait.

        Nobody gives way to a restore: its pages can be evicted once it has landed, and who needs one waits for that.
        """
        while True:
            slots = self._table.ready_slots()
            pages = self._table.decode_pages_needed(slots)
            if self._adapter.make_room(pages):
                return self._draft_of(slots, pages)
            if may_wait:
                return None
            if self._adapter.is_restoring:
                return self._draft_of(self._table.slots_with_room(slots), 0)
            if not self.retract_last():
                self._end_for_capacity(self._table.running()[0])

    def _draft_of(self, slots: np.ndarray, pages: int) -> Draft:
        snapshots = np.zeros(slots.size, np.bool_)
        if self._snapshot_interval:
            snapshots = (self._table.decode_positions(slots) + 1) % self._snapshot_interval == 0
        return Draft(decode_slots=slots, decode_snapshots=snapshots, pages=pages, budget=self._chunk_tokens)

    def _continue_prefills(self, draft: Draft, unfinished: list[Sequence]) -> None:
        for sequence in unfinished:
            if draft.budget == 0:
                return
            self._add_chunk(draft, sequence, int(self._table.num_pages[sequence.slot]))

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
            self._add_chunk(draft, unfinished[0], int(self._table.num_pages[unfinished[0].slot]))

    def _admit(self, draft: Draft, slots_left: int) -> None:
        """Give rows to waiting sequences while rows, prompt budget and pages last; the first that does not fit ends it.

        A newcomer must fit with all of its known tokens and one more, beside what running prompts still need and one
        page of growth for each running row: admitting what would soon be retracted costs more than waiting.

        One whose prefix is better brought back first fits by the same measure, and keeps its place, its row and its
        room until that has landed; those behind it get what is left.
        """
        if not len(self._waiting) or not slots_left or not draft.budget:
            return
        running = self._table.running()
        promised = Promised(
            pages=sum(self._unreserved(seq, draft) for seq in running) + len(running),
            window_pages=sum(self._unreserved_window(seq) for seq in running),
        )
        computing = [seq for seq in running if seq.unpublished]
        alone = not running and not self._adapter.is_restoring
        for sequence in self._waiting.in_order():
            if draft.budget == 0 or len(draft.admitted) + promised.rows >= slots_left:
                return
            if self._restorer.holds_back(sequence):
                promised.add(sequence.promised)
                continue
            if self._dedup.should_wait(sequence, computing):
                continue
            prefix = self._adapter.admit(sequence.request_id, sequence.key)
            cached = prefix.num_tokens // self._adapter.page_size
            need = self._pages(sequence.known) - cached
            window_need = min(need, self._adapter.window_pages_kept)
            alone = alone and not draft.admitted and not draft.restores
            room = PageCounts(
                self._adapter.reachable_full() - draft.restoring.pages - draft.pages - promised.pages,
                self._adapter.reachable_window()
                - draft.restoring.window_pages
                - draft.pages
                - (0 if alone else promised.window_pages + window_need),
                self._adapter.reachable_snapshots() - draft.restoring.states,
            )
            if need + (not alone) > room.pages or (room.window_pages < 0 and not alone):
                self._adapter.release(sequence.request_id)
                if alone:
                    self._end_for_capacity(sequence)
                return
            is_wanted = self._restorer.wanted(sequence, prefix.num_tokens)
            if is_wanted and self._restorer.begin(draft, sequence, room, PageCounts(need, window_need)):
                promised.add(sequence.promised)
                continue
            sequence.computed = prefix.num_tokens
            draft.admitted.append((sequence, prefix))
            computing.append(sequence)
            before = draft.pages
            self._add_chunk(draft, sequence, cached)
            promised.pages += 1 + need - (draft.pages - before)
            promised.window_pages += max(0, window_need - (draft.pages - before))

    def _add_chunk(self, draft: Draft, sequence: Sequence, held_pages: int) -> None:
        """The sequence's next tokens, as many as budget and pages allow; none if not even one page is to be had."""
        start = sequence.computed
        length = min(sequence.known - start, draft.budget)
        restoring = draft.restoring
        if not self._adapter.make_room(draft.pages + self._pages(start + length) - held_pages, restoring):
            fitting = self._adapter.reachable(restoring) - draft.pages + held_pages
            length = min(length, fitting * self._adapter.page_size - start)
            if length <= 0:
                return
            self._adapter.make_room(draft.pages + self._pages(start + length) - held_pages, restoring)
        length, snapshot = self._to_snapshot(start, length)
        draft.pages += max(0, self._pages(start + length) - held_pages)
        draft.budget -= length
        samples = start + length == sequence.known
        draft.chunks.append(Chunk(sequence=sequence, start=start, length=length, samples=samples, snapshot=snapshot))

    def _make_room_for_snapshots(self, draft: Draft) -> None:
        if draft.restoring.states:
            draft.max_snapshots = max(0, self._adapter.reachable_snapshots() - draft.restoring.states)
        if self._snapshot_interval:
            self._adapter.make_room_for_snapshots(int(draft.snapshots().sum()) + draft.restoring.states)

    def _to_snapshot(self, start: int, length: int) -> tuple[int, bool]:
        """The length up to the last point at which a snapshot is due, and whether there is one."""
        if self._snapshot_interval is None:
            return length, False
        point = (start + length) // self._snapshot_interval * self._snapshot_interval
        return (point - start, True) if point > start else (length, False)

    def _unreserved_window(self, sequence: Sequence) -> int:
        """Window pages that a running row may still take before it gives as many back, or ends."""
        to_the_window = self._adapter.window_pages_kept - self._adapter.num_own_window_pages(sequence.request_id)
        slot = sequence.slot
        to_the_end = self._pages(int(self._table.end[slot])) - int(self._table.num_pages[slot])
        return max(0, min(to_the_window, to_the_end))

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
