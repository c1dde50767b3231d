"""The running requests as arrays by runtime row, so that a decode step costs a few numpy calls for any batch size.

For a row that decodes:  known <= total <= end, and a dispatched step writes the KV of all but the last of total
    known    tokens whose ids the host has read
    total    known plus the token that a dispatched step will deliver
    end      total at which the request ends whatever its tokens are
    look_at  known from which on each token must be looked at: end, or 0 for a request with ends of its own

Tokens that were read lie in `unread` until their sequence is looked at: touching hundreds of sequences in every step
costs more than all the rest of settling it.
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
        self.end = np.zeros(num_rows, np.int32)
        self.look_at = np.zeros(num_rows, np.int32)
        self.num_pages = np.zeros(num_rows, np.int32)
        self.decoding = np.zeros(num_rows, np.bool_)
        self.unread = np.zeros((MAX_UNREAD, num_rows), np.int32)  # rows of equal age lie side by side
        self.handed_on = np.zeros(num_rows, np.int32)  # known tokens that the sequence has

    def seat(self, sequence: Sequence, num_pages: int, end: int) -> None:
        """The sequence got row `sequence.slot`, starting with `num_pages` cached pages."""
        slot = sequence.slot
        self.sequences[slot] = sequence
        self.generation[slot] = sequence.generation
        self.num_pages[slot] = num_pages
        self.end[slot] = end
        self.look_at[slot] = 0 if sequence.needs_attention else end
        self.decoding[slot] = False
        self.known[slot] = self.total[slot] = self.handed_on[slot] = sequence.known

    def clear(self, slot: int) -> None:
        """The row is nobody's; its sequence must be `up_to_date`."""
        assert self.known[slot] == self.handed_on[slot], "tokens would be lost"
        self.sequences[slot] = None
        self.generation[slot] = NOBODY
        self.decoding[slot] = False

    def start_decoding(self, slot: int) -> None:
        """The step that computes the row's last known token was dispatched; it delivers one token."""
        self.decoding[slot] = True
        self.total[slot] = self.known[slot] + 1

    def end_with_what_is_in_flight(self, slot: int) -> None:
        """The row decodes no more."""
        self.end[slot] = self.look_at[slot] = self.total[slot]

    def take_first_token(self, slot: int) -> None:
        """A step that was read ended the row's prefill; its sequence has been given the token."""
        self.known[slot] += 1
        self.handed_on[slot] += 1

    def ready_slots(self) -> np.ndarray:
        """(d,) int32 rows that decode in the next step: those whose end is not reached by what is in flight."""
        return np.flatnonzero(self.decoding & (self.total < self.end)).astype(np.int32)

    def decode_pages_needed(self, slots: np.ndarray) -> int:
        """Pages that decoding `slots` once takes: one for each row whose pages are full."""
        return int(np.count_nonzero(self.total[slots] > self.num_pages[slots] * self.page_size))

    def slots_with_room(self, slots: np.ndarray) -> np.ndarray:
        """(n,) int32: those of `slots` that can decode once without another page."""
        return slots[self.total[slots] <= self.num_pages[slots] * self.page_size]

    def decode_positions(self, slots: np.ndarray) -> np.ndarray:
        """(d,) int32: where the next step writes; the last token of `total` is its input."""
        return self.total[slots] - 1

    def advance(self, slots: np.ndarray) -> None:
        """A step that decodes `slots` was dispatched."""
        self.total[slots] += 1

    def take_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """A step that was read delivered one token for each of these rows, (n,) int32 each.

        -> (n,) bool: whether the row has reached the token from which on each must be looked at.
        """
        known = self.known[slots]
        waiting = known - self.handed_on[slots]
        self.unread[waiting, slots] = token_ids
        known += 1
        self.known[slots] = known
        if waiting.size and waiting.max() == MAX_UNREAD - 1:
            for slot in slots[waiting == MAX_UNREAD - 1].tolist():
                self.up_to_date(slot)
        return known >= self.look_at[slots]

    def up_to_date(self, slot: int) -> Sequence:
        """The row's sequence, with every token that was read for it."""
        sequence = self.seated(slot)
        waiting = self.known[slot] - self.handed_on[slot]
        if waiting:
            sequence.output.extend(self.unread[:waiting, slot].tolist())
            self.handed_on[slot] = self.known[slot]
        return sequence

    def in_flight(self, slot: int) -> bool:
        """Whether a dispatched step owes this row a token."""
        return bool(self.total[slot] > self.known[slot])

    def prefilling(self) -> list[Sequence]:
        """Those with known tokens still to compute, first come first. Costs nothing a row when there are none."""
        slots = np.flatnonzero((self.generation != NOBODY) & ~self.decoding).tolist()
        return sorted((self.seated(slot) for slot in slots), key=lambda seq: seq.rank)

    def running(self) -> list[Sequence]:
        """In order of rank: who came first first, within a priority."""
        return sorted((seq for seq in self.sequences if seq is not None), key=lambda seq: seq.rank)

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
            elif self.handed_on[slot] != sequence.known or not self._may_wait(slot):
                broken = (
                    f"known {self.known[slot]}, handed on {self.handed_on[slot]}, the sequence has {sequence.known}"
                )
            elif -(-self._kv_length(sequence) // self.page_size) > self.num_pages[slot]:
                broken = f"{self.num_pages[slot]} pages do not hold {self._kv_length(sequence)} tokens"
            if broken:
                raise IntegrityError(owner="RunningTable", broken=f"row {slot}: {broken}")

    def _kv_length(self, sequence: Sequence) -> int:
        """Tokens whose KV dispatched steps write."""
        return int(self.total[sequence.slot]) - 1 if self.decoding[sequence.slot] else sequence.computed

    def _may_wait(self, slot: int) -> bool:
        """Whether the row's count of tokens that its sequence has not been given is possible."""
        return 0 <= self.known[slot] - self.handed_on[slot] < (MAX_UNREAD if self.decoding[slot] else 1)
