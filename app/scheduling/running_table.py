"""The running requests as arrays by runtime row, so that a decode step costs a few numpy calls for any batch size.

For a row that decodes:  known <= total,  kv = total - 1 right after planning
    known   tokens whose ids the host has read
    total   known plus the token that a dispatched step will deliver
    kv      tokens whose KV is written by dispatched steps
    end     total at which the request ends whatever its tokens are

Tokens that were read lie in `unread` rows until their sequence is looked at: touching hundreds of sequences in every
step costs more than all the rest of settling it.
"""

from __future__ import annotations

import numpy as np

from app.errors import IntegrityError
from app.scheduling.request import Sequence, Status

NOBODY = -1
MAX_UNREAD = 64  # tokens of a row that its sequence has not been given yet


class RunningTable:
    """Owned by the scheduler. A row is set when prepare admitted it, cleared when its request ends or is retracted."""

    def __init__(self, num_rows: int, page_size: int) -> None:
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.generation = np.full(num_rows, NOBODY, np.int32)
        self.known = np.zeros(num_rows, np.int32)
        self.total = np.zeros(num_rows, np.int32)
        self.kv = np.zeros(num_rows, np.int32)
        self.end = np.zeros(num_rows, np.int32)
        self.num_pages = np.zeros(num_rows, np.int32)
        self.decoding = np.zeros(num_rows, np.bool_)
        self.attention = np.zeros(num_rows, np.bool_)
        self.unread = np.zeros((num_rows, MAX_UNREAD), np.int32)
        self.num_unread = np.zeros(num_rows, np.int32)

    def seat(self, sequence: Sequence, num_pages: int, end: int) -> None:
        """The sequence got row `sequence.slot`, starting with `num_pages` cached pages."""
        slot = sequence.slot
        self.sequences[slot] = sequence
        self.generation[slot] = sequence.generation
        self.num_pages[slot] = num_pages
        self.end[slot] = end
        self.decoding[slot] = False
        self.attention[slot] = sequence.needs_attention
        self.known[slot] = self.total[slot] = sequence.known
        self.kv[slot] = sequence.computed

    def clear(self, slot: int) -> None:
        """The row is nobody's; its sequence must be `up_to_date`."""
        assert not self.num_unread[slot], "tokens would be lost"
        self.sequences[slot] = None
        self.generation[slot] = NOBODY
        self.decoding[slot] = False

    def start_decoding(self, slot: int) -> None:
        """The step that computes the row's last known token was dispatched; it delivers one token."""
        self.decoding[slot] = True
        self.kv[slot] = self.known[slot]
        self.total[slot] = self.known[slot] + 1

    def ready_slots(self) -> np.ndarray:
        """(d,) int32 rows that decode in the next step: those whose end is not reached by what is in flight."""
        return np.flatnonzero(self.decoding & (self.total < self.end)).astype(np.int32)

    def decode_pages_needed(self, slots: np.ndarray) -> int:
        """Pages that decoding `slots` once takes: one for each row whose pages are full."""
        return int(np.count_nonzero(self.kv[slots] >= self.num_pages[slots] * self.page_size))

    def advance(self, slots: np.ndarray) -> None:
        """A step that decodes `slots` was dispatched."""
        self.kv[slots] += 1
        self.total[slots] += 1

    def take_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """A step that was read delivered one token for each of these rows, (n,) int32 each."""
        counts = self.num_unread[slots]
        self.unread[slots, counts] = token_ids
        counts += 1
        self.num_unread[slots] = counts
        self.known[slots] += 1
        if counts.size and counts.max() == MAX_UNREAD:
            for slot in slots[counts == MAX_UNREAD].tolist():
                self.up_to_date(slot)

    def up_to_date(self, slot: int) -> Sequence:
        """The row's sequence, with every token that was read for it."""
        sequence = self.seated(slot)
        count = self.num_unread[slot]
        if count:
            sequence.output.extend(self.unread[slot, :count].tolist())
            self.num_unread[slot] = 0
        return sequence

    def in_flight(self, slot: int) -> bool:
        """Whether a dispatched step owes this row a token."""
        return bool(self.total[slot] > self.known[slot])

    def prefilling(self) -> list[Sequence]:
        """Those with known tokens still to compute, oldest first. Costs nothing a row when there are none."""
        slots = np.flatnonzero((self.generation != NOBODY) & ~self.decoding).tolist()
        return sorted((self.seated(slot) for slot in slots), key=lambda seq: seq.arrival)

    def running(self) -> list[Sequence]:
        """Oldest first."""
        return sorted((seq for seq in self.sequences if seq is not None), key=lambda seq: seq.arrival)

    @property
    def num_running(self) -> int:
        return int((self.generation != NOBODY).sum())

    def seated(self, slot: int) -> Sequence:
        """The sequence of a row that has one."""
        sequence = self.sequences[slot]
        assert sequence is not None, "a row with a generation has a sequence"
        return sequence

    def check_integrity(self) -> None:
        for slot, sequence in enumerate(self.sequences):
            if sequence is None:
                if self.generation[slot] != NOBODY or self.decoding[slot]:
                    raise IntegrityError(owner="RunningTable", broken=f"row {slot} is nobody's but not clear")
                continue
            broken = None
            if sequence.slot != slot or sequence.generation != self.generation[slot]:
                broken = "the sequence sits elsewhere"
            elif sequence.status is Status.DECODE and not self.known[slot] <= self.total[slot] <= self.end[slot]:
                broken = f"known {self.known[slot]}, total {self.total[slot]}, end {self.end[slot]}"
            elif self.known[slot] != sequence.known + self.num_unread[slot]:
                broken = f"known {self.known[slot]} but the sequence has {sequence.known} + {self.num_unread[slot]}"
            elif -(-int(max(self.kv[slot], sequence.computed)) // self.page_size) > self.num_pages[slot]:
                broken = f"{self.num_pages[slot]} pages do not hold {self.kv[slot]} tokens"
            if broken:
                raise IntegrityError(owner="RunningTable", broken=f"row {slot}: {broken}")
