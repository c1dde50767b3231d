"""Taking in what a step produced: its tokens go to the sequences, its pages to the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from app.core.batch import BatchCompletion, PageRewrite, StepHandle
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.draft import Chunk, Outbox
from app.scheduling.finish import FinishRule
from app.scheduling.limits import SchedulerLimits
from app.scheduling.observer import SchedulerObserver
from app.scheduling.request import FinishReason, Sequence
from app.scheduling.running_table import RunningTable


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A dispatched step and whom its rows belong to. Rows: decode rows, then chunks."""

    handle: StepHandle
    decode_slots: np.ndarray
    decode_generations: np.ndarray
    chunks: list[Chunk]
    chunk_places: list[tuple[int, int]]  # (slot, generation) of each chunk's row
    snapshot_slots: np.ndarray  # (rows,) int32, the snapshot of each row, 0 for none; empty without recurrent layers
    dispatched_ns: int

    @property
    def num_rows(self) -> int:
        return self.decode_slots.size + len(self.chunks)


class Settlement:
    """Settles dispatched steps in order, and remembers to whom a token is owed whose row is gone."""

    def __init__(
        self,
        *,
        adapter: SchedulerAdapter,
        table: RunningTable,
        outbox: Outbox,
        finish_rule: FinishRule,
        limits: SchedulerLimits,
        observer: SchedulerObserver,
        end: Callable[[Sequence, FinishReason, str | None], None],
    ) -> None:
        """`end` gives a sequence its terminal reply."""
        self._adapter = adapter
        self._table = table
        self._outbox = outbox
        self._finish_rule = finish_rule
        self._limits = limits
        self._observer = observer
        self._end = end
        self._owed: dict[tuple[int, int], Sequence] = {}  # retracted in flight, by the row they had
        self.num_tokens = 0  # output tokens taken in, ever

    @property
    def num_owed(self) -> int:
        return len(self._owed)

    def owe(self, sequence: Sequence) -> None:
        """The sequence leaves its row while a dispatched step computes a token for it."""
        sequence.owed = True
        self._owed[sequence.slot, sequence.generation] = sequence

    def forgive(self, sequence: Sequence) -> None:
        """The sequence ends without the token that it may be owed."""
        self._owed.pop((sequence.slot, sequence.generation), None)

    def forgive_all(self) -> None:
        """No dispatched step is left to pay."""
        for sequence in self._owed.values():
            sequence.owed = False
        self._owed.clear()

    def settle(self, step: InFlight, completion: BatchCompletion) -> None:
        """Of a step that did not fail. What has moved between tiers comes first: rows publish beside it."""
        if completion.transfers:
            self._adapter.tiers.ended(completion.transfers)
        if step.decode_slots.size:
            self._settle_decodes(step, completion)
        for index, chunk in enumerate(step.chunks):
            row = step.decode_slots.size + index
            snapshot = int(step.snapshot_slots[row]) if step.snapshot_slots.size else 0
            self._settle_chunk(chunk, step.chunk_places[index], row, snapshot, completion)

    def _settle_decodes(self, step: InFlight, completion: BatchCompletion) -> None:
        table, slots = self._table, step.decode_slots
        tokens = completion.token_ids[: slots.size]
        alive = table.generation[slots] == step.decode_generations
        rows = np.flatnonzero(alive)
        if rows.size < slots.size:
            slots, tokens = slots[rows], tokens[rows]
        self.num_tokens += int(slots.size)
        due = table.take_tokens(slots, tokens) | self._finish_rule.may_end(tokens)
        self._adapter.settle(slots, table.known[slots] - 1)
        if step.snapshot_slots.size:
            self._settle_snapshots(step, alive)
        for index in np.flatnonzero(due).tolist():
            self._after_token(table.up_to_date(int(slots[index])), int(rows[index]), completion)
        for row in np.flatnonzero(~alive).tolist():
            place = int(step.decode_slots[row]), int(step.decode_generations[row])
            self._pay_owed(place, row, completion)

    def _settle_snapshots(self, step: InFlight, alive: np.ndarray) -> None:
        """Publish what decoding rows have settled up to a snapshot; one whose row is gone is of no use."""
        snapshots = step.snapshot_slots[: step.decode_slots.size]
        for row in np.flatnonzero(snapshots).tolist():
            if alive[row]:
                sequence = self._table.up_to_date(int(step.decode_slots[row]))
                self._publish(sequence, sequence.known - 1, int(snapshots[row]))
            else:
                self._adapter.drop_snapshot(int(snapshots[row]))

    def _publish(self, sequence: Sequence, num_tokens: int, snapshot: int) -> None:
        """The first `num_tokens` tokens of a running sequence are settled."""
        published = self._adapter.publish(sequence.request_id, sequence.settled_key(num_tokens), snapshot)
        if published is None:
            return
        row = sequence.slot, sequence.generation
        self._outbox.published[row] = published.num_pages
        if published.pages.size:
            self._outbox.rewrites.append(
                PageRewrite(
                    slot=sequence.slot,
                    generation=sequence.generation,
                    first_page_index=published.first_page_index,
                    pages=published.pages,
                    window_pages=published.window_pages,
                )
            )

    def _settle_chunk(
        self, chunk: Chunk, place: tuple[int, int], row: int, snapshot: int, completion: BatchCompletion
    ) -> None:
        slot, generation = place
        sequence = chunk.sequence
        if self._table.generation[slot] != generation:
            self._adapter.drop_snapshot(snapshot)
            if chunk.samples:
                self._pay_owed(place, row, completion)
            return
        self._adapter.settle(slot, chunk.start + chunk.length)
        self._publish(sequence, chunk.start + chunk.length, snapshot)
        if chunk.samples:
            sequence.unpublished = False
            self.num_tokens += 1
            sequence.output.append(int(completion.token_ids[row]))
            self._table.take_first_token(slot)
            self._after_token(sequence, row, completion)

    def _pay_owed(self, place: tuple[int, int], row: int, completion: BatchCompletion) -> None:
        """A row that is nobody's any more: its sequence was retracted and gets its token, or ended and gets nothing."""
        sequence = self._owed.pop(place, None)
        if sequence is None:
            return
        sequence.owed = False
        self.num_tokens += 1
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
            self._end(sequence, reason, None)
        elif sequence.known >= self._limits.end_of(sequence):
            self._end(sequence, "length", None)
        elif sequence.capacity_error is not None:
            self._end(sequence, "capacity", sequence.capacity_error)
        elif sequence.request.streams:
            self._observer.streamed(self._finish_rule.delta(sequence))
