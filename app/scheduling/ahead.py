"""Restores for requests that are next in the queue, begun while others have the rows, the prompt budget or the room.

So their copies run behind the steps of those that run, and a row that gets free has its prefix on the device already.
What has landed is the cache's and unlocked: whoever runs may have it evicted, nobody gives way to it, and a prefix that
is gone again by the time a row is free is restored then, or computed.
"""

from __future__ import annotations

from itertools import islice

from app.core.transfers import PageCounts
from app.scheduler_adapter import NOTHING, SchedulerAdapter
from app.scheduling.draft import Draft
from app.scheduling.request import Sequence
from app.scheduling.restoring import Restorer
from app.scheduling.waiting import WaitingQueue

LOOK_AHEAD = 4  # waiting requests, the first in the queue's order
LEEWAY_TOKENS = 32  # that each running row may gain while a copy is under way


class RestoresAhead:
    """One for each waiting request that has something to restore; in the queue's order, and nobody past another.

    A restore ahead takes free pages and such as can be evicted, but leaves what half-done prompts still need, what
    running rows grow by meanwhile, and what was restored ahead for those before it.
    """

    def __init__(self, adapter: SchedulerAdapter, restorer: Restorer, waiting: WaitingQueue) -> None:
        self._adapter = adapter
        self._restorer = restorer
        self._waiting = waiting
        self._leeway_pages = -(-LEEWAY_TOKENS // adapter.page_size)
        self._settled_at = -1  # the queue as it was when nobody in front was left to look at

    def has_candidates(self) -> bool:
        """Whether anybody may be there for whom it was not tried. O(1): asked before every step."""
        return bool(len(self._waiting)) and self._adapter.has_tiers and self._waiting.version != self._settled_at

    def begin(self, draft: Draft, *, promised: PageCounts, num_rows: int) -> None:
        """For those in front that `draft` does not admit. O(their keys), until each was looked at once.

        promised: what the prompts of the `num_rows` rows still need after this step.
        """
        admitted = {sequence.request_id for sequence, _ in draft.admitted}
        candidates = (each for each in self._waiting.in_order() if each.request_id not in admitted)
        room = self._room(draft, promised, num_rows)
        is_settled = True
        for sequence in list(islice(candidates, LOOK_AHEAD)):
            if self._restorer.holds_back(sequence):
                is_settled = False
                room = _less(room, sequence.promised)
            elif sequence.ahead is None:
                is_settled = False
                if room.pages <= 0 or not self._try(draft, sequence, room):
                    return
                room = _less(room, sequence.ahead or NOTHING)
            else:
                room = _less(room, sequence.ahead)
        if is_settled:
            self._settled_at = self._waiting.version

    def _room(self, draft: Draft, promised: PageCounts, num_rows: int) -> PageCounts:
        adapter, growth = self._adapter, num_rows * self._leeway_pages
        return PageCounts(
            adapter.reachable_full() - draft.pages - draft.restoring.pages - promised.pages - growth,
            adapter.reachable_window() - draft.pages - draft.restoring.window_pages - promised.window_pages - growth,
            adapter.reachable_snapshots() - int(draft.snapshots().sum()) - draft.restoring.states,
        )

    def _try(self, draft: Draft, sequence: Sequence, room: PageCounts) -> bool:
        """-> whether it was: not if it does not fit, and so nobody behind gets the room before it."""
        adapter, request_id = self._adapter, sequence.request_id
        wanted = self._restorer.wanted(sequence, adapter.probe(sequence.key))
        if not wanted:
            sequence.ahead = NOTHING
            return True
        if not all(need <= left for need, left in zip(wanted, room, strict=True)):
            return False
        prefix = adapter.admit(request_id, sequence.key)
        pages = -(-sequence.known // adapter.page_size) - prefix.num_tokens // adapter.page_size
        need = PageCounts(pages, min(pages, adapter.window_pages_kept))
        sequence.ahead = self._restorer.begin(draft, sequence, room, need)
        if not sequence.ahead:
            adapter.release(request_id)
        return True


def _less(room: PageCounts, taken: PageCounts) -> PageCounts:
    return PageCounts(*(left - each for left, each in zip(room, taken, strict=True)))
